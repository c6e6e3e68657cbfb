"""``torch.save`` and ``torch.load`` for objects in a store.

``load`` finds the storages in the file, reads all of the file in parallel straight into their memory, and lets
``torch.load`` unpickle the rest. The bytes of the storages are never in memory twice.
Pages of new memory are touched before bytes arrive in it (``Prefaulting``).
"""

from __future__ import annotations

import ctypes
import mmap as mmap_module
import os
import pickle
import threading
from typing import IO, TYPE_CHECKING, Any, Self, TypeAlias, cast

import torch

from penstock import compose
from penstock.config import KIB, MIB
from penstock.errors import CheckpointError, ChecksumError, ConfigError, PenstockError
from penstock.fetch import PlanItem
from penstock.fetch.plan import COPIED_BYTES_MAX
from penstock.system.tracebacks import boundary
from penstock.torch.checkpoint.archive import (
    HEADER_BYTES,
    LEGACY_HEAD,
    ZIP_HEAD,
    Archive,
    ObjectFile,
    PlainFileError,
    check_header,
    check_members,
)
from penstock.torch.checkpoint.verification import FileVerifier, choose_verifier
from penstock.torch.writing import checkpoint_writer, split_file
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store import Store
    from penstock.torch.checkpoint.archive import StoredStorage
    from penstock.types import Key, ObjectInfo

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; older kernels refuse it. Source: madvise(2)."""
_libc = ctypes.CDLL(None)  # whose calls release the GIL


class Prefaulting:
    """Touches the pages of memory in order, while its ``with`` block runs.

    It only saves time: pages that it does not reach, or that the kernel refuses to touch, are touched by the first write.

    Args:
        views: The memory, each uint8[any length], writable.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-prefaulting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._views = ()

    def _run(self) -> None:
        for view in self._views:
            if self._ended.is_set() or not _populate(view):
                return


def _populate(view: memoryview) -> bool:
    """Touch the pages that lie wholly in `view`, without changing them, and return whether the kernel can do that."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
    first = -(-start // mmap_module.PAGESIZE) * mmap_module.PAGESIZE
    length_bytes = (start + len(view)) // mmap_module.PAGESIZE * mmap_module.PAGESIZE - first
    if length_bytes <= 0:
        return True
    result: int = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length_bytes), _MADV_POPULATE_WRITE)
    return result == 0


_TORCH_ARCHIVE = ("PytorchStreamReader", "inline_container", "hasRecord")
"""Names of PyTorch's reader of archives, one of which is in each of its errors."""

MapLocation: TypeAlias = "str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None"

