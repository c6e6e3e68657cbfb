"""Comparing files that were read in pieces, in any order, with the checksums that the store keeps of them.

Ranges have no checksum of their own in S3. But a CRC of a file follows from those of its pieces, so a file that was read
whole can be verified without reading it again.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from penstock.crc import combined_crc, sample_crc
from penstock.errors import ChecksumError, ObjectChangedError
from penstock.store.inflight import InFlight
from penstock.types import Head, same_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.base import Store
    from penstock.types import Buffer, Key, ObjectInfo


@dataclass(slots=True, kw_only=True)
class _CheckedFile:
    """What is known of a file.

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
