"""The files of ``torch.save``: a zip archive with a pickle, and one stored member for the memory of each storage.

The pickle names storages by keys, and the archive's directory says which member has which key and how long it is. Where a
member's bytes begin follows from how ``torch.save`` aligns them; the members' own headers, which are read together with the
bytes, then prove it.
"""

from __future__ import annotations

import copy
import io
import pickle
import struct
import sys
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.config import KIB, MIB
from penstock.errors import CheckpointError, PenstockError
from penstock.fetch import PlanItem
from penstock.memory.raw_file import RawFile
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.store import Store
    from penstock.types import Buffer, ObjectInfo

_READ_BYTES_MIN = 256 * KIB
"""Bytes to read at least: as much as 3 ms of a connection's time, and a round trip takes 10 to 30 ms."""


class ObjectFile(RawFile):
    """A file whose bytes are read when they are needed, and kept.

    Args:
        store: The store.
        info: The version to read.

    Attributes:
        name: URL of the object.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self._store = store
        self._info = info
        self._kept: list[tuple[int, memoryview]] = []
        self.name = store.describe(info.key)

    @property
    def size_bytes(self) -> int:
        """Size of the object in bytes."""
        return self._info.size_bytes

    def keep(self, spans: Iterable[ByteRange]) -> None:
        """Read some ranges at the same time, and keep them."""
        info = self._info
        items = [
            PlanItem(info.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s) for span in spans
        ]
        for blob in self._store.read_many(items):
            assert blob.span is not None
            self._kept.append((blob.span.start, blob.data))

    def bytes_at(self, start: int, length_bytes: int) -> memoryview:
        """Return up to `length_bytes` bytes at `start`; there are fewer only at the end of the file."""
        end = min(start + length_bytes, self.size_bytes)
        if end <= start:
            return memoryview(b"")
        for kept_start, data in self._kept:
            if kept_start <= start and end <= kept_start + len(data):
                return data[start - kept_start : end - kept_start]
        self.keep([ByteRange(start, min(self.size_bytes, max(end, start + _READ_BYTES_MIN)))])
        return self._kept[-1][1][: end - start]

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer`, except at the end of the file; see ``io.RawIOBase.readinto``."""
        view = memoryview(buffer).cast("B")
        data = self.bytes_at(self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


ZIP_HEAD = b"PK\x03\x04"
LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that ``torch.save`` writes with ``_use_new_zipfile_serialization=False``: its magic number, pickled."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
HEADER_BYTES = _LOCAL_HEADER.size
_IS_DIRECTORY = 0x10  # among the external attributes
_WIDE = 0xFFFFFFFF  # from here on, sizes and offsets have 8 bytes in an extra field


def load_guarded(data: Buffer, **options: Any) -> Any:
    """Load what ``torch.save`` wrote, from memory, without running code from it: tensors and plain data.

    An archive is compared with its checksums, which ``torch.load`` does not do.

    Only the two formats of ``torch.save`` are read, because the guard of PyTorch before 2.6 does not cover tar archives
    (CVE-2025-32434).

    Args:
        data: The file, uint8[n].
        **options: Options of ``torch.load``.

    Raises:
        pickle.UnpicklingError: It contains more, or is of another format.
        Exception: It is damaged; ``torch.load`` raises anything.
    """
    head = bytes(data[: len(LEGACY_HEAD)])
    if head.startswith(ZIP_HEAD):
        check_members(io.BytesIO(data))
    elif head != LEGACY_HEAD:
        raise pickle.UnpicklingError("it is not a file of torch.save")
    return torch.load(io.BytesIO(data), weights_only=True, **options)


_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""What ``zipfile`` raises for damaged archives."""


class PlainFileError(Exception):
    """The file is valid, but not of the usual layout: ``torch.load`` reads it by itself."""


class StoredStorage(NamedTuple):
    """One storage in an archive.

    Attributes:
        key: Name of the storage in the pickle.
        header_offset: Offset of the member's header in the file.
        start: Offset of its first byte in the file.
        end: Offset after its last byte.
        crc: CRC-32 of its bytes; 0 if ``torch.save`` was told to compute none.
    """

    key: str
    header_offset: int
    start: int
    end: int
    crc: int


class Archive:
    """The description of an archive, from the archive itself.

    Args:
        file: The file.

    Attributes:
        storages: The storages, in the order of their bytes.
        references: Key and location of each reference to a storage in the pickle, in order.

    Raises:
        CheckpointError: The archive is damaged or truncated, or no file of ``torch.save``.
        PlainFileError: ``torch.load`` has to read it by itself.
    """

    def __init__(self, file: ObjectFile) -> None:
        self._url = file.name
        try:
            with zipfile.ZipFile(file) as archive:
                members = {info.filename: info for info in _members(archive)}
                folder = self._folder(members)
                if f"{folder}/constants.pkl" in members:
                    raise PlainFileError("a TorchScript archive")
                # All small members, because torch.load reads them without comparing their checksums.
                small = {
                    name: _read(archive, info)
                    for name, info in members.items()
                    if not name.startswith(f"{folder}/data/") and name != f"{folder}/data.pkl"
                }
                if small.get(f"{folder}/byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
                    raise PlainFileError("of a machine with another byte order")
                align_bytes = int(small.get(f"{folder}/.storage_alignment", b"64"))
                self.references = _references(_read(archive, members[f"{folder}/data.pkl"]))
        except PenstockError:
            raise
        except _DAMAGE as error:
            raise CheckpointError(f"the file is truncated or damaged: {error}", url=self._url) from error
        self.storages = self._find_storages(members, f"{folder}/data/", align_bytes, file.size_bytes)

    def _folder(self, members: dict[str, zipfile.ZipInfo]) -> str:
        folders = [name[: -len("/data.pkl")] for name in members if name.endswith("/data.pkl")]
        folders = [folder for folder in folders if "/" not in folder]
        if len(folders) != 1:
            raise CheckpointError("a zip archive, but not a file of torch.save: it has no data.pkl", url=self._url)
        return folders[0]

    def _find_storages(
        self, members: dict[str, zipfile.ZipInfo], prefix: str, align_bytes: int, size_bytes: int
    ) -> list[StoredStorage]:
        wanted = {key for key, _ in self.references}
        found = []
        for name, info in members.items():
            if not name.startswith(prefix) or (key := name[len(prefix) :]) not in wanted:
                continue
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise PlainFileError("compressed")
            start = _data_start(info, align_bytes)
            found.append(StoredStorage(key, info.header_offset, start, start + info.file_size, info.CRC))
        if missing := wanted - {storage.key for storage in found}:
            raise CheckpointError(f"the file is damaged: it has no bytes of storage {min(missing)}", url=self._url)
        found.sort(key=lambda storage: storage.header_offset)
        ends = [storage.header_offset for storage in found] + [size_bytes]
        for storage, end in zip(found, ends[1:], strict=True):
            if storage.header_offset + HEADER_BYTES + storage.end - storage.start > end:
                raise CheckpointError("the file is damaged: storages overlap or lie outside of it", url=self._url)
            if storage.end > end:
                raise PlainFileError("aligned in another way")
        return found


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members. Of one that is marked as a directory, PyTorch returns memory of any content, and no bytes."""
    for info in archive.infolist():
        if info.external_attr & _IS_DIRECTORY and not info.is_dir():
            raise zipfile.BadZipFile(f"{info.filename} is marked as a directory")
    return archive.infolist()


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Read a member; see ``_pieces``."""
    return b"".join(_pieces(archive, info))


def _pieces(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the bytes of a member, compared with its size and its CRC-32, unless ``torch.save`` was told to compute none."""
    if not info.CRC:
        info = copy.copy(info)
        info.CRC = None  # type: ignore[assignment]  # the module's own way to say that it is unknown
    left = info.file_size
    with archive.open(info) as member:
        while piece := member.read(MIB):
            left -= len(piece)
            yield piece
    if left:  # the module stops where the compressed bytes end, and PyTorch does not
        raise zipfile.BadZipFile(f"{info.filename} is {left} bytes shorter than the directory says")


def check_members(file: IO[bytes]) -> None:
    """Compare every member of an archive with its CRC-32, at the place that its own header tells, unless it has none.

    Raises:
        ValueError: A member, or the header of one, is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for info in _members(archive):
                for _ in _pieces(archive, info):
                    pass
    except _DAMAGE as error:
        raise ValueError(f"the file is truncated or damaged: {error}") from error


def check_header(storage: StoredStorage, header: memoryview) -> None:
    """Compare the header of a member with where its bytes were assumed to be.

    Raises:
        PlainFileError: They lie elsewhere, because another program has written the archive.
    """
    if len(header) >= _LOCAL_HEADER.size:
        magic, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header[: _LOCAL_HEADER.size])
        start = storage.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic == ZIP_HEAD and start == storage.start:
            return
    raise PlainFileError("aligned in another way")


def _data_start(info: zipfile.ZipInfo, align_bytes: int) -> int:
    """Return where the bytes of a member begin, as ``torch.save`` aligns them.

    Source: ``getPadding`` in PyTorch's ``inline_container.cc``.
    """
    start = info.header_offset + _LOCAL_HEADER.size + len(info.filename.encode()) + 4
    if info.file_size >= _WIDE or info.header_offset >= _WIDE:
        start += 4 + 16 * (info.file_size >= _WIDE) + 8 * (info.header_offset >= _WIDE)
    return -(-start // align_bytes) * align_bytes


class _Anything:
    """Stands for every object of a pickle of which only the references matter."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def append(self, _: object) -> None:
        """Take an item of a list."""

    extend = add = append


class _ReferenceScanner(pickle.Unpickler):
    """Finds the references to storages in a pickle. It imports nothing and calls nothing that the pickle names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.references: list[tuple[str, str]] = []

    def find_class(self, _: str, __: str) -> Any:
        return _Anything

    def persistent_load(self, reference: Any) -> Any:
        if not (isinstance(reference, tuple) and len(reference) >= 4 and reference[0] == "storage"):
            raise PlainFileError("with references to other things than storages")
        self.references.append((str(reference[2]), str(reference[3])))
        return _Anything()


def _references(data: bytes) -> list[tuple[str, str]]:
    scanner = _ReferenceScanner(data)
    try:
        scanner.load()
    except PlainFileError:
        raise
    except Exception as error:  # whatever a damaged pickle raises, torch.load has the better message
        raise PlainFileError(f"unusual: {error}") from error
    return scanner.references