_ENDS_BYTES = 256 * KIB
"""Bytes at both ends of the file that are read first: there are the pickle and the directory of the archive."""
_PIECE_BYTES = 16 * MIB
"""Bytes that are verified at a time, while the next ones arrive."""
_GAP_BYTES_MAX = 64 * KIB
"""What lies between two storages, a header and padding, is read with the second one, into memory before its own."""


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@boundary
def save(
    obj: object, url: str | os.PathLike[str], *, part_bytes: int | None = None, if_absent: bool = False, **options: Any
) -> None:
    """Save `obj` as ``torch.save`` does, to an object in a store.

    The object becomes visible when all of it is stored. If the save fails or the process ends before that, nothing becomes
    visible, and an existing object of the same name remains unchanged.

    Args:
        obj: Object to save.
        url: URL of the object, with any scheme that ``penstock.connect`` supports.
        part_bytes: Size of the first parts in bytes, at least 5 MiB on S3; None takes 8 MiB.
        if_absent: Whether to refuse to replace an object; ``ObjectExistsError`` is then raised at the end.
        **options: The same options as for ``penstock.connect``.

    Raises:
        ConfigError: The URL does not name an object, or an option is invalid.
        StoreError: The object could not be stored; nothing is visible.

    Cost: Memory for the parts that are being sent. ``torch.save`` computes the CRC-32 of every tensor, at 0.5 to 1 GB/s.
    """
    with checkpoint_writer(url, part_bytes=part_bytes, if_absent=if_absent, **options) as file:
        torch.save(obj, cast("IO[bytes]", file))


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@boundary
def load(
    url: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
    mmap: bool = False,
    **options: Any,
) -> Any:
    """Load a file that ``torch.save`` wrote, with penstock or without, from an object in a store.

    The tensors are read in parallel, straight into their memory. All bytes come from one version of the object. They are
    compared with the checksum that the store keeps of the object or, if it keeps none that can be computed here, with the
    CRC-32 of each storage in the file.

    Archives that another program wrote, and TorchScript, are read whole into memory, and verified there. Files in the format
    from before PyTorch 1.6 are read by ``torch.load`` itself, one range after the other; only their length and version are
    verified.

    Args:
        url: URL of the object, with any scheme that ``penstock.connect`` supports.
        map_location: Device of the storages; see ``torch.load``.
        weights_only: Whether to refuse all but tensors and plain data; see ``torch.load``. With False, the file can run
            any code.
        mmap: Whether the tensors share one block of memory that lies outside of the process's heap (an anonymous file),
            as with ``torch.load(mmap=True)``: pages are copied when they are first written to, and the memory is freed
            when no tensor is left. The whole object is read in either case. Linux only.
        **options: The same options as for ``penstock.connect``.

    Raises:
        ObjectMissingError: There is no such object.
        ObjectChangedError: The object was replaced while it was read.
        ChecksumError: The bytes do not have the checksum that the store keeps.
        CheckpointError: The file is truncated or damaged, or ``torch.save`` has not written it.
        pickle.UnpicklingError: The file contains what `weights_only` refuses.
        ConfigError: The URL does not name an object, or an option is invalid.

    Cost: One HEAD, two small requests, and one request per part (``FetchConfig.part_bytes``); holds only the tensors, as
    storages that cannot be resized. Archives of other programs are held whole until they are loaded.
    """
    root, key = split_file(url)
    with compose.connect(root, **options) as store:
        return load_from(store, key, map_location, weights_only=weights_only, mmap=mmap)


def load_from(store: Store, key: Key, map_location: MapLocation, *, weights_only: bool, mmap: bool) -> Any:
    """Load an object of a store; see ``load``."""
    info = store.stat(key)
    file = ObjectFile(store, info)
    file.keep(_ends(info.size_bytes))
    head = bytes(file.bytes_at(0, 512))
    if head.startswith(ZIP_HEAD):
        if mmap or _needs_bytes(map_location):
            return _load_zip(store, info, file, map_location, weights_only=weights_only, mmap=mmap)
    elif not (head.startswith(LEGACY_HEAD) or head[257:262] == b"ustar"):
        raise CheckpointError("not a file of torch.save", url=file.name)
    elif weights_only and not head.startswith(LEGACY_HEAD):  # the guard of PyTorch before 2.6 does not cover it
        what = f"{file.name}: a tar archive of PyTorch 0.1 is not loaded with weights_only=True"
        raise pickle.UnpicklingError(f"{what}. Hint: weights_only=False loads it, and runs code from it")
    elif mmap:
        raise ConfigError(f"{file.name}: mmap=True needs a file in the zip format of torch.save", hint="use mmap=False")
    return _load_plain(store, key, file, map_location, weights_only=weights_only)


def _ends(size_bytes: int) -> list[ByteRange]:
    if size_bytes <= 2 * _ENDS_BYTES:
        return [ByteRange(0, size_bytes)] if size_bytes else []
    return [ByteRange(0, _ENDS_BYTES), ByteRange(size_bytes - _ENDS_BYTES, size_bytes)]


def _unpickle(url: str, file: Any, **options: Any) -> Any:
    """Call ``torch.load``; its errors keep their class, and a note says which object they are about."""
    try:
        return torch.load(file, **options)
    except PenstockError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and any(name in str(error) for name in _TORCH_ARCHIVE):
            raise CheckpointError(f"the file is truncated or damaged: {error}", url=url) from error
        error.add_note(f"while loading {url}")
        raise


def _load_plain(store: Store, key: Key, file: ObjectFile, map_location: MapLocation, *, weights_only: bool) -> Any:
    """Let ``torch.load`` read the file by itself."""
    with store.open(key) as reader:
        try:
            return _unpickle(file.name, reader, map_location=map_location, weights_only=weights_only)
        except (AssertionError, EOFError, LookupError, pickle.UnpicklingError, RuntimeError, ValueError) as error:
            if isinstance(error, PenstockError) or "eights only" in str(error) or "CUDA" in str(error):
                raise
            raise CheckpointError(f"the file is truncated or damaged: {error}", url=file.name) from error


