"""Which reads of an object belong together as a sequential run, and how far each run is read ahead.

A program that reads in sequence asks for bytes, gets them, and comes back for those that follow. Only that counts as a run:
many requests that arrive together before the first of them has an answer may just as well be one large read, which the
kernel cut into pieces.

A run is read ahead in proportion to what the program has already taken of it, so what is wasted when it stops is bounded
too, and the distance grows only while the program has to wait. From the start of an object the first return is convincing.
Elsewhere it may be chance, so the distance grows more slowly there.

A program that reads chunks at random places ends its runs after about the same number of bytes each time. Up to the length that
the last two runs had at least, a run is requested at once, and no further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNS_MAX = 8
"""ReadRuns of one object that are followed at the same time: programs and threads that read different parts of it."""
REORDERED_BYTES_MAX = 8 * MIB
"""Requests of one run that were sent together may arrive in any order, within this distance."""
_GROWTH = 8
"""Bytes to read ahead per byte that was taken. With 30 ms per round trip, 512 KiB, 4 MiB and 36 MiB arrive in the first three,
and the fourth already fills 1.4 GB/s."""
_GROWTH_ELSEWHERE = 1
"""The same for a run that neither begins at the start of the object nor has returned twice."""
_AHEAD_BYTES_MIN = 1 * MIB
EXPECTED_BYTES = 8 * MIB
"""What to read ahead at the first read of an object if the last ones were read to their ends: it saves two round trips."""


class ReadRun:
    """A program's reads in sequence.

    Attributes:
        start: Offset of its first byte.
        frontier: Offset after its last byte that was asked for.
        ahead_end: Offset up to which requests were sent.
        goal_bytes: How far beyond the frontier to read; 0 until it is known to be a run.
        taken_bytes: Bytes that it was given so far.
        returns_count: How often it asked for the next bytes after it was given some.
        continues: Whether the last read asked for the bytes that follow those before it.
        is_whole: Whether it has reached the end of the object from its start.
        usual_end: Offset up to which it will probably be read, because the runs before it were as long.
    """

    __slots__ = (
        "ahead_end",
        "continues",
        "frontier",
        "goal_bytes",
        "is_whole",
        "returns_count",
        "start",
        "taken_bytes",
        "usual_end",
    )

    def __init__(self, start: int, end: int, *, usual_bytes: int = 0) -> None:
        self.start = start
        self.usual_end = start + usual_bytes
        self.frontier = self.ahead_end = end
        self.goal_bytes = 0
        self.taken_bytes = 0
        self.returns_count = 0
        self.continues = False
        self.is_whole = False

    def takes(self, start: int, end: int, *, has_gap: bool) -> bool:
        """Whether a read belongs to this run; if so, it is noted.

        Args:
            start: Offset of its first byte.
            end: Offset after its last byte.
            has_gap: Whether some of its bytes are neither held nor requested. Before the frontier, that is a jump back.
        """
        if start == self.frontier or self.frontier < start <= self.ahead_end:
            self.continues = start == self.frontier
            self.frontier = end
            return True
        if start < self.frontier and not has_gap:
            if start < self.frontier - REORDERED_BYTES_MAX:
                return False
            self.continues = self.frontier < end
            self.frontier = max(self.frontier, end)
            return True
        if end == self.start and not self.taken_bytes:  # the second half of one large read arrived first
            self.start = start
            return True
        return False

    def adapt(self, *, waits: bool, share_bytes: int) -> None:
        """Choose how far to read ahead, after a read was noted.

        Args:
            waits: Whether the program has to wait for its bytes.
            share_bytes: The most bytes that this run may have ahead.
        """
        if self.frontier <= self.usual_end:
            self.goal_bytes = min(self.usual_end - self.frontier, share_bytes)
            return
        if not self.taken_bytes or not (self.continues or self.goal_bytes):
            return  # the reads so far came together, or skipped some bytes
        self.returns_count += 1
        is_convincing = self.start == 0 or self.returns_count > 2
        if waits or not self.goal_bytes:
            growth = _GROWTH if is_convincing else _GROWTH_ELSEWHERE
            self.goal_bytes = max(self.goal_bytes, growth * self.taken_bytes, _AHEAD_BYTES_MIN)
        self.goal_bytes = min(self.goal_bytes, share_bytes)


class ReadRuns:
    """The runs of one object, the one that was read last first."""

    __slots__ = ("_lengths_bytes", "_runs")

    def __init__(self) -> None:
        self._runs: list[ReadRun] = []
        self._lengths_bytes = (0, 0)  # of the last two runs that are followed no longer

    def __iter__(self) -> Iterator[ReadRun]:
        return iter(self._runs)

    def of(self, start: int, end: int, *, has_gap: bool) -> ReadRun | None:
        """Return the run that a read belongs to, and note the read; None if there is none."""
        runs = self._runs
        for index, run in enumerate(runs):
            if run.takes(start, end, has_gap=has_gap):
                if index:
                    del runs[index]
                    runs.insert(0, run)
                return run
        return None

    def begin(self, start: int, end: int) -> tuple[ReadRun, ReadRun | None]:
        """Return a new run, and the one that is followed no longer because there are too many."""
        run = ReadRun(start, end, usual_bytes=min(self._lengths_bytes))
        self._runs.insert(0, run)
        if len(self._runs) <= RUNS_MAX:
            return run, None
        old = self._runs.pop()
        self._lengths_bytes = self._lengths_bytes[1], old.frontier - old.start
        return run, old
