"""The checksum of a source, compared with what a worker process has read.

A worker reads a source by a signed URL. S3 sends checksums only to those who ask for them, and none with ranges, so the store
behind the URL has nothing to compare. The gateway has asked for the source's head, and the call contains its headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checksums import algorithms as checksums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checksums.algorithms import Hasher
    from penstock.types import Buffer

COMPARED = ("crc32c", "crc64nvme")
"""The algorithms that are compared. The others would take longer than many transforms."""


class SourceChecksum:
    """The checksum that a whole source must have.

    Args:
        name: Name of the algorithm.
        computed: Computes it.
        expected: The checksum in base64.

    Cost: 0.1 to 0.2 s per GB.
    """

    def __init__(self, name: str, computed: Hasher, *, expected: str) -> None:
        self._name = name
        self._computed = computed
        self._expected = expected

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> SourceChecksum | None:
        """Return the checksum in the headers of a source, whose names are in lower case; None if none can be compared."""
        known = checksums.full_object({name.encode(): value.encode() for name, value in headers.items()})
        chosen = checksums.choose({name: value for name, value in known.items() if name in COMPARED})
        return None if chosen is None else cls(*chosen, expected=known[chosen[0]])

    def update(self, data: Buffer, *, is_last: bool) -> None:
        """Add bytes, and compare if they are the last ones.

        Raises:
            ChecksumError: The bytes do not match.
        """
        self._computed.update(data)
        if is_last:
            checksums.check(self._name, self._computed, self._expected)
