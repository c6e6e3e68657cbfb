"""One checkpoint's directory: inspects, verifies and removes it.

A directory is *committed* if it has the commit marker. It is *whole* if, in addition, its manifest is valid and every file of
the manifest is there with its size. Functions take a store and the directory's prefix in it, such as ``step-0000001000/``;
the prefix ``""`` is the directory that the store was connected to.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.checkpoints import layout
from penstock.checkpoints.manifest import MANIFEST_BYTES_MAX, CheckpointManifest, decode_manifest
from penstock.checksums.crc32c import crc32c
from penstock.config import MIB
from penstock.errors import (
    BucketMissingError,
    CheckpointError,
    DirectoryMissingError,
    ObjectMissingError,
    SpanError,
    StoreError,
)
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.store import Store
    from penstock.types import ObjectInfo

METADATA_BYTES_MAX = 1024 * MIB
"""Longest commit marker that is read."""

REPLACED_MAX = 100
"""How often a directory is looked at again because its files have changed meanwhile: as often as saves follow each other."""

Status = Literal["whole", "unchecked", "damaged", "unfinished", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The facts about a checkpoint that are known without reading its data.

    Attributes:
        name: Name of the directory below the run's URL, with a slash at its end; ``""`` for the URL itself.
        step: Step of the training; None if neither the name nor the manifest tells it.
        status: ``"whole"``: committed, and every file is there with its size. ``"unchecked"``: committed by a writer without
            a manifest, so nobody can tell. ``"damaged"``: committed, but a file is missing or has another size.
            ``"unfinished"``: not committed, because the save is running or was killed. ``"missing"``: there is nothing.
        problem: The defect, with the name of its file; None if none is known.
        size_bytes: Size of its files; of an unfinished one, of what is there.
        files_count: Number of its files.
        world_size: Number of ranks that saved it; None if there is no manifest.
        saved_s: When it was saved, in seconds since the epoch; None if the store does not tell.
    """

    name: str
    step: int | None
    status: Status
    problem: str | None
    size_bytes: int
    files_count: int
    world_size: int | None
    saved_s: float | None

    @property
    def usable(self) -> bool:
        """Whether it can be loaded, as far as the sizes tell: whole, or committed by a writer without a manifest."""
        return self.status in ("whole", "unchecked")


def list_directory(store: Store, prefix: str) -> dict[str, ObjectInfo]:
    """Return the objects below `prefix` by their names in the directory. Cost: one request per 1 000 objects."""
    try:
        return {info.key[len(prefix) :]: info for info in store.list(prefix)}
    except DirectoryMissingError:  # of a store on paths, which has no directory before the first write
        return {}


def read_manifest(store: Store, prefix: str, save_id: str) -> CheckpointManifest:
    """Read the manifest of a save.

    Raises:
        CheckpointError: It is missing, damaged, or of another save.

    Cost: one request.
    """
    key = prefix + layout.manifest_name(save_id)
    url = store.describe(key)
    try:
        manifest = decode_manifest(_whole(store, key, MANIFEST_BYTES_MAX), url)
    except ObjectMissingError as error:
        _raise_missing_bucket(error)
        raise CheckpointError("the manifest is missing", url=url, hint=_HINT) from None
    if manifest.save_id != save_id:
        raise CheckpointError(f"the manifest is that of the save {manifest.save_id}", url=url, field="save_id")
    return manifest


def _whole(store: Store, key: str, size_bytes_max: int) -> memoryview:
    data = bytearray()
    with suppress(SpanError):  # the file is empty
        for chunk in store.read_parts([(key, ByteRange(0, size_bytes_max + 1))]):
            data += chunk.data
    if len(data) > size_bytes_max:
        raise CheckpointError(f"the file has more than {size_bytes_max} bytes", url=store.describe(key))
    return memoryview(data)


def read_metadata(store: Store, prefix: str) -> memoryview:
    """Read the commit marker, as uint8[n].

    Raises:
        CheckpointError: There is none, so nothing was committed.

    Cost: one request.
    """
    key = prefix + layout.COMMIT_MARKER
    try:
        return _whole(store, key, METADATA_BYTES_MAX)
    except ObjectMissingError as error:
        _raise_missing_bucket(error)
        hint = "name the directory of one checkpoint that `penstock checkpoint ls` lists as whole"
        raise CheckpointError(
            "there is no checkpoint, because the file that commits it is missing", url=store.describe(key), hint=hint
        ) from None


def is_replaced(store: Store, prefix: str, metadata_crc32c: int) -> bool:
    """Whether the commit marker is another one than that of a checksum, or is gone. Cost: one request."""
    try:
        return crc32c(read_metadata(store, prefix)) != metadata_crc32c
    except CheckpointError:
        return True


def _raise_missing_bucket(error: ObjectMissingError) -> None:
    """Raise `error` if it says that there is no such bucket, which is another mistake than a missing checkpoint."""
    if isinstance(error, BucketMissingError) and not isinstance(error, DirectoryMissingError):
        raise error