# ── archives ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _needs_bytes(map_location: MapLocation) -> bool:
    """Whether tensors are made that have bytes: not on ``meta``, nor in a mode for others without them, such as fake ones."""
    return str(map_location) != "meta" and type(torch.empty(0, device="cpu")) is torch.Tensor


def _load_zip(
    store: Store, info: ObjectInfo, file: ObjectFile, map_location: MapLocation, *, weights_only: bool, mmap: bool
) -> Any:
    if not mmap and hasattr(
        torch.serialization, "skip_data"
    ):  # PyTorch 2.6 and later can leave out the bytes of storages
        try:
            return _load_archive(store, info, file, map_location, weights_only=weights_only)
        except PlainFileError:
            pass
    return _load_whole(store, info, file, map_location, weights_only=weights_only, mmap=mmap)


def _load_archive(
    store: Store, info: ObjectInfo, file: ObjectFile, map_location: MapLocation, *, weights_only: bool
) -> Any:
    archive = Archive(file)
    for stored in archive.storages[:1]:
        check_header(stored, file.bytes_at(stored.header_offset, HEADER_BYTES))
    memory = _Memory(archive.storages, info.size_bytes)
    try:
        _fill(store, info, memory.pieces, lambda: choose_verifier(info, archive.storages, file.name))
    except CheckpointError:
        for stored in archive.storages:  # perhaps its bytes are elsewhere
            check_header(stored, file.bytes_at(stored.header_offset, HEADER_BYTES))
        raise
    for stored, header in memory.headers:
        check_header(stored, header)
    restorer = _Restorer(archive.references, memory.storages, map_location)
    file.seek(0)
    # The storages that torch.load itself makes are empty, untouched memory, in whose place the restorer puts those read.
    with torch.serialization.skip_data():
        return _unpickle(file.name, file, map_location=restorer, weights_only=weights_only)


class _Memory:
    """The memory of all storages, and of what lies between them, so that every byte of the file has its place.

    Attributes:
        storages: The storages by key; their bytes have to be read yet.
        pieces: Ranges of the file and the memory for each, in order.
        headers: The storages, and the memory of their headers.
    """

    def __init__(self, stored: Sequence[StoredStorage], size_bytes: int) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.pieces: list[tuple[int, memoryview]] = []
        self.headers: list[tuple[StoredStorage, memoryview]] = []
        end = 0
        for storage in stored:
            self._place(storage, end)
            end = storage.end
        self._add(end, memoryview(bytearray(size_bytes - end)))

    def _place(self, stored: StoredStorage, gap_start: int) -> None:
        length_bytes, gap_bytes = stored.end - stored.start, stored.start - gap_start
        if length_bytes <= COPIED_BYTES_MAX or gap_bytes > _GAP_BYTES_MAX:
            gap = memoryview(bytearray(gap_bytes))
            self._add(gap_start, gap)
            if length_bytes > COPIED_BYTES_MAX:
                tensor = _mapped(length_bytes)
            else:
                tensor = torch.empty(length_bytes, dtype=torch.uint8, device="cpu")
            if length_bytes:
                self._add(stored.start, tensor.numpy().data)
            self.storages[stored.key] = tensor.untyped_storage()
        else:
            begin = -gap_bytes % 64  # so that the storage itself is aligned
            tensor = _mapped(begin + gap_bytes + length_bytes)
            view = tensor.numpy().data[begin:]
            self._add(gap_start, view)
            gap = view[:gap_bytes]
            self.storages[stored.key] = tensor.untyped_storage()[begin + gap_bytes :]
        self.headers.append((stored, gap[stored.header_offset - gap_start :]))

    def _add(self, start: int, view: memoryview) -> None:
        for begin in range(0, len(view), _PIECE_BYTES):
            self.pieces.append((start + begin, view[begin : begin + _PIECE_BYTES]))


def _mapped(length_bytes: int) -> torch.Tensor:
    """Return uint8[length_bytes] in memory of its own, which is given back as soon as the tensor is gone.

    It has small pages. Huge ones are a little cheaper where the system has them ready, and several times as expensive where
    it has to collect them first or, in a virtual machine, to get them from the host (docs/development/measurements.md).
    """
    owner = mmap_module.mmap(-1, length_bytes, flags=mmap_module.MAP_PRIVATE | mmap_module.MAP_ANONYMOUS)
    return torch.frombuffer(owner, dtype=torch.uint8)


