"""The bytes of an entry as a pipe carries them: inflated or not, wrapped in RecordIO or not."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from penstock.channels.inflating import Inflating
from penstock.errors import ConfigError
from penstock.formats.recordio import MAGIC, PART_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.channels.inputs import InputChannel
    from penstock.types import Buffer

_LENGTH = struct.Struct("<I")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


class Content(Protocol):
    """Turns the pieces of an object, or a text, into what the pipe carries."""

    needs_size: bool
    """Whether ``wrap`` has to know the size of an object before its first piece."""

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield what the pipe carries for an object.

        Args:
            pieces: The stored bytes of the object.
            size_bytes: Their number, if ``needs_size``.
            url: URL of the object, for messages.
        """

    def wrap_text(self, text: bytes) -> Iterator[Buffer]:
        """Yield what the pipe carries for the value of an attribute, which no object holds."""


def content_of(channel: InputChannel) -> Content:
    """Return the content of a channel's pipes."""
    is_gzip = channel.compression == "Gzip"
    if channel.record_wrapper == "RecordIO":
        return InflatedRecordContent() if is_gzip else RecordContent()
    return InflatedContent() if is_gzip else PlainContent()


class PlainContent:
    """Objects back to back, as they are stored."""

    needs_size = False

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield the pieces."""
        del size_bytes, url
        yield from pieces

    def wrap_text(self, text: bytes) -> Iterator[Buffer]:
        """Yield the text."""
        yield text


class InflatedContent(PlainContent):
    """Objects back to back, each inflated by gzip."""

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield the inflated pieces, each of a bounded size.

        Raises:
            CorruptShardError: The object is not gzip, or is cut off.
        """
        del size_bytes
        inflating = Inflating(url)
        for piece in pieces:
            yield from inflating.pieces(piece)
        inflating.end()


class RecordContent:
    """Each object, and each text, as one RecordIO record.

    A record is never split, since readers do not agree on what its parts are joined with; so it has at most 2^29 - 1 bytes.
    """

    needs_size = True

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield the record's head, the pieces, and its padding.

        Raises:
            ConfigError: The object is too large for one record.
        """
        assert size_bytes is not None
        yield record_head(size_bytes, url)
        yield from pieces
        yield _PADDING[size_bytes % 4]

    def wrap_text(self, text: bytes) -> Iterator[Buffer]:
        """Yield the record."""
        yield from self.wrap([text], len(text), "an attribute")


class InflatedRecordContent(RecordContent):
    """Each object, inflated, as one RecordIO record.

    Cost: holds the inflated object, whose length the record begins with.
    """

    needs_size = False

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield the record of the inflated pieces.

        Raises:
            ConfigError: The inflated object is too large for one record.
        """
        inflated: list[Buffer] = []
        inflated_bytes = 0
        for piece in InflatedContent().wrap(pieces, size_bytes, url):
            inflated.append(piece)
            inflated_bytes += len(piece)
            record_head(inflated_bytes, url)
        yield from super().wrap(inflated, inflated_bytes, url)

    def wrap_text(self, text: bytes) -> Iterator[Buffer]:
        """Yield the record; texts are not compressed."""
        yield from super().wrap([text], len(text), "an attribute")


def record_head(size_bytes: int, url: str) -> bytes:
    """Return the eight bytes before a record of `size_bytes` bytes.

    Raises:
        ConfigError: The record is too large.
    """
    if size_bytes > PART_BYTES_MAX:
        raise ConfigError(
            f"{url} has more than {PART_BYTES_MAX} bytes, the most that one RecordIO record can hold",
            hint="leave out wrapper=RecordIO, or store smaller objects",
        )
    return MAGIC + _LENGTH.pack(size_bytes)