_HINT = "load an earlier checkpoint; `penstock checkpoint ls` lists them"


def check_metadata(manifest: CheckpointManifest, metadata: memoryview | bytes, url: str) -> None:
    """Check that a commit marker is the one that a manifest belongs to.

    Args:
        manifest: The manifest.
        metadata: Contents of the commit marker.
        url: URL of the commit marker, for messages.

    Raises:
        CheckpointError: It is another one, or damaged.
    """
    if len(metadata) != manifest.metadata_bytes or crc32c(metadata) != manifest.metadata_crc32c:
        raise CheckpointError(
            "the file is damaged, or of another save: it does not match the manifest", url=url, hint=_HINT
        )


def check_files(
    store: Store, prefix: str, manifest: CheckpointManifest, present: Mapping[str, ObjectInfo]
) -> list[CheckpointError]:
    """Compare the files of a manifest with those that are there; return one error for each that is missing or has another size.

    Args:
        store: The store.
        prefix: Prefix of the directory.
        manifest: The manifest.
        present: Contents of the directory, as ``list_directory`` returns them.
    """
    found = []
    for file in manifest.files:
        info = present.get(file.name)
        url = store.describe(prefix + file.name)
        if info is None:
            found.append(CheckpointError("the file is missing", url=url, hint=_HINT))
        elif info.size_bytes != file.size_bytes:
            what = f"the file has {info.size_bytes} bytes, and the manifest says {file.size_bytes}"
            found.append(CheckpointError(what, url=url, hint=_HINT))
    return found


def committed_manifest(store: Store, prefix: str, present: Mapping[str, ObjectInfo]) -> CheckpointManifest | None:
    """Return the manifest of the checkpoint that is committed; None if it was committed by a writer without manifests.

    Args:
        store: The store.
        prefix: Prefix of the directory.
        present: Contents of the directory, with the commit marker.

    Raises:
        CheckpointError: The manifest is missing, damaged, or of another save.

    Cost: one request; one more, and one for each manifest, if the files of several saves are there.
    """
    saves = [save for name in present if (save := layout.save_of_manifest(name)) is not None]
    if not saves:
        if any(layout.save_of_data(name) for name in present):
            raise CheckpointError("the manifest is missing", url=store.describe(prefix + "manifest-*.json"), hint=_HINT)
        return None
    size_bytes = present[layout.COMMIT_MARKER].size_bytes
    if len(saves) == 1:
        manifest = read_manifest(store, prefix, saves[0])
        if manifest.metadata_bytes == size_bytes:
            return manifest
    else:
        metadata = read_metadata(store, prefix)
        crc = crc32c(metadata)
        for save_id in saves:
            manifest = read_manifest(store, prefix, save_id)
            if (manifest.metadata_bytes, manifest.metadata_crc32c) == (len(metadata), crc):
                return manifest
    if any(name.endswith(layout.DATA_SUFFIX) and layout.save_of_data(name) is None for name in present):
        return None  # another writer has replaced the checkpoint that the manifests are of
    url = store.describe(prefix + layout.COMMIT_MARKER)
    raise CheckpointError("the file is damaged, or of another save: no manifest matches it", url=url, hint=_HINT)


def inspect(store: Store, prefix: str = "") -> CheckpointInfo:
    """Return the state of a directory. A checkpoint that is being replaced is the earlier or the new one, and never damaged.

    Cost: one request per 1 000 files, and one for the manifest; if a file is missing or does not fit, another listing.
    """
    present = _contents(store, prefix)
    info = _inspected(store, prefix, present)
    for _ in range(REPLACED_MAX):
        if info.status != "damaged" or (now := _contents(store, prefix)) == present:
            break
        present = now
        info = _inspected(store, prefix, present)
    return info


def _contents(store: Store, prefix: str) -> dict[str, ObjectInfo]:
    return {name: info for name, info in list_directory(store, prefix).items() if not layout.save_of_marker(name)}


def _inspected(store: Store, prefix: str, present: Mapping[str, ObjectInfo]) -> CheckpointInfo:
    """Return the state of a directory whose listing is `present`."""
    size_bytes = sum(info.size_bytes for info in present.values())
    times = [info.last_modified_s for info in present.values() if info.last_modified_s is not None]
    marker = present.get(layout.COMMIT_MARKER)
    manifest, status, problem = None, "unchecked", None
    if marker is None:
        status = "unfinished" if present else "missing"
        problem = "it was never committed" if present else "there is nothing"
    else:
        times = [marker.last_modified_s] if marker.last_modified_s is not None else []
        try:
            manifest = committed_manifest(store, prefix, present)
            problems = check_files(store, prefix, manifest, present) if manifest is not None else []
            if manifest is not None:
                status, problem = ("damaged", str(problems[0])) if problems else ("whole", None)
        except CheckpointError as error:
            status, problem = "damaged", str(error)
    step = layout.step_of(prefix)
    return CheckpointInfo(
        name=prefix,
        step=manifest.step if step is None and manifest is not None else step,
        status=status,  # type: ignore[arg-type]
        problem=problem,
        size_bytes=manifest.size_bytes if manifest is not None else size_bytes,
        files_count=len(manifest.files) + 1 if manifest is not None else len(present),
        world_size=manifest.world_size if manifest is not None else None,
        saved_s=manifest.saved_s if manifest is not None else max(times, default=None),
    )