def _fill(
    store: Store, info: ObjectInfo, pieces: Sequence[tuple[int, memoryview]], verifier: Callable[[], FileVerifier]
) -> None:
    """Read all bytes of an object into `pieces`; after a mismatch, which is not known to a piece, all of them once more."""
    try:
        _fill_once(store, info, pieces, verifier())
    except (ChecksumError, CheckpointError):
        _fill_once(store, info, pieces, verifier())


def _fill_once(
    store: Store, info: ObjectInfo, pieces: Sequence[tuple[int, memoryview]], verifier: FileVerifier
) -> None:
    def requests() -> Iterator[tuple[PlanItem, memoryview]]:
        for start, view in pieces:
            span = ByteRange(start, start + len(view))
            yield PlanItem(info.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s), view

    landed = [False] * len(pieces)
    verified_count = 0
    with Prefaulting([view for _, view in pieces]), store.read_into(requests()) as indexes:
        for index in indexes:
            landed[index] = True
            while verified_count < len(pieces) and landed[verified_count]:
                verifier.add(*pieces[verified_count])
                verified_count += 1
    verifier.finish()


class _Restorer:
    """What ``torch.load`` calls for each storage: returns the one that was read, on the device that the caller wants.

    ``torch.load`` does not say which storage it asks for, but asks in the order of the references in the pickle, and only
    once for each storage that has memory.
    """

    def __init__(
        self,
        references: Sequence[tuple[str, str]],
        storages: dict[str, torch.UntypedStorage],
        map_location: MapLocation,
    ) -> None:
        self._references = iter(references)
        self._storages = storages
        self._map_location = map_location
        self._done: set[str] = set()

    def __call__(self, empty: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        key, expected = next(reference for reference in self._references if reference[0] not in self._done)
        storage = self._storages[key]
        if expected != location or storage.nbytes() != empty.nbytes():
            raise RuntimeError(
                f"storage {key} has {storage.nbytes()} bytes ({expected}), but the pickle wants {empty.nbytes()} ({location})"
            )
        restored = self._restored(storage, location)
        if restored.data_ptr():
            self._done.add(key)
        return restored

    def _restored(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        wanted: Any = self._map_location
        restored: Any
        if callable(wanted):
            restored = wanted(storage, location)
            if restored is not None:
                return cast("torch.UntypedStorage", restored)
        elif isinstance(wanted, dict):
            location = wanted.get(location, location)
        elif wanted is not None:
            location = str(wanted)
        restored = torch.serialization.default_restore_location(storage, location)  # type: ignore[no-untyped-call]
        return cast("torch.UntypedStorage", restored)


# ── whole ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_whole(
    store: Store, info: ObjectInfo, file: ObjectFile, map_location: MapLocation, *, weights_only: bool, mmap: bool
) -> Any:
    """Read all of the file into an anonymous one, verify it, and let ``torch.load`` read or map that."""
    try:
        storages: Sequence[StoredStorage] = Archive(file).storages
        is_usual = True
    except PlainFileError:
        storages, is_usual = (), False
    fd = os.memfd_create("penstock-checkpoint")
    try:
        os.ftruncate(fd, info.size_bytes)
        view = memoryview(mmap_module.mmap(fd, info.size_bytes))  # unmapped with the last reference to it
        pieces = [(start, view[start : start + _PIECE_BYTES]) for start in range(0, len(view), _PIECE_BYTES)]
        try:
            _fill(store, info, pieces, lambda: choose_verifier(info, storages, file.name))
            for stored in storages:
                check_header(stored, view[stored.header_offset : stored.start])
        except (CheckpointError, PlainFileError):  # the bytes of a storage may be elsewhere, and then count there
            is_usual = False
        del view, pieces
        if not is_usual:
            try:
                with open(fd, "rb", closefd=False) as whole:
                    check_members(whole)
            except ValueError as error:
                raise CheckpointError(str(error), url=file.name) from error
        path = f"/proc/self/fd/{fd}"
        return _unpickle(file.name, path, map_location=map_location, weights_only=weights_only, mmap=mmap)
    finally:
        os.close(fd)
