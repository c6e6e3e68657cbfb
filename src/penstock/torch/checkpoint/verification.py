"""Verifies the files of a checkpoint while they are read, by checksums that the store keeps or that are in the files.

A ``FileVerifier`` takes the bytes of one file in order. ``FileChecks`` takes the pieces of many files in any order: ranges have
no checksum of their own in S3, but the CRC of a file follows from those of its pieces, so that a file that was read whole can
be verified without reading it again.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from penstock.checksums import algorithms as checksums
from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32 import crc32
from penstock.checksums.crc32c import sample_crc
from penstock.errors import CheckpointError, ChecksumError, ObjectChangedError
from penstock.store.inflight import InFlight
from penstock.types import Head, same_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checksums.algorithms import Hasher
    from penstock.store.base import Store
    from penstock.torch.checkpoint.archive import StoredStorage
    from penstock.types import Buffer, Key, ObjectInfo


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
            self._crc = crc32(piece, self._crc)
            if storage.end > end:
                return
            self._waiting.pop()
            crc, self._crc = self._crc, 0
            if crc != storage.crc:
                what = f"storage {storage.key} is damaged: its CRC-32 is {crc:08x}, and the file says {storage.crc:08x}"
                raise CheckpointError(what, url=self._url, offset_bytes=storage.start)

    def finish(self) -> None:
        assert not self._waiting  # every byte of the file was added


@dataclass(slots=True, kw_only=True)
class _CheckedFile:
    """The known size and checksums of a file.

    Attributes:
        info: The version that is read.
        head_crc: CRC-32C of the bytes before the first piece.
        pieces: Start and end of each piece, in the order of the file and without gaps.
        crcs: CRC-32C of each piece that was read, by its start.
    """

    info: ObjectInfo
    head_crc: int
    pieces: Sequence[tuple[int, int]]
    crcs: dict[int, int] = field(default_factory=dict)


class FileChecks:
    """Verifies files by the CRC-32C that the store keeps of each, if it keeps one. A context manager; for one thread.

    The checksums are requested while the files are read.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[Key, _CheckedFile] = {}
        self._in_flight: InFlight[Key] = InFlight(store)

    def expect(self, info: ObjectInfo, *, head_crc: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Verify a file of which every piece will be added.

        Args:
            info: The version that is read.
            head_crc: CRC-32C of the bytes before the first piece.
            pieces: Start and end of each piece, in the order of the file and without gaps.
        """
        if self._store.keeps_checksums:
            self._files[info.key] = _CheckedFile(info=info, head_crc=head_crc, pieces=pieces)
            self._in_flight.submit(Head(info.key, info.etag, info.size_bytes), info.key)

    def add(self, key: Key, start: int, data: Buffer) -> None:
        """Add a piece that was read. Cost: 0.1 ms per MB if the file is verified."""
        if key in self._files:
            self._files[key].crcs[start] = sample_crc(data)

    def check(self) -> None:
        """Compare the files with their checksums, once every piece was added.

        Raises:
            ChecksumError: A file does not have its checksum.
            ObjectChangedError: A file was replaced while it was read.
            StoreError: A checksum could not be requested.

        Cost: 20 µs per piece.
        """
        for key, completion in self._in_flight.drain():
            file, url = self._files[key], self._store.describe(key)
            if completion.error is not None:
                raise completion.error
            assert completion.info is not None  # every successful Head has one
            if not same_version(completion.info, file.info):
                raise ObjectChangedError("the file was replaced while it was read", url=url)
            expected = completion.info.checksums.get("crc32c")
            if expected is None:
                continue
            crc = file.head_crc
            for start, end in file.pieces:
                crc = combined_crc(crc, file.crcs[start], end - start)
            found = base64.b64encode(crc.to_bytes(4, "big")).decode()
            if found != expected:
                what = f"what was read has the CRC32C {found}, but the store keeps {expected}"
                raise ChecksumError(what, operation="GET", url=url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._in_flight.cancel()
        self._in_flight.drain()