# ── verifying ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of ``verify``.

    Attributes:
        info: The checkpoint.
        problems: One error for each file that is missing, damaged, or could not be read.
        files_count: Number of files that were looked at.
        read_bytes: Bytes whose checksums were compared.
    """

    info: CheckpointInfo
    problems: tuple[CheckpointError | StoreError, ...]
    files_count: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole and nothing is wrong with it."""
        return self.info.status == "whole" and not self.problems


def verify(
    store: Store, prefix: str = "", *, checksums: bool = True, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Verify a checkpoint: its sizes, and with `checksums` every byte.

    Args:
        store: The store.
        prefix: Prefix of the directory.
        checksums: Whether to read all files and compare their checksums with the manifest's.
        progress: Called with the number of bytes read and of all bytes to read, after each part.

    Raises:
        StoreError: The directory cannot be listed.

    Cost: that of ``inspect``; with `checksums`, the bytes of all files, of which parts are held. A checkpoint that is replaced
        meanwhile is verified again.
    """
    for _ in range(REPLACED_MAX):
        found, metadata_crc32c = _verified(store, prefix, checksums=checksums, progress=progress)
        if not found.problems or metadata_crc32c is None or not is_replaced(store, prefix, metadata_crc32c):
            break
    return found


def _verified(
    store: Store, prefix: str, *, checksums: bool, progress: Callable[[int, int], None] | None
) -> tuple[Verification, int | None]:
    """Verify a checkpoint once; return the result, and the CRC-32C of its commit marker if there was a manifest."""
    info = inspect(store, prefix)
    if info.status in ("missing", "unfinished", "unchecked"):
        problems = (
            [] if info.status == "unchecked" else [CheckpointError(info.problem or "", url=store.describe(prefix))]
        )
        return Verification(info=info, problems=tuple(problems), files_count=info.files_count, read_bytes=0), None
    try:
        present = list_directory(store, prefix)
        manifest = committed_manifest(store, prefix, present)
        assert manifest is not None
        check_metadata(manifest, read_metadata(store, prefix), store.describe(prefix + layout.COMMIT_MARKER))
    except (CheckpointError, KeyError) as error:  # KeyError: it was removed meanwhile
        problem = error if isinstance(error, CheckpointError) else CheckpointError(str(info.problem))
        return Verification(info=info, problems=(problem,), files_count=info.files_count, read_bytes=0), None
    found: list[CheckpointError | StoreError] = list(check_files(store, prefix, manifest, present))
    wrong = {error.url for error in found}
    read_bytes, total_bytes = 0, sum(file.size_bytes for file in manifest.files)
    for file in manifest.files if checksums else ():
        url = store.describe(prefix + file.name)
        if url in wrong:
            continue
        crc = 0
        try:
            for chunk in store.read_parts([prefix + file.name]) if file.size_bytes else ():
                crc = crc32c(chunk.data, crc)
                read_bytes += len(chunk.data)
                if progress is not None:
                    progress(read_bytes, total_bytes)
        except StoreError as error:
            found.append(error)
            continue
        if crc != file.crc32c:
            what = f"the file is damaged: its crc32c is {crc:08x}, and the manifest says {file.crc32c:08x}"
            found.append(CheckpointError(what, url=url, hint=_HINT))
    verification = Verification(info=info, problems=tuple(found), files_count=info.files_count, read_bytes=read_bytes)
    return verification, manifest.metadata_crc32c


# ── removing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def remove(store: Store, prefix: str = "") -> int:
    """Remove a checkpoint: the commit marker first, so that no half of it ever looks like a checkpoint, the manifests last.

    Objects that belong to no checkpoint are not touched if the prefix is ``""``, where other things may lie.

    Returns:
        Number of objects removed; 0 if there was nothing.

    Cost: one request per 1 000 objects to list, and as many to delete.
    """
    present = list_directory(store, prefix)
    names = sorted(present) if prefix else sorted(name for name in present if is_checkpoint_file(name))
    if layout.COMMIT_MARKER in present:
        store.delete(prefix + layout.COMMIT_MARKER)
    last = [name for name in names if layout.save_of_manifest(name)]
    store.delete([prefix + name for name in names if name not in last and name != layout.COMMIT_MARKER])
    store.delete([prefix + name for name in last])
    return len(names)


def is_checkpoint_file(name: str) -> bool:
    """Whether a name in a directory is that of a file of a checkpoint, of this writer or of another."""
    in_directory = "/" not in name or layout.save_of_data(name) is not None
    known = (
        name == layout.COMMIT_MARKER or name.endswith(layout.DATA_SUFFIX) or layout.save_of_manifest(name) is not None
    )
    return in_directory and known
