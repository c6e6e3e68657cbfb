"""``StorageWriter``, through which ``torch.distributed.checkpoint.save`` and ``async_save`` write."""

from __future__ import annotations

import io
import pickle
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.checkpoints import CheckpointFile, CheckpointSave, layout
from penstock.checkpoints.manifest import BLOCK_BYTES
from penstock.checksums.combining import combined_crc
from penstock.config import check_whole
from penstock.errors import ConfigError
from penstock.torch.checkpoint.items import WrittenItem, write_object, write_tensor
from penstock.torch.checkpoint.place import PlacedStorage
from penstock.torch.checkpoint.prefixes import checked_prefix

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from penstock.store import Store
    from penstock.torch.checkpoint.prefixes import PrefixStrategy

THREADS_MAX = 64
FILES_PER_RANK_MAX = 1024

_written: set[str] = set()  # IDs of the saves for which this process has written data; 12 characters each


@dataclass(frozen=True, slots=True)
class _Naming:
    """How the data files of one rank are called; the coordinator sends it to each rank."""

    save_id: str
    rank: int
    prefix: str


class _StoredItem(NamedTuple):
    """What a rank tells the coordinator about an item."""

    file: str
    written: WrittenItem


class StorageWriter(PlacedStorage, TorchStorageWriter):
    """Writes distributed checkpoints straight to a store: ``dcp.save(state_dict, storage_writer=StorageWriter(url))``.

    The files have the format of PyTorch's ``FileSystemWriter``, so that its reader, and others, can load them. The whole
    checkpoint becomes visible when ``.metadata`` is written at the end. A save that fails or is killed leaves an earlier
    checkpoint at the URL as it was. The next save into the same directory removes its files; if the directory's name is that
    of a step (``step-0000001000``), so does the next save below the same parent. Every rank creates its own writer.

    Args:
        url: URL of the checkpoint's directory, with any scheme that ``penstock.connect`` supports.
        step: Step of the training, for the manifest; None takes that of the directory's name, if it has one.
        thread_count: Threads of each rank that write files, from 1 to 64.
        files_per_rank: Files that each rank writes; None writes as many as there are threads.
        prefix_strategy: Chooses the prefix of the names of a rank's files, for stores that shard keys by prefix.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: The URL, a number or an option is not valid.

    Cost: The bytes of the state dict once, sent from the tensors' memory by each thread, with the memory of a
        ``Store.writer`` for each; five small requests for the commit. A tensor that is not contiguous, or not on the CPU, is
        copied first, one per thread at a time.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        thread_count: int = 1,
        files_per_rank: int | None = None,
        prefix_strategy: PrefixStrategy | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("thread_count", thread_count, 1, THREADS_MAX)
        if files_per_rank is not None:
            check_whole("files_per_rank", files_per_rank, 1, FILES_PER_RANK_MAX)
        if step is not None:
            layout.check_step(step)
        if prefix_strategy is not None and not callable(prefix_strategy):
            raise ConfigError(f"prefix_strategy={prefix_strategy!r} must be a function of rank and world size")
        self._step = step
        self._thread_count = thread_count
        self._files_per_rank = files_per_rank or thread_count
        self._prefix_strategy = prefix_strategy
        self._place_at(url, options)
        self._save: CheckpointSave | None = None
        self._save_id: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(
            type(self),
            step=self._step,
            thread_count=self._thread_count,
            files_per_rank=self._files_per_rank,
            prefix_strategy=self._prefix_strategy,
            **self._options,
        )
        return made, (self._url,)

    def close(self) -> None:
        """End a save that failed, removing its files, and close the store. Idempotent; the next save opens it again."""
        self._end_save()
        super().close()

    def _end_save(self) -> None:
        if self._save is not None:
            self._save.close()
            self._save = None

    # ── the interface of torch.distributed.checkpoint ──────────────────────────────────────────────────────────────

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at another URL if `checkpoint_id` is given."""
        self._end_save()
        if checkpoint_id is not None:
            self._move(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; an earlier one that failed is ended.

        Raises:
            ConfigError: The ranks are to save without collectives, so that there would be no one commit.
        """
        del is_coordinator, args
        self._end_save()
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False commits each rank by itself, so that a checkpoint could be visible in part",
                hint="leave use_collectives out; no_dist=True saves the state of one process",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return `plan` as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save on the coordinator: write its marker, and name each rank's files.

        Raises:
            ConfigError: A prefix is not valid.
            StoreError: The marker cannot be written.
        """
        choose = self._prefix_strategy
        ranks = range(len(plans))
        prefixes = ["" if choose is None else checked_prefix(choose(rank, len(plans))) for rank in ranks]
        self._end_save()
        self._save = CheckpointSave(self._store(), self._directory, world_size=len(plans), step=self._step)
        self._save_id = self._save.save_id
        return [
            replace(plan, storage_data=_Naming(self._save_id, rank, prefix))
            for rank, (plan, prefix) in enumerate(zip(plans, prefixes, strict=True))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, several at once.

        Returns:
            A future that is done.

        Raises:
            ConfigError: A tensor has no data, or the planner reuses the plan of an earlier save.
            StoreError: The store failed. The files of the other threads are dropped as well.
        """
        naming: _Naming = plan.storage_data
        if naming.save_id in _written:
            raise ConfigError(
                "the planner gave this rank the plan of an earlier save, whose files must not be written again",
                hint="leave enable_plan_caching=True out of the planner",
            )
        _written.add(naming.save_id)
        self._save_id = naming.save_id
        store = self._store()
        files = [items for items in _divided(plan.items, self._files_per_rank) if items]

        def write_file(index: int, stopped: Callable[[], bool]) -> list[WriteResult]:
            name = layout.data_name(naming.save_id, rank=naming.rank, index=index, prefix=naming.prefix)
            return _write_file(store, self._directory, name, files[index], planner, stopped)

        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [result for results in _in_threads(write_file, len(files), self._thread_count) for result in results]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: write the manifest and then ``.metadata``.

        Raises:
            CheckpointError: A file that a rank wrote is not there; nothing was committed.
            StoreError: The store failed; nothing was committed.
        """
        assert self._save is not None
        stored: dict[str, list[WrittenItem]] = {}
        storage_data: dict[MetadataIndex, Any] = {}
        for result in (result for of_rank in results for result in of_rank):
            file, (item, _) = result.storage_data
            stored.setdefault(file, []).append(result.storage_data.written)
            storage_data[result.index] = StorageInfo(file, item.offset_bytes, item.length_bytes)
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        pickled = io.BytesIO()
        pickle.dump(metadata, pickled)
        files = [_file(name, written) for name, written in sorted(stored.items())]
        versions = {"torch": str(torch.__version__)}
        self._save.commit(pickled.getbuffer(), files, versions=versions, block_bytes=BLOCK_BYTES)
        self._save = None

    def storage_meta(self) -> StorageMeta:
        """Return the URL and the ID of the save."""
        return StorageMeta(checkpoint_id=self._url, save_id=self._save_id)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _divided(items: list[WriteItem], files_count: int) -> list[list[WriteItem]]:
    """Divide items among files of about the same size; each file keeps the order of the items."""
    sizes = [_item_bytes(item) for item in items]
    files: list[list[int]] = [[] for _ in range(files_count)]
    filled = [0] * files_count
    for number in sorted(range(len(items)), key=lambda number: -sizes[number]):
        index = min(range(files_count), key=filled.__getitem__)
        files[index].append(number)
        filled[index] += sizes[number] + 1
    return [[items[number] for number in sorted(numbers)] for numbers in files]


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _write_file(
    store: Store,
    directory: str,
    name: str,
    items: Iterable[WriteItem],
    planner: SavePlanner,
    stopped: Callable[[], bool],
) -> list[WriteResult]:
    results = []
    with store.writer(directory + name) as file:

        def write(piece: Any) -> None:
            if stopped():
                raise _StoppedError
            file.write(piece)

        offset = 0
        for item in items:
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                written = write_object(write, offset, data, block_bytes=BLOCK_BYTES)
            else:
                written = write_tensor(write, offset, data, item.index.fqn, block_bytes=BLOCK_BYTES)
            length_bytes = written.item.length_bytes
            offset += length_bytes
            results.append(WriteResult(item.index, length_bytes, _StoredItem(name, written)))
    return results


def _file(name: str, written: list[WrittenItem]) -> CheckpointFile:
    written.sort(key=lambda each: each.item.offset_bytes)
    crc = 0
    for each in written:
        crc = combined_crc(crc, each.crc, each.item.length_bytes)
    size_bytes = sum(each.item.length_bytes for each in written)
    return CheckpointFile(name=name, size_bytes=size_bytes, crc32c=crc, items=tuple([each.item for each in written]))


class _StoppedError(Exception):
    """Another thread failed, so this one stops as well. Nobody sees it, because the first error is the one that is raised."""


def _in_threads(call: Callable[[int, Callable[[], bool]], Any], count: int, threads_count: int) -> list[Any]:
    """Call ``call(number, stopped)`` for each number below `count`, in threads, and return the results in order.

    If one fails, ``stopped()`` is true for the others, no more are called, and the first error is raised when all have ended.
    """
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    numbers = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = call(number, lambda: bool(errors))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name=f"penstock-dcp-{n}") for n in range(1, min(count, threads_count))]
    for thread in threads:
        thread.start()
    try:
        work()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C while the others were working
        errors.append(error)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
