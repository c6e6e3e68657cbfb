"""Inflates the gzip objects of a channel, for files and for pipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import CorruptShardError, DataError
from penstock.formats.compression import Gunzip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import Buffer


class Inflating:
    """Inflates one object.

    Args:
        name: Name of the object in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._gunzip = Gunzip()

    def pieces(self, data: Buffer) -> Iterator[Buffer]:
        """Yield what the next bytes are inflated to, in pieces of a bounded size.

        Raises:
            CorruptShardError: The object is not gzip.
        """
        try:
            yield from self._gunzip.pieces(memoryview(data))
        except ValueError as error:
            raise self._failure(error) from None

    def end(self) -> None:
        """Check that the object is complete.

        Raises:
            CorruptShardError: The object is cut off.
        """
        try:
            self._gunzip.end()
        except ValueError as error:
            raise self._failure(error) from None

    def _failure(self, error: ValueError) -> DataError:
        if isinstance(error, DataError):
            return error
        return CorruptShardError(str(error), shard=self._name, hint="compression=Gzip is for objects that gzip wrote")
