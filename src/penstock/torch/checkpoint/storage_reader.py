"""``StorageReader``, through which ``torch.distributed.checkpoint.load`` reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from penstock.checkpoints import layout
from penstock.checkpoints.directory import (
    REPLACED_MAX,
    check_files,
    check_metadata,
    is_replaced,
    list_directory,
    read_manifest,
    read_metadata,
)
from penstock.checksums.crc32c import crc32c
from penstock.errors import AccessDeniedError, CheckpointError, ObjectChangedError, ObjectMissingError
from penstock.torch.checkpoint.metadata import decode_metadata
from penstock.torch.checkpoint.place import PlacedStorage
from penstock.torch.checkpoint.plan_reading import PlanReader

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from penstock.checkpoints import CheckpointManifest
    from penstock.errors import DataError, StoreError
    from penstock.store import Store
    from penstock.types import ObjectInfo


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which commit marker a rank has read, and which bytes of which files it wants; each rank sends it to the coordinator."""

    metadata_crc: int
    ends: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Versions:
    """Which versions of its files a rank reads, so that it never mixes two; the coordinator sends it to each rank."""

    files: dict[str, ObjectInfo]


class StorageReader(PlacedStorage, TorchStorageReader):
    """Reads distributed checkpoints straight from a store: ``dcp.load(state_dict, storage_reader=StorageReader(url))``.

    It reads checkpoints of ``StorageWriter``, and those that PyTorch's ``FileSystemWriter`` or other writers of its format left
    in a store. Each rank reads the ranges that its plan needs, many at once, straight into the memory of the tensors if they
    are contiguous, on the CPU, and of the saved dtype. Checkpoints of ``StorageWriter`` are verified: before anything is
    loaded, that all files are there with their sizes and belong to one save; while loading, the checksum of every byte. Every
    rank creates its own reader.

    Args:
        url: URL of the checkpoint's directory, with any scheme that ``penstock.connect`` supports.
        weights_only: Whether objects that are not tensors may hold only tensors and plain data, as for ``torch.load``. With
            False, the checkpoint can run any code.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: The URL or an option is not valid.

    Cost: Two small requests per rank and a listing by the coordinator; then a request per 8 MiB, in parallel, where small
        ranges near each other are read by one. Tensors that cannot be read into directly pass through 256 MiB of memory, or
        that of the largest one if it was not written by ``StorageWriter``.
    """

    def __init__(self, url: str | os.PathLike[str], *, weights_only: bool = True, **options: Any) -> None:
        super().__init__()
        self._weights_only = weights_only
        self._place_at(url, options)
        self._metadata: Metadata | None = None
        self._metadata_crc = 0
        self._manifest: CheckpointManifest | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), weights_only=self._weights_only, **self._options), (self._url,)

    # ── the interface of torch.distributed.checkpoint ──────────────────────────────────────────────────────────────

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from another URL if `checkpoint_id` is given."""
        self._metadata = self._manifest = None
        if checkpoint_id is not None:
            self._move(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Read ``.metadata`` and, if there is one, the manifest that belongs to it.

        Raises:
            CheckpointError: There is no checkpoint, one of the two files is damaged, or they belong to different saves.
            StoreError: The store failed.
        """
        url = self._describe(layout.COMMIT_MARKER)
        data = self._read_pair(url)
        metadata = decode_metadata(data, url)  # after its checksum was compared, if there is one
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = layout.new_save_id()
        self._metadata = metadata
        return metadata

    def _read_pair(self, url: str) -> memoryview:
        """Read ``.metadata``, and the manifest of the save that it names; again if the checkpoint was replaced meanwhile."""
        store = self._store()
        for attempt in range(REPLACED_MAX):
            data = read_metadata(store, self._directory)
            self._metadata_crc = crc32c(data)
            self._manifest = None
            saves = layout.saves_of_marker(data)
            try:
                if len(saves) > 1:
                    raise CheckpointError("the file names files of several saves", url=url)
                if saves:
                    self._manifest = read_manifest(store, self._directory, saves.pop())
                    check_metadata(self._manifest, data, url)
                break
            except CheckpointError:
                if attempt == REPLACED_MAX - 1 or not self.is_replaced():
                    raise
        return data

    def is_replaced(self) -> bool:
        """Whether the checkpoint was replaced since its metadata was read. Cost: one request."""
        return is_replaced(self._store(), self._directory, self._metadata_crc)

    def _explained(self, error: DataError | StoreError) -> DataError | StoreError:
        """Return the error of a file that is missing or has changed; it names the cause if the checkpoint was replaced."""
        if not self.is_replaced():
            return error
        url = self._describe(layout.COMMIT_MARKER)
        return CheckpointError("the checkpoint was replaced while it was loaded", url=url, hint="load it again")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember the metadata to load by."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan what the coordinator checks before anything is loaded."""
        assert self._metadata is not None
        ends: dict[str, int] = {}
        for item in plan.items:
            info = self._metadata.storage_data[item.storage_index]
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        return replace(plan, storage_data=_Seen(self._metadata_crc, ends))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check, on the coordinator, that all ranks load the same checkpoint, and that its files are there.

        Raises:
            CheckpointError: The checkpoint was replaced while the ranks began to load it, or a file is missing or truncated.
            StoreError: The store failed.
        """
        store = self._store()
        seen: list[_Seen] = [plan.storage_data for plan in plans]
        if len({each.metadata_crc for each in seen}) > 1:
            raise CheckpointError(
                "the checkpoint was replaced while the ranks began to load it",
                url=self._describe(layout.COMMIT_MARKER),
                hint="load it again",
            )
        try:
            present = list_directory(store, self._directory)
        except AccessDeniedError:  # credentials that may read need not be allowed to list; reading will tell
            return plans
        for error in self._missing(store, present, seen):
            raise self._explained(error)
        if self._manifest is not None:  # its files have checksums, and names that no other save uses
            return plans
        return [
            replace(plan, storage_data=_Versions({name: present[name] for name in each.ends}))
            for plan, each in zip(plans, seen, strict=True)
        ]

    def _missing(self, store: Store, present: Mapping[str, ObjectInfo], seen: list[_Seen]) -> list[CheckpointError]:
        if self._manifest is not None:
            return check_files(store, self._directory, self._manifest, present)
        found = []
        for name, end in sorted({item for each in seen for item in each.ends.items()}):
            url = self._describe(name)
            if name not in present:
                found.append(CheckpointError("the file is missing", url=url))
            elif present[name].size_bytes < end:
                what = f"the file has {present[name].size_bytes} bytes, and the checkpoint needs at least {end}"
                found.append(CheckpointError(what, url=url))
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan.

        Returns:
            A future that is done.

        Raises:
            CheckpointError: A file is damaged, or the checkpoint was replaced. Tensors may have been written to, so the state
                must not be used.
            StoreError: The store failed, with the same consequence.
        """
        assert self._metadata is not None
        versions = plan.storage_data.files if isinstance(plan.storage_data, _Versions) else {}
        reader = PlanReader(
            self._store(),
            self._directory,
            self._metadata,
            self._manifest,
            planner,
            versions=versions,
            weights_only=self._weights_only,
        )
        try:
            reader.read(plan.items)
        except (ObjectMissingError, ObjectChangedError) as error:
            raise self._explained(error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
