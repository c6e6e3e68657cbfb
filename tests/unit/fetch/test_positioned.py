"""``PositionedObject``: reads at any offset, against a store whose answers come when the test says so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config import KIB, MIB, FetchConfig
from penstock.errors import (
    CancelledOperationError,
    ClosedError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    SpanError,
    UnavailableError,
)
from penstock.fetch import Budget
from penstock.fetch.positioned import FIRST_BYTES, SMALL_BYTES, WHOLE_BYTES_MAX, PositionedObject
from penstock.fetch.positioned_reads import PositionedReads
from penstock.types import ByteRange, Completion, Get, Landing, ObjectInfo

BYTES = random.Random(5).randbytes(40 * MIB)


class Request:
    """A request that has not been answered."""

    def __init__(self, core: HeldCore, operation: Get, sink: Any) -> None:
        self.core = core
        self.operation = operation
        self.sink = sink
        self.cancelled = False

    @property
    def span(self) -> tuple[int, int]:
        return tuple(self.operation.span or (0, self.core.info.size_bytes))  # type: ignore[return-value]

    def cancel(self) -> None:
        self.cancelled = True

    def unanswered_s(self) -> float:
        return 0.0

    def answer(self, *, error: Any = None, info: ObjectInfo | None = None) -> None:
        """Deliver the bytes, or an error."""
        self.core.waiting.remove(self)
        completion = Completion(self.operation, error=error)
        info = info or self.core.info
        if error is None:
            start, end = self.span
            try:
                landing = self.sink.head(info, ByteRange(start, end))
                assert isinstance(landing, Landing)
                memoryview(landing.buffer)[landing.start : landing.end] = BYTES[start:end]
                landing.offset = landing.end
                completion.landing, completion.info = landing, info
            except PenstockError as refused:
                completion.error = refused  # type: ignore[assignment]
        sink, self.sink = self.sink, None  # what has ended keeps no memory
        sink.done(completion)
        del sink


class HeldCore:
    """A store of one object, which answers when the test says so."""

    def __init__(self, size_bytes: int, *, etag: str | None = '"v1"') -> None:
        self.info = ObjectInfo("k", size_bytes, etag, 1000.0)
        self.waiting: list[Request] = []
        self.requests: list[Request] = []
        self.closed = False

    def submit(self, operation: Any, sink: Any) -> Request:
        if self.closed:
            raise ClosedError("closed")
        request = Request(self, operation, sink)
        self.waiting.append(request)
        self.requests.append(request)
        return request

    def describe(self, key: str) -> str:
        return f"held://{key}"

    def answer_all(self) -> None:
        """Answer until nothing is in flight."""
        while self.waiting:
            self.waiting[0].answer()

    def spans(self) -> list[tuple[int, int]]:
        return [request.span for request in self.requests]


class Reader:
    """Reads an object, and keeps what it was called back with."""

    def __init__(self, core: HeldCore, *, budget_bytes: int = 512 * MIB, config: FetchConfig | None = None) -> None:
        self.core = core
        self.budget = Budget(budget_bytes)
        self.reads = PositionedReads(core, budget=self.budget, config=config)
        self.object = PositionedObject(self.reads, core.info)
        self.results: list[Any] = []

    def begin(self, offset: int, length_bytes: int, *, reader: object = None) -> None:
        """Begin a read; its bytes are checked when they come."""

        def then(result: Sequence[memoryview] | PenstockError) -> None:
            if isinstance(result, PenstockError):
                self.results.append(result)
                return
            body = b"".join(result)
            assert body == BYTES[offset : min(offset + length_bytes, self.core.info.size_bytes)]
            self.results.append(len(body))

        self.object.read(offset, length_bytes, then, reader=reader)

    def read(self, offset: int, length_bytes: int) -> Any:
        """Read with all requests answered."""
        self.results.clear()
        self.begin(offset, length_bytes)
        self.core.answer_all()
        (result,) = self.results
        return result

    def held_bytes(self) -> int:
        used = self.budget.statistics()
        return used.used_bytes - used.free_bytes


@pytest.mark.parametrize("size_bytes", [1, 100_000, WHOLE_BYTES_MAX])
def test_a_small_object_is_one_request_without_a_range(size_bytes: int) -> None:
    """However it is read, a small object is fetched once, whole and pinned, so that the store verifies its checksum."""
    reader = Reader(HeldCore(size_bytes))
    for offset in (0, size_bytes // 2, size_bytes - 1):
        assert reader.read(offset, 4096) == min(4096, size_bytes - offset)
    assert [request.operation for request in reader.core.requests] == [Get("k", None, '"v1"')]
    reader.object.close()
    assert reader.held_bytes() == 0


def test_reads_past_the_end_and_of_empty_objects_cost_nothing() -> None:
    """Nothing lies past the end, and nothing is requested for it; a read across the end is cut."""
    reader = Reader(HeldCore(100))
    for offset, length_bytes in ((100, 1), (5000, 10), (0, 0)):
        assert reader.read(offset, length_bytes) == 0
    assert Reader(HeldCore(0)).read(0, 4096) == 0
    assert reader.core.requests == []
    assert reader.read(90, 4096) == 10


def test_random_reads_fetch_what_is_asked_for() -> None:
    """Reads that follow no other are one request each, of exactly their bytes, all in flight together."""
    reader = Reader(HeldCore(40 * MIB))
    offsets = [30 * MIB, 2 * MIB, 17 * MIB, 9 * MIB, 24 * MIB]
    for offset in offsets:
        reader.begin(offset, 256 * KIB)
    assert reader.core.spans() == [(offset, offset + 256 * KIB) for offset in offsets]
    reader.core.answer_all()
    assert reader.results == [256 * KIB] * 5
    assert reader.read(35 * MIB, 256 * KIB) == 256 * KIB
    assert len(reader.core.requests) == 6


def test_a_tiny_read_brings_its_neighbourhood() -> None:
    """A read of a few bytes brings 64 KiB, so that the next ones nearby cost nothing."""
    reader = Reader(HeldCore(40 * MIB))
    assert reader.read(7 * MIB + 8, 8) == 8
    assert reader.read(7 * MIB + 20_000, 4096) == 4096
    assert reader.core.spans() == [(7 * MIB + 8, 7 * MIB + 8 + SMALL_BYTES)]


def test_one_large_read_in_pieces_is_not_a_sequence() -> None:
    """Requests that arrive before the first has an answer are one read that the kernel cut: nothing is read ahead of them."""
    reader = Reader(HeldCore(40 * MIB))
    for offset in (9 * MIB, 8 * MIB, 10 * MIB, 11 * MIB):
        reader.begin(offset, MIB)
    reader.core.answer_all()
    assert sorted(reader.core.spans()) == [(offset * MIB, (offset + 1) * MIB) for offset in (8, 9, 10, 11)]


def test_a_sequential_reader_is_read_ahead() -> None:
    """Who comes back for the next bytes finds them soon without waiting; the first bytes of an object cost little."""
    reader = Reader(HeldCore(40 * MIB))
    assert reader.read(0, 128 * KIB) == 128 * KIB
    assert reader.core.spans() == [(0, FIRST_BYTES)]
    waited = 0
    for offset in range(128 * KIB, 40 * MIB, MIB // 2):
        reader.results.clear()
        reader.begin(offset, MIB // 2)
        waited += not reader.results
        reader.core.answer_all()
        assert reader.results == [min(MIB // 2, 40 * MIB - offset)]
    assert waited < 10
    spans = sorted(reader.core.spans())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]  # every byte once
    assert spans[-1][1] == 40 * MIB
    assert len(spans) < 50


def test_what_is_ahead_is_bounded_by_what_may_be_in_flight() -> None:
    """A reader that stops for a while finds half as much again as fits on the way, not all that the budget could hold."""
    part_bytes = 128 * KIB
    reader = Reader(HeldCore(40 * MIB), config=FetchConfig(part_bytes=part_bytes))
    for offset in range(0, 4 * MIB, MIB // 2):
        reader.read(offset, MIB // 2)
    ahead_bytes = max(end for _, end in reader.core.spans()) - 4 * MIB
    assert 32 * part_bytes <= ahead_bytes <= 48 * part_bytes


def test_what_is_read_ahead_is_in_proportion_to_what_was_taken() -> None:
    """A reader that stops early has cost at most nine times what it read, and a MiB."""
    reader = Reader(HeldCore(40 * MIB))
    taken = 0
    for length_bytes in (64 * KIB, 64 * KIB, 256 * KIB, MIB):
        assert reader.read(taken, length_bytes) == length_bytes
        taken += length_bytes
        assert sum(end - start for start, end in reader.core.spans()) <= 9 * taken + MIB


def test_reads_out_of_order_are_one_sequence() -> None:
    """The kernel's requests of one sequential reader may come in any order, and each byte is still requested once."""
    reader = Reader(HeldCore(32 * MIB))
    offsets = list(range(0, 32 * MIB, MIB))
    shuffle = random.Random(3)
    for first in range(0, 32, 4):
        group = offsets[first : first + 4]
        shuffle.shuffle(group)
        for offset in group:
            reader.begin(offset, MIB)
        reader.core.answer_all()
    assert reader.results == [MIB] * 32
    assert sum(end - start for start, end in reader.core.spans()) == 32 * MIB


