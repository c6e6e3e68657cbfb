"""What the objects that are read at any offset share: memory, the number of requests in flight, and who may read ahead.

All memory is charged to the budget. Read-ahead never exceeds it, and takes at most half of it. A read that somebody waits for
first takes back what is held for later, and then may exceed the budget by its own bytes, so that there is no deadlock.

One lock protects all objects of a store. It is held for microseconds, and never while requests are submitted or cancelled
or callbacks are called.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from penstock.config import MIB, FetchConfig
from penstock.errors import as_completion_error
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.fetch.window import Window
from penstock.memory.buffers import small_buffer
from penstock.types import Completion, Landing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fetch.pieces import Piece
    from penstock.fetch.runs import ReadRun
    from penstock.types import ByteRange, Core, ObjectInfo

_AHEAD_BYTES_MAX = 256 * MIB
"""Bytes ahead of all runs together, or half of the budget if that is less: 3.3 GB/s behind 30 ms and 90 MB/s per connection."""
_AHEAD_PER_IN_FLIGHT = 1.5
"""Bytes ahead of all runs per byte that may be in flight. What has arrived and is not read yet only evens out pauses, and the
first bytes of a job land in fresh memory, which costs more CPU than receiving them: 250 MiB ahead instead of 100 cost a reader
of 1 GB behind that delay a tenth of its speed."""
_PART_BYTES_MAX = 2 * MIB
"""Behind 30 ms and 90 MB/s per connection it takes 53 ms, so 1 GB/s needs 55 MB in flight; parts of 4 MiB need 80 MB."""
_SPARE_BYTES_MAX = 64 * MIB
"""Bytes of all objects that arrived, and of which programs took only a part or that they skipped."""
_IDLE_S = 1.0
"""A run that was not read for so long gives up what is held for it if others need the memory."""
_WHOLE_SCORE_MIN = 2
_REQUESTS_BEGIN = 32
"""1.26 GB/s behind 30 ms and 90 MB/s per connection."""
_PARTS_PER_GOAL = 32
"""Parts that the distance to read ahead is cut into, as long as they are neither too small nor too large."""


class PieceHolder(Protocol):
    """An object that holds pieces. All methods are called under the lock."""

    def read_ahead(self, run: ReadRun, sends: list[Piece], *, count_max: int) -> None:
        """Request what lies ahead of a run, as far as it may go: append at most `count_max` pieces, which are to be sent."""

    def pause(self, run: ReadRun) -> None:
        """Read ahead of a run no more, and drop what has arrived for it."""

    def drop(self, piece: Piece) -> None:
        """Forget a piece that nobody waits for."""


class PositionedReads:
    """The objects of one store that are read at any offset, and the memory that they share. All threads may use it.

    Args:
        core: The store.
        config: Sizes of parts and bounds of requests; None means ``FetchConfig()``.
        budget: The budget that all bytes are charged to.
        at_hand: Returns bytes of a version of an object if that needs neither the store nor a disk nor another thread; None if
            there is no such cache.
        fit_part: Returns the size that a part should have which is at most as large as its argument; None for any size.

    Attributes:
        core: The store.
        budget: The budget that all bytes are charged to.
        at_hand: The function that was passed.
        lock: Protects this and all of its objects.
    """

    def __init__(
        self,
        core: Core,
        *,
        config: FetchConfig | None = None,
        budget: Budget,
        at_hand: Callable[[ObjectInfo, ByteRange], memoryview | None] | None = None,
        fit_part: Callable[[int], int] | None = None,
    ) -> None:
        config = config or FetchConfig()
        self.core = core
        self.budget = budget
        self.at_hand = at_hand
        self.lock = threading.Lock()
        self._fit_part = fit_part
        self._part_bytes_max = min(config.part_bytes, _PART_BYTES_MAX)
        self._requests_max = requests_max = min(config.requests_max, _AHEAD_BYTES_MAX // self._part_bytes_max)
        self._window = Window(
            limit=min(_REQUESTS_BEGIN, requests_max),
            limit_min=1,
            limit_max=requests_max,
            waits_for_steady_rate=True,
        )
        self._in_flight_count = 0  # requests ahead
        self._in_flight_bytes = 0  # of them
        self._ahead_bytes = 0  # held or requested for runs
        self._spare: OrderedDict[Piece, PieceHolder] = OrderedDict()  # the one that was used last comes last
        self._spare_bytes = 0
        self._active: OrderedDict[ReadRun, tuple[PieceHolder, float]] = OrderedDict()  # and when it was read last
        self._whole_score = (
            0  # of the runs that began at the start of an object: how many of the last ones reached its end
        )
        self._hungry: OrderedDict[ReadRun, PieceHolder] = OrderedDict()  # want to read further ahead than they may

    # ── under the lock: how far ahead ──────────────────────────────────────────────────────────────────────────────

    def _ahead_bytes_max(self) -> int:
        wanted_bytes = int(_AHEAD_PER_IN_FLIGHT * self._window.limit * self._part_bytes_max)
        return min(_AHEAD_BYTES_MAX, self.budget.bytes_max // 2, wanted_bytes)

    def _is_window_full(self) -> bool:
        """Whether as much is in flight as the window allows, which counts parts of full size: shorter ones may be more."""
        return (
            self._in_flight_bytes >= self._window.limit * self._part_bytes_max
            or self._in_flight_count >= self._requests_max
        )

    def follow(self, owner: PieceHolder, run: ReadRun, *, waits: bool) -> None:
        """Note that a run was read, and choose how far to read ahead of it."""
        if waits:
            self._window.starving()
        run.adapt(waits=waits, share_bytes=self._ahead_bytes_max() // (len(self._active) or 1))
        if run.goal_bytes:
            self._active[run] = owner, time.monotonic()
            self._active.move_to_end(run)

    @property
    def expects_whole(self) -> bool:
        """Whether a long object that is read from its start will probably be read to its end, as the last ones were."""
        return self._whole_score >= _WHOLE_SCORE_MIN

    def note_whole(self, *, is_whole: bool) -> None:
        """Note that a run from the start of a long object has reached its end, or that it ended before."""
        self._whole_score = min(self._whole_score + 1, 2 * _WHOLE_SCORE_MIN) if is_whole else 0

    def part_bytes(self, goal_bytes: int) -> int:
        """Return the size of parts for a run that is to be read `goal_bytes` ahead."""
        part_bytes = min(1 * MIB, self._part_bytes_max)
        while 2 * part_bytes <= self._part_bytes_max and part_bytes * _PARTS_PER_GOAL <= goal_bytes:
            part_bytes *= 2
        return self._fit_part(part_bytes) if self._fit_part is not None else part_bytes

    def admit_ahead(self, piece: Piece) -> bool:
        """Find memory for a piece that nobody waits for; False if it has to wait."""
        length_bytes = piece.length_bytes
        if (
            self._is_window_full()
            or self._ahead_bytes + length_bytes > self._ahead_bytes_max()
            or not self._hold(piece, force=False)
        ):
            return False
        if not self._in_flight_count:
            self._window.started(time.monotonic())
        self._in_flight_count += 1
        self._in_flight_bytes += length_bytes
        if piece.run is not None:
            self._ahead_bytes += length_bytes
        return True

    def starve(self, owner: PieceHolder, run: ReadRun) -> None:
        """Remember that a run wants to read further ahead, and take the memory of one that has paused."""
        self._hungry[run] = owner
        oldest, (idle_owner, used_s) = next(iter(self._active.items()), (None, (owner, 0.0)))
        if oldest is not None and oldest is not run and time.monotonic() - used_s > _IDLE_S:
            idle_owner.pause(oldest)

    def feed(self, sends: list[Piece]) -> None:
        """Let runs that had to wait request more, each in turn."""
        for _ in range(len(self._hungry)):
            if self._is_window_full():
                return
            run, owner = self._hungry.popitem(last=False)
            owner.read_ahead(run, sends, count_max=1)

    def forget(self, run: ReadRun) -> None:
        """Read ahead of a run no more."""
        self._active.pop(run, None)
        self._hungry.pop(run, None)

    # ── under the lock: memory ─────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, piece: Piece, *, force: bool) -> bool:
        length_bytes = piece.length_bytes
        if length_bytes < POOLED_BYTES_MIN:
            if not self.budget.reserve(length_bytes, force=force):
                return False
            piece.reserved_bytes = length_bytes
            piece.landing = Landing(small_buffer(length_bytes), 0, length_bytes)
            return True
        buffer = self.budget.acquire(length_bytes, force=force)
        if buffer is None:
            return False
        piece.buffer = buffer
        piece.landing = Landing(buffer.view, 0, length_bytes, direct=buffer.owner)
        return True

    def admit(self, piece: Piece) -> None:
        """Find memory for a piece that a read waits for."""
        while not self._hold(piece, force=False):
            if self._spare:
                spare, owner = self._spare.popitem(last=False)
                self._spare_bytes -= spare.length_bytes
                owner.drop(spare)
            else:
                self._hold(piece, force=True)
                return

    def try_admit(self, piece: Piece) -> bool:
        """Find memory for a piece that nobody waits for, which is not part of a run."""
        return self._hold(piece, force=False)

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Hold pieces, whatever else needs memory, until they are kept again or released."""
        for piece in pieces:
            if self._spare.pop(piece, None) is not None:
                self._spare_bytes -= piece.length_bytes

    def keep(self, piece: Piece, owner: PieceHolder) -> None:
        """Hold a piece that may still be read, as long as there is room."""
        if piece not in self._spare:
            self._spare[piece] = owner
            self._spare_bytes += piece.length_bytes
        self._spare.move_to_end(piece)
        spare_bytes_max = min(_SPARE_BYTES_MAX, self.budget.bytes_max // 8)
        while self._spare_bytes > spare_bytes_max and len(self._spare) > 1:
            spare, spare_owner = self._spare.popitem(last=False)
            self._spare_bytes -= spare.length_bytes
            spare_owner.drop(spare)

    def detach(self, piece: Piece) -> None:
        """Note that a piece is no longer held for a run."""
        if piece.run is not None:
            piece.run = None
            self._ahead_bytes -= piece.length_bytes

    def release(self, piece: Piece) -> None:
        """Note that a piece is no longer held."""
        self.detach(piece)
        if self._spare.pop(piece, None) is not None:
            self._spare_bytes -= piece.length_bytes
        if piece.has_ended:
            self._free(piece)

    def _free(self, piece: Piece) -> None:
        piece.landing = piece.buffer = None
        if piece.reserved_bytes:
            self.budget.release(piece.reserved_bytes)
            piece.reserved_bytes = 0

    def end(self, piece: Piece, completion: Completion) -> None:
        """Note that a request has ended."""
        piece.transfer = piece.landing = None
        piece.has_ended = True
        if piece.is_dropped:
            self._free(piece)
        if piece.is_ahead:
            self._in_flight_count -= 1
            self._in_flight_bytes -= piece.length_bytes
            throttled = any(attempt.throttled for attempt in completion.attempts)
            self._window.completed(completion.received_bytes, time.monotonic(), throttled=throttled)

    # ── without the lock ───────────────────────────────────────────────────────────────────────────────────────────

    def send(self, pieces: Sequence[Piece]) -> None:
        """Submit the requests for pieces."""
        for piece in pieces:
            try:
                transfer = self.core.submit(piece.operation(), piece)
            except Exception as error:  # refused before it was sent: a closed store
                piece.done(Completion(piece.operation(), error=as_completion_error(error)))
                continue
            with self.lock:
                if not piece.has_ended:
                    piece.transfer = transfer
            if piece.is_dropped:
                transfer.cancel()
