"""The formats of a pipe for the program that reads it: from chunks of bytes to samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from penstock.formats import Sample, parser_of
from penstock.formats.parsing import feed_in_pieces
from penstock.formats.tar_joined import ArchiveSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PipeFormat: TypeAlias = Literal["recordio", "tfrecord", "tar", "lines"]

LINES_MAX = 8192
"""Number of lines that are made samples together: a sample takes some 500 bytes, and a chunk may have a million lines."""


class PipeRecords(Protocol):
    """Parses the bytes of a pipe."""

    def blocks(self, chunks: Iterable[bytes], name: str) -> Iterator[Sequence[Any]]:
        """Yield the items that each chunk completes, perhaps none.

        Args:
            chunks: The bytes of an epoch.
            name: Name of the pipe, for messages.

        Raises:
            CorruptShardError: The bytes are not of this format.
        """

    def values(self, block: Sequence[Any]) -> Iterable[Any]:
        """Return the items of a block as the reader's own loop gives them."""

    def samples(self, block: Sequence[Any], first: int) -> Sequence[Sample]:
        """Return the items of a block as a pipeline reads them; `first` is the number of the first of them in the epoch."""


class PipeLines:
    """Lines. An item is the line without its break."""

    def blocks(self, chunks: Iterable[bytes], name: str) -> Iterator[Sequence[bytes]]:
        """Yield the lines that each chunk completes."""
        del name
        rest = b""
        for data in chunks:
            first, newline, more = data.partition(b"\n")
            if not newline:
                rest += data
                continue
            *lines, end = more.split(b"\n")
            lines.insert(0, rest + first)
            for at in range(0, len(lines), LINES_MAX):
                yield lines[at : at + LINES_MAX]
            rest = end
        if rest:
            yield [rest]

    def values(self, block: Sequence[bytes]) -> Iterable[bytes]:
        """Return the lines."""
        return block

    def samples(self, block: Sequence[bytes], first: int) -> Sequence[Sample]:
        """Return samples with the field ``line``; the key is the number of the line in twelve digits."""
        return [
            Sample(f"{number:012d}", {"line": memoryview(line)}, number) for number, line in enumerate(block, first)
        ]


class PipeSamples:
    """Records or tar members. An item is a sample, whose fields are slices of the chunk.

    Args:
        blocks: Parses the chunks.
        value: Makes of a sample what the reader's own loop gives.
    """

    def __init__(
        self, blocks: Callable[[Iterable[bytes], str], Iterator[Sequence[Sample]]], value: Callable[[Sample], Any]
    ) -> None:
        self.blocks = blocks
        self._value = value

    def values(self, block: Sequence[Sample]) -> Iterable[Any]:
        """Return what the loop gets of each sample."""
        return map(self._value, block)

    def samples(self, block: Sequence[Sample], first: int) -> Sequence[Sample]:
        """Return the block."""
        del first
        return block


def _record_blocks(format_name: str) -> Callable[[Iterable[bytes], str], Iterator[Sequence[Sample]]]:
    def blocks(chunks: Iterable[bytes], name: str) -> Iterator[Sequence[Sample]]:
        parser = parser_of(format_name, shard=name)
        for data in chunks:
            yield from feed_in_pieces(parser, data)
        if parser.offset_bytes:  # an epoch without an object is no shard
            yield parser.finish()

    return blocks


def _tar_blocks(chunks: Iterable[bytes], name: str) -> Iterator[Sequence[Sample]]:
    splitter = ArchiveSplitter()
    parser = parser_of("tar", shard=name)
    for data in chunks:
        for piece, is_end in splitter.feed(data):
            yield parser.feed(piece)
            if is_end:
                yield parser.finish()
                parser = parser_of("tar", shard=name)
    if held := splitter.finish():
        yield parser.feed(held)
    if parser.offset_bytes:
        yield parser.finish()


def _record_of(sample: Sample) -> bytes:
    return bytes(sample.fields["record"])


def _dict_of(sample: Sample) -> dict[str, Any]:
    return {"__key__": sample.key, **{name: bytes(value) for name, value in sample.fields.items()}}


PIPE_FORMATS: dict[str, PipeRecords] = {
    "recordio": PipeSamples(_record_blocks("recordio-raw"), _record_of),
    "tfrecord": PipeSamples(_record_blocks("tfrecord-raw"), _record_of),
    "tar": PipeSamples(_tar_blocks, _dict_of),
    "lines": PipeLines(),
}
