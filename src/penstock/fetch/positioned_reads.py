"""Shared parts of objects that are read at any offset: memory, the number of requests in flight, and who may read ahead.

All memory is charged to the budget. Read-ahead never exceeds the budget, and takes at most half of it. A read that somebody
waits for first reclaims the memory of read-ahead, and then may exceed the budget by its own bytes, so there is no deadlock.

One lock protects all objects of a store. It is held for microseconds, and never while requests are submitted or cancelled
or callbacks are called.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from penstock.config import MIB, FetchConfig
from penstock.errors import as_completion_error
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.fetch.concurrency import Concurrency
from penstock.memory.buffers import small_buffer
from penstock.types import ByteRange, Completion, Get, Landing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.errors import PenstockError
    from penstock.fetch.budget import PartBuffer
    from penstock.fetch.positioned import PositionedObject
    from penstock.types import Core, ObjectInfo, Transfer


STREAMS_MAX = 8
"""ReadStreams of one object that are followed at the same time: programs and threads that read different parts of it."""
REORDERED_BYTES_MAX = 8 * MIB
"""Requests of one stream that were sent together may arrive in any order, within this distance."""
_GROWTH = 8
"""Bytes to read ahead per byte that was taken. With 30 ms per round trip, 512 KiB, 4 MiB and 36 MiB arrive in the first three,
and the fourth already fills 1.4 GB/s."""
_GROWTH_ELSEWHERE = 1
"""The same for a stream that neither begins at the start of the object nor has returned twice."""
_AHEAD_BYTES_MIN = 1 * MIB
EXPECTED_BYTES = 8 * MIB
"""What to read ahead at the first read of an object if the last ones were read to their ends: it saves two round trips."""


@dataclass(slots=True, eq=False, repr=False)
class ReadStream:
    """A program's reads in sequence.

    Attributes:
        start: Offset of its first byte.
        frontier: Offset after its last byte that was asked for.
        ahead_end: Offset up to which requests were sent.
        goal_bytes: Bytes to read beyond the frontier; 0 until it is known to be a stream.
        taken_bytes: Bytes that it was given so far.
        returns_count: Number of times that it asked for the next bytes after it was given some.
        continues: Whether the last read asked for the bytes that follow those before it.
        is_whole: Whether it has reached the end of the object from its start.
        usual_end: Offset up to which it will probably be read, because the streams before it were as long.
    """

    start: int
    frontier: int
    usual_end: int
    ahead_end: int
    goal_bytes: int = 0
    taken_bytes: int = 0
    returns_count: int = 0
    continues: bool = False
    is_whole: bool = False

    def takes(self, start: int, end: int, *, has_gap: bool) -> bool:
        """Whether a read belongs to this stream; if so, it is noted.

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
            share_bytes: The most bytes that this stream may have ahead.
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


class ReadStreams:
    """The streams of one object, the one that was read last first."""

    __slots__ = ("_lengths_bytes", "_streams")

    def __init__(self) -> None:
        self._streams: list[ReadStream] = []
        self._lengths_bytes = (0, 0)  # of the last two streams that are followed no longer

    def __iter__(self) -> Iterator[ReadStream]:
        return iter(self._streams)

    def of(self, start: int, end: int, *, has_gap: bool) -> ReadStream | None:
        """Return the stream that a read belongs to, and note the read; None if there is none."""
        streams = self._streams
        for index, stream in enumerate(streams):
            if stream.takes(start, end, has_gap=has_gap):
                if index:
                    del streams[index]
                    streams.insert(0, stream)
                return stream
        return None

    def begin(self, start: int, end: int) -> tuple[ReadStream, ReadStream | None]:
        """Return a new stream, and the one that is followed no longer because there are too many."""
        stream = ReadStream(start, end, usual_end=start + min(self._lengths_bytes), ahead_end=end)
        self._streams.insert(0, stream)
        if len(self._streams) <= STREAMS_MAX:
            return stream, None
        old = self._streams.pop()
        self._lengths_bytes = self._lengths_bytes[1], old.frontier - old.start
        return stream, old


