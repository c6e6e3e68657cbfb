"""The position of one reader, by which a run that cannot store its blocks waits for it."""

from __future__ import annotations

import time


class Cursor:
    """The position of one reader in a run.

    Attributes:
        position: Next byte that the reader needs.
        end: End of its range.
        moved_s: When it last took a piece, on the monotonic clock, in seconds.
    """

    __slots__ = ("end", "moved_s", "position")

    def __init__(self, position: int, end: int) -> None:
        self.position = position
        self.end = end
        self.moved_s = time.monotonic()

    def move(self, length_bytes: int) -> None:
        """Note that the reader took a piece."""
        self.position += length_bytes
        self.moved_s = time.monotonic()

    def needs(self, start: int, end: int) -> bool:
        """Whether the reader has still to take some of these bytes."""
        return self.position < min(end, self.end) and start < self.end
