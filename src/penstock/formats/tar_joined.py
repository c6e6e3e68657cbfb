"""Several tar archives one behind the other, as a pipe carries them: where each one ends.

The parser of tar takes data after an end-of-archive mark for damage, and in an object it is. ``ArchiveSplitter`` walks from
header to header and cuts the stream where an archive begins behind the mark of another one, so that each gets its own parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.formats.tar_header import BLOCK_BYTES, ZERO_BLOCK, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator


class ArchiveSplitter:
    """Cuts a stream of archives into the archives. Members of more than 8 GiB must state their size in the header itself.

    Cost: holds less than a header.
    """

    def __init__(self) -> None:
        self._held = b""  # the first bytes of a header
        self._skip_bytes = 0  # to the next header
        self._has_ended = False
        self._is_passing = False  # after a block that is no header, which the parser reports

    def feed(self, data: bytes) -> Iterator[tuple[memoryview, bool]]:
        """Yield the next pieces of the stream, and for each whether another archive begins behind it."""
        view = memoryview(self._held + data if self._held else data)
        start = at = 0
        while not self._is_passing:
            step = min(self._skip_bytes, len(view) - at)
            at, self._skip_bytes = at + step, self._skip_bytes - step
            if self._skip_bytes or len(view) - at < BLOCK_BYTES:
                break
            block = bytes(view[at : at + BLOCK_BYTES])
            if block == ZERO_BLOCK:
                self._has_ended = True
            else:
                if self._has_ended:
                    yield view[start:at], True
                    start, self._has_ended = at, False
                self._read(block)
            at += BLOCK_BYTES
        at = len(view) if self._is_passing else at
        self._held = bytes(view[at:])
        if at > start:
            yield view[start:at], False

    def finish(self) -> bytes:
        """Return what is held: an incomplete header, if the stream was cut off."""
        held, self._held = self._held, b""
        return held

    def _read(self, block: bytes) -> None:
        try:
            size_bytes = read_header(block).size_bytes
        except ValueError:
            self._is_passing = True
        else:
            self._skip_bytes = size_bytes + -size_bytes % BLOCK_BYTES