@dataclass(slots=True, eq=False, repr=False)
class Piece:
    """Consecutive bytes of one version of an object: a request, the sink of its answer, and then its bytes.

    Attributes:
        owner: The object; it holds the piece.
        start: Offset of its first byte in the object.
        end: Offset after its last byte.
        stream: The stream that it was requested ahead for; None if a read asked for it, or when the stream is over.
        landing: Memory for the body; None once the request has ended.
        buffer: The buffer that the body lands in; None if it is small.
        reserved_bytes: Bytes reserved in the budget for it. A ``PartBuffer`` is charged separately and not counted here.
        transfer: The request under way; None before and afterwards.
        data: uint8[end - start]; None until they are here.
        given_bytes: Number of its bytes that were given to reads.
        waiting: The reads that wait for it.
        is_ahead: Whether it was requested before a read asked for it.
        is_dropped: Whether its bytes are not wanted any more.
        has_ended: Whether its request has ended.
        leaves_body_alone: True: nobody changes the bytes after they have arrived.
    """

    leaves_body_alone: ClassVar[bool] = True

    owner: PositionedObject
    start: int
    end: int
    stream: ReadStream | None = field(kw_only=True, default=None)
    is_ahead: bool = field(kw_only=True)
    landing: Landing | None = None
    buffer: PartBuffer | None = None
    reserved_bytes: int = 0
    transfer: Transfer | None = None
    data: memoryview | None = None
    given_bytes: int = 0
    waiting: list[WaitingRead] = field(default_factory=list)
    is_dropped: bool = False
    has_ended: bool = False

    @property
    def length_bytes(self) -> int:
        """Number of its bytes."""
        return self.end - self.start

    def operation(self) -> Get:
        """Return the request; for a whole object without a range, because only then does S3 send its checksum."""
        info = self.owner.info
        whole = self.start == 0 and self.end == info.size_bytes
        return Get(info.key, None if whole else ByteRange(self.start, self.end), info.etag)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        self.owner.on_head(self, info)
        landing = self.landing
        if landing is not None:
            landing.offset = landing.start
        return landing

    def done(self, completion: Completion) -> None:
        """Take the end of the request; see ``types.Sink.done``."""
        self.owner.on_done(self, completion)


@dataclass(slots=True, eq=False, repr=False)
class WaitingRead:
    """A read that waits until all of its pieces are here.

    Attributes:
        start: Offset of its first byte in the object.
        end: Offset after its last byte.
        pieces: The pieces that hold its bytes, in their order; it keeps them alive.
        missing_count: Number of the pieces that have not arrived.
        stream: The stream that it belongs to; None if there is none.
        then: Receives the bytes, or the error.
        reader: The open file that asked; closing it cancels the read.
        has_ended: Whether `then` was called, or is about to be.
    """

    start: int
    end: int
    then: Callable[[Sequence[memoryview] | PenstockError], None]
    reader: object
    pieces: list[Piece] = field(default_factory=list)
    missing_count: int = 0
    stream: ReadStream | None = None
    has_ended: bool = False


