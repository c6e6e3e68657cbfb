"""One version of an object as a read-only file, for readers that look here and there before the bulk is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.config import KIB
from penstock.fetch import PlanItem
from penstock.memory.raw_file import RawFile
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store import Store
    from penstock.types import ObjectInfo

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
