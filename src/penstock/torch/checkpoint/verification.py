"""What the bytes of a checkpoint are compared with, as they arrive in the order of the file."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from penstock.errors import CheckpointError, ChecksumError
from penstock.store import checksums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.checksums import Hasher
    from penstock.torch.checkpoint.archive import StoredStorage
    from penstock.types import ObjectInfo


class FileVerifier(Protocol):
    """Compares a file with a checksum."""

    def add(self, start: int, data: memoryview) -> None:
        """Take the next bytes, which begin at offset `start` of the file; raises ``PenstockError`` if they are wrong."""

    def finish(self) -> None:
        """Take the end of the file; raises ``PenstockError`` if it is wrong."""


def choose_verifier(info: ObjectInfo, storages: Sequence[StoredStorage], url: str) -> FileVerifier:
    """Return what compares a file with the store's checksum of it, or else each storage with the checksum in the archive."""
    chosen = checksums.choose(info.checksums)
    if chosen is not None:
        return _WholeVerifier(*chosen, info.checksums[chosen[0]], url)
    return _StorageVerifier(storages, url)


class _WholeVerifier:
    """Compares all bytes with the checksum that the store keeps of the object."""

    def __init__(self, name: str, hasher: Hasher, expected: str, url: str) -> None:
        self._name, self._hasher, self._expected, self._url = name, hasher, expected, url

    def add(self, _: int, data: memoryview) -> None:
        self._hasher.update(data)

    def finish(self) -> None:
        try:
            checksums.check(self._name, self._hasher, self._expected)
        except ChecksumError as error:
            error.operation, error.url = "GET", self._url
            raise


class _StorageVerifier:
    """Compares each storage with the CRC-32 of its zip member. A checksum of 0 says that none was computed."""

    def __init__(self, storages: Sequence[StoredStorage], url: str) -> None:
        self._waiting = [storage for storage in reversed(storages) if storage.crc and storage.end > storage.start]
        self._crc = 0
        self._url = url

    def add(self, start: int, data: memoryview) -> None:
        end = start + len(data)
        while self._waiting and (storage := self._waiting[-1]).start < end:
            piece = data[max(storage.start, start) - start : min(storage.end, end) - start]
            self._crc = zlib.crc32(piece, self._crc)
            if storage.end > end:
                return
            self._waiting.pop()
            crc, self._crc = self._crc, 0
            if crc != storage.crc:
                what = f"storage {storage.key} is damaged: its CRC-32 is {crc:08x}, and the file says {storage.crc:08x}"
                raise CheckpointError(what, url=self._url, offset_bytes=storage.start)

    def finish(self) -> None:
        assert not self._waiting  # every byte of the file was added