_AHEAD_BYTES_MAX = 256 * MIB
"""Bytes ahead of all streams, or half of the budget if that is less: 3.3 GB/s behind 30 ms and 90 MB/s per connection."""
_AHEAD_PER_IN_FLIGHT = 1.5
"""Bytes ahead of all streams per byte that may be in flight. What has arrived and is not read yet only evens out pauses; the
first bytes of a job land in fresh memory, which costs more CPU than receiving them: 250 MiB ahead instead of 100 cost a reader
of 1 GB behind that delay a tenth of its speed."""
_PART_BYTES_MAX = 2 * MIB
"""Behind 30 ms and 90 MB/s per connection it takes 53 ms, so 1 GB/s needs 55 MB in flight; parts of 4 MiB need 80 MB."""
_SPARE_BYTES_MAX = 64 * MIB
"""Bytes of all objects that arrived, and of which programs took only a part or that they skipped."""
_IDLE_S = 1.0
"""A stream that was not read for so long gives up what is held for it if others need the memory."""
_WHOLE_SCORE_MIN = 2
_REQUESTS_BEGIN = 32
"""1.26 GB/s behind 30 ms and 90 MB/s per connection."""
_PARTS_PER_GOAL = 32
"""Parts that the distance to read ahead is cut into, as long as they are neither too small nor too large."""


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
        self._concurrency = Concurrency(
            limit=min(_REQUESTS_BEGIN, requests_max),
            limit_min=1,
            limit_max=requests_max,
            waits_for_steady_rate=True,
        )
        self._in_flight_count = 0  # requests ahead
        self._in_flight_bytes = 0  # of them
        self._ahead_bytes = 0  # held or requested for streams
        self._spare: OrderedDict[Piece, None] = OrderedDict()  # the one that was used last comes last
        self._spare_bytes = 0
        self._active: OrderedDict[ReadStream, tuple[PositionedObject, float]] = (
            OrderedDict()
        )  # and when it was read last
        # of the streams that began at the start of an object: how many of the last ones reached its end
        self._whole_score = 0
        # those that want to read further ahead than they may
        self._waiting: OrderedDict[ReadStream, PositionedObject] = OrderedDict()

    # ── under the lock: how far ahead ──────────────────────────────────────────────────────────────────────────────

    def _ahead_bytes_max(self) -> int:
        wanted_bytes = int(_AHEAD_PER_IN_FLIGHT * self._concurrency.limit * self._part_bytes_max)
        return min(_AHEAD_BYTES_MAX, self.budget.bytes_max // 2, wanted_bytes)

    def _is_full(self) -> bool:
        """Whether as much is in flight as the limit allows, which counts parts of full size: shorter ones may be more."""
        return (
            self._in_flight_bytes >= self._concurrency.limit * self._part_bytes_max
            or self._in_flight_count >= self._requests_max
        )

    def follow(self, owner: PositionedObject, stream: ReadStream, *, waits: bool) -> None:
        """Note that a stream was read, and choose how far to read ahead of it."""
        if waits:
            self._concurrency.starving()
        stream.adapt(waits=waits, share_bytes=self._ahead_bytes_max() // (len(self._active) or 1))
        if stream.goal_bytes:
            self._active[stream] = owner, time.monotonic()
            self._active.move_to_end(stream)

    @property
    def expects_whole(self) -> bool:
        """Whether a long object that is read from its start will probably be read to its end, as the last ones were."""
        return self._whole_score >= _WHOLE_SCORE_MIN

    def note_whole(self, *, is_whole: bool) -> None:
        """Note that a stream from the start of a long object has reached its end, or that it ended before."""
        self._whole_score = min(self._whole_score + 1, 2 * _WHOLE_SCORE_MIN) if is_whole else 0

    def part_bytes(self, goal_bytes: int) -> int:
        """Return the size of parts for a stream that is to be read `goal_bytes` ahead."""
        part_bytes = min(1 * MIB, self._part_bytes_max)
        while 2 * part_bytes <= self._part_bytes_max and part_bytes * _PARTS_PER_GOAL <= goal_bytes:
            part_bytes *= 2
        return self._fit_part(part_bytes) if self._fit_part is not None else part_bytes

    def admit_ahead(self, piece: Piece) -> bool:
        """Find memory for a piece that nobody waits for; False if it has to wait."""
        length_bytes = piece.length_bytes
        if self._is_full() or self._ahead_bytes + length_bytes > self._ahead_bytes_max() or not self.try_admit(piece):
            return False
        if not self._in_flight_count:
            self._concurrency.started(time.monotonic())
        self._in_flight_count += 1
        self._in_flight_bytes += length_bytes
        if piece.stream is not None:
            self._ahead_bytes += length_bytes
        return True

    def wait_for_room(self, owner: PositionedObject, stream: ReadStream) -> None:
        """Remember that a stream wants to read further ahead, and take the memory of one that has paused."""
        self._waiting[stream] = owner
        oldest, (idle_owner, used_s) = next(iter(self._active.items()), (None, (owner, 0.0)))
        if oldest is not None and oldest is not stream and time.monotonic() - used_s > _IDLE_S:
            idle_owner.pause(oldest)

    def read_ahead_of_waiting(self, sends: list[Piece]) -> None:
        """Let streams that had to wait request more, each in turn."""
        for _ in range(len(self._waiting)):
            if self._is_full():
                return
            stream, owner = self._waiting.popitem(last=False)
            owner.read_ahead(stream, sends, count_max=1)

    def forget(self, stream: ReadStream) -> None:
        """Read ahead of a stream no more."""
        self._active.pop(stream, None)
        self._waiting.pop(stream, None)

    # ── under the lock: memory ─────────────────────────────────────────────────────────────────────────────────────

    def try_admit(self, piece: Piece, *, force: bool = False) -> bool:
        """Find memory for a piece; False if the budget lacks it and `force` is false."""
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
        while not self.try_admit(piece):
            if not self._spare:
                self.try_admit(piece, force=True)
                return
            self._drop_oldest_spare()

    def _drop_oldest_spare(self) -> None:
        spare, _ = self._spare.popitem(last=False)
        self._spare_bytes -= spare.length_bytes
        spare.owner.drop(spare)

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Hold pieces, whatever else needs memory, until they are kept again or released."""
        for piece in pieces:
            self._remove_spare(piece)

    def keep(self, piece: Piece) -> None:
        """Hold a piece that may still be read, as long as there is room."""
        if piece not in self._spare:
            self._spare[piece] = None
            self._spare_bytes += piece.length_bytes
        self._spare.move_to_end(piece)
        spare_bytes_max = min(_SPARE_BYTES_MAX, self.budget.bytes_max // 8)
        while self._spare_bytes > spare_bytes_max and len(self._spare) > 1:
            self._drop_oldest_spare()

    def _remove_spare(self, piece: Piece) -> None:
        if piece in self._spare:
            del self._spare[piece]
            self._spare_bytes -= piece.length_bytes

    def detach(self, piece: Piece) -> None:
        """Note that a piece is no longer held for a stream."""
        if piece.stream is not None:
            piece.stream = None
            self._ahead_bytes -= piece.length_bytes

    def release(self, piece: Piece) -> None:
        """Note that a piece is no longer held."""
        self.detach(piece)
        self._remove_spare(piece)
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
            self._concurrency.completed(completion.received_bytes, time.monotonic(), throttled=throttled)

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