def test_jumps_do_not_disturb_a_sequence() -> None:
    """Reads elsewhere, such as of a footer, leave the read-ahead of a sequence as it is."""
    reader = Reader(HeldCore(40 * MIB))
    for offset in range(0, 6 * MIB, MIB):
        assert reader.read(offset, MIB) == MIB
        assert reader.read(39 * MIB - offset, 100) == 100
    before = len(reader.core.requests)
    reader.results.clear()
    reader.begin(6 * MIB, MIB)
    assert reader.results == [MIB]  # at once
    assert not any(request.cancelled for request in reader.core.requests)
    assert before <= 6 + 6 + 20


def test_steps_back_and_forth_within_what_is_held_cost_nothing() -> None:
    """A read of bytes that are here, or on their way, sends no request for them."""
    reader = Reader(HeldCore(40 * MIB))
    for offset in range(0, 4 * MIB, MIB):
        reader.read(offset, MIB)
    asked = {span for span in reader.core.spans() if span[0] < 4 * MIB}
    for offset in (3 * MIB + 5, 3 * MIB + MIB // 2, 4 * MIB + 100, 3 * MIB + 9):
        assert reader.read(offset, 1000) == 1000
    assert {span for span in reader.core.spans() if span[0] < 4 * MIB} == asked


def test_two_readers_of_the_same_bytes_share_a_request() -> None:
    """A read of bytes that are on their way waits for them; overlapping ones request only what is missing."""
    reader = Reader(HeldCore(40 * MIB))
    reader.begin(10 * MIB, MIB)
    reader.begin(10 * MIB, MIB)
    reader.begin(10 * MIB + MIB // 2, MIB)
    assert reader.core.spans() == [(10 * MIB, 11 * MIB), (11 * MIB, 11 * MIB + MIB // 2)]
    reader.core.answer_all()
    assert reader.results == [MIB] * 3


def test_a_failed_request_fails_its_reads_alone() -> None:
    """The reads that wait for a request hear its error; the next read asks again."""
    reader = Reader(HeldCore(40 * MIB))
    reader.begin(0, 1000)
    reader.begin(20 * MIB, 1000)
    reader.core.waiting[0].answer(error=UnavailableError("gone"))
    reader.core.answer_all()
    assert isinstance(reader.results[0], UnavailableError)
    assert reader.results[1] == 1000
    assert reader.read(0, 1000) == 1000
    reader.object.close()
    assert reader.held_bytes() == 0


def test_a_failure_ahead_is_nobodys_until_it_is_read() -> None:
    """An error of what nobody waits for is not reported, and what was to be read ahead is requested again when it is read."""
    reader = Reader(HeldCore(40 * MIB))
    reader.read(0, MIB)
    reader.begin(MIB, MIB)
    ahead = [request for request in reader.core.waiting if request.span[0] >= 2 * MIB]
    assert ahead
    for request in ahead:
        request.answer(error=UnavailableError("gone"))
    reader.core.answer_all()
    assert reader.results == [MIB, MIB]
    for offset in range(2 * MIB, 40 * MIB, MIB):
        assert reader.read(offset, MIB) == MIB
    reader.object.close()
    assert reader.held_bytes() == 0


@pytest.mark.parametrize(
    ("etag", "now"),
    [
        ('"v1"', ObjectInfo("k", 40 * MIB, '"v2"', 1000.0)),
        ('"v1"', ObjectInfo("k", 39 * MIB, '"v1"', 1000.0)),
        (None, ObjectInfo("k", 40 * MIB, None, 1001.5)),
        (None, ObjectInfo("k", 41 * MIB, None, 1000.0)),
    ],
)
def test_another_version_is_refused(etag: str | None, now: ObjectInfo) -> None:
    """An answer of another version ends the read, whether the ETag, the size or, without ETags, the time tells so."""
    reader = Reader(HeldCore(40 * MIB, etag=etag))
    assert reader.read(0, 1000) == 1000
    reader.begin(20 * MIB, 1000)
    assert reader.core.waiting[0].operation.if_match == etag
    reader.core.waiting[0].answer(info=now)
    assert isinstance(reader.results[-1], ObjectChangedError)


LISTED = ObjectInfo("k", 40 * MIB, None, 1000.4)


@pytest.mark.parametrize(
    ("listed", "first", "second"),
    [
        (LISTED._replace(last_modified_s=None), LISTED._replace(etag='"v1"'), LISTED._replace(etag='"v2"')),
        (LISTED, LISTED._replace(etag='"v1"'), LISTED),
        (LISTED._replace(last_modified_s=None), LISTED, LISTED._replace(last_modified_s=1001.0)),
        (LISTED, LISTED, LISTED._replace(last_modified_s=1000.6)),
        (LISTED, LISTED._replace(last_modified_s=1000.0), LISTED._replace(last_modified_s=1001.0)),
        (LISTED._replace(etag='"v1"'), LISTED, LISTED._replace(last_modified_s=1001.0)),
    ],
)
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_the_first_answer_pins_what_was_not_listed(
    listed: ObjectInfo, first: ObjectInfo, second: ObjectInfo, is_in_flight: bool
) -> None:
    """Of an object that was listed without an ETag or a time, all answers must have those of the first one."""
    core = HeldCore(listed.size_bytes, etag=listed.etag)
    core.info = listed
    reader = Reader(core)
    reader.begin(20 * MIB, 1000)
    if not is_in_flight:
        core.waiting[0].answer(info=first)
    reader.begin(30 * MIB, 1000)
    if is_in_flight:
        core.waiting[0].answer(info=first)
    else:
        assert core.waiting[0].operation.if_match == listed.etag or first.etag
    core.waiting[0].answer(info=second)
    assert reader.results[0] == 1000
    assert isinstance(reader.results[1], ObjectChangedError)
    reader.begin(10 * MIB, 1000)
    assert reader.object.is_outdated
    assert isinstance(reader.results[2], ObjectChangedError)


@pytest.mark.parametrize("error", [ObjectMissingError("no such object"), SpanError("past the end")])
def test_an_object_that_was_deleted_or_cut_has_changed(error: PenstockError) -> None:
    """For who reads a listed object, its being gone or shorter is a change, not a missing path or a wrong argument."""
    reader = Reader(HeldCore(40 * MIB, etag=None))
    reader.begin(20 * MIB, 1000)
    reader.core.waiting[0].answer(error=error)
    (result,) = reader.results
    assert isinstance(result, ObjectChangedError)
    assert result.__cause__ is error


def test_objects_that_are_read_to_their_ends_make_the_next_one_begin_faster() -> None:
    """After two long objects were read whole, the first read of the next one already reads ahead; one that stops ends that."""
    core = HeldCore(12 * MIB)
    reads = PositionedReads(core, budget=Budget(512 * MIB))

    def requests_at_first(steps_count: int) -> int:
        """Read an object in so many steps, and return how many requests its first read sent."""
        opened = PositionedObject(reads, core.info)
        before = len(core.requests)
        for step in range(steps_count):
            opened.read(step * MIB, MIB, lambda _: None)
            if step == 0:
                first = len(core.requests) - before
            core.answer_all()
        opened.close()
        return first

    assert [requests_at_first(12) for _ in range(3)] == [1, 1, 9]
    assert [requests_at_first(3) for _ in range(2)] == [9, 1]


def test_fractions_of_a_second_do_not_make_another_version() -> None:
    """A listing may tell the time more precisely than the header of an answer."""
    core = HeldCore(1000, etag=None)
    reader = Reader(core)
    reader.begin(0, 1000)
    core.waiting[0].answer(info=core.info._replace(last_modified_s=1000.9))
    assert reader.results == [1000]


def test_closing_ends_what_waits_and_releases_the_memory() -> None:
    """Reads that wait hear of it once, what is in flight is cancelled, and its bytes are released when it ends."""
    reader = Reader(HeldCore(40 * MIB))
    reader.read(0, MIB)
    reader.begin(MIB, MIB)
    reader.begin(30 * MIB, 100)
    reader.object.close()
    reader.object.close()
    assert [type(result) for result in reader.results[1:]] == [CancelledOperationError] * (len(reader.results) - 1)
    assert all(request.cancelled for request in reader.core.waiting)
    for request in list(reader.core.waiting):
        request.answer(error=CancelledOperationError("cancelled"))
    assert reader.held_bytes() == 0
    reader.begin(0, 10)
    assert isinstance(reader.results[-1], ClosedError)


def test_what_closed_objects_held_takes_no_room_from_others() -> None:
    """Of an open object the bytes stay that were read in part, however many objects were read in part and closed."""
    reader = Reader(HeldCore(MIB), budget_bytes=32 * MIB)
    reader.read(0, 1000)
    for _ in range(8):
        other = PositionedObject(reader.reads, reader.core.info)
        other.read(0, 1000, reader.results.append)
        reader.core.answer_all()
        other.close()
    requests_count = len(reader.core.requests)
    assert reader.read(5000, 1000) == 1000
    assert len(reader.core.requests) == requests_count


def test_one_of_several_readers_gives_up() -> None:
    """The reads of a reader that is closed end; those of the others, which share the request, do not."""
    reader = Reader(HeldCore(40 * MIB))
    one, other = object(), object()
    reader.begin(0, 1000, reader=one)
    reader.begin(0, 1000, reader=other)
    reader.object.abandon(one)
    assert [type(result) for result in reader.results] == [CancelledOperationError]
    reader.core.answer_all()
    assert reader.results[1:] == [1000]


def test_a_closed_store_is_an_error_and_no_loop() -> None:
    """A store that refuses requests fails the read, also in the midst of reading ahead."""
    reader = Reader(HeldCore(40 * MIB))
    reader.read(0, MIB)
    reader.core.closed = True
    assert reader.read(30 * MIB, 10).what == "closed"
    reader.read(MIB, MIB)
    assert reader.held_bytes() <= 4 * MIB


def test_without_budget_a_read_that_somebody_waits_for_is_served() -> None:
    """With the budget used up by others, reads go on with their own bytes alone, and nothing is read ahead."""
    reader = Reader(HeldCore(40 * MIB), budget_bytes=64 * MIB)
    assert reader.budget.reserve(64 * MIB)
    for offset in range(0, 8 * MIB, MIB):
        assert reader.read(offset, MIB) == MIB
        assert reader.held_bytes() <= 64 * MIB + 3 * MIB
    assert all(end - start <= MIB for start, end in reader.core.spans())


def test_read_ahead_leaves_half_of_the_budget_to_others() -> None:
    """However fast a reader is, what is ahead of it takes at most half of the budget."""
    reader = Reader(HeldCore(40 * MIB), budget_bytes=16 * MIB)
    for offset in range(0, 40 * MIB, MIB):
        reader.read(offset, MIB)
        assert reader.held_bytes() <= 12 * MIB
    assert reader.budget.statistics().overdrawn_count == 0
    reader.object.close()
    assert reader.held_bytes() == 0


def test_several_sequential_readers_share_what_may_be_ahead() -> None:
    """With several sequences, each has bytes ahead of it, and none takes the share of another."""
    core = HeldCore(40 * MIB)
    reads = PositionedReads(core, budget=Budget(64 * MIB))
    objects = [PositionedObject(reads, core.info) for _ in range(8)]
    counts = [0] * 8
    for step in range(30):
        for index, one in enumerate(objects):
            one.read(step * MIB, MIB, lambda result, index=index: counts.__setitem__(index, counts[index] + 1))  # type: ignore[misc]
        core.answer_all()
    assert counts == [30] * 8
    for one in objects:
        one.close()


def test_bytes_at_hand_need_no_request() -> None:
    """What a cache has at hand is passed on as it is, in the same call; what it lacks is requested."""
    core = HeldCore(40 * MIB)
    asked: list[tuple[int, int]] = []

    def at_hand(info: ObjectInfo, span: ByteRange) -> memoryview | None:
        asked.append((span.start, span.end))
        return memoryview(BYTES)[span.start : span.end] if span.end <= 20 * MIB else None

    reads = PositionedReads(core, budget=Budget(64 * MIB), at_hand=at_hand)
    opened = PositionedObject(reads, core.info)
    results: list[Any] = []
    opened.read(19 * MIB, MIB, results.append)
    assert bytes(results[0][0]) == BYTES[19 * MIB : 20 * MIB]
    assert core.requests == []
    opened.read(20 * MIB, MIB, results.append)
    assert core.spans() == [(20 * MIB, 21 * MIB)]
    assert asked == [(19 * MIB, 20 * MIB), (20 * MIB, 21 * MIB)]
    opened.close()


def test_parts_end_where_blocks_end() -> None:
    """With a cache, what is read ahead consists of whole blocks, wherever the reader began."""
    core = HeldCore(40 * MIB)
    reads = PositionedReads(
        core, budget=Budget(512 * MIB), fit_part=lambda part_bytes: max(part_bytes - part_bytes % 3_000_000, 3_000_000)
    )
    opened = PositionedObject(reads, core.info)
    at = 0
    while at < 40 * MIB:
        opened.read(at, 500_000, lambda _: None)
        core.answer_all()
        at += 500_000
    assert all(end % 3_000_000 == 0 for start, end in core.spans() if FIRST_BYTES + MIB < end < 40 * MIB)


def test_a_callback_that_fails_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A defect of one reader is logged; the others that wait for the same bytes get them."""
    reader = Reader(HeldCore(40 * MIB))
    reader.object.read(0, 10, lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    reader.begin(0, 10)
    reader.core.answer_all()
    assert reader.results == [10]
    assert "callback failed" in caplog.text
