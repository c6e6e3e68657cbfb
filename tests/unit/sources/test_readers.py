"""Ranges near each other as one request: each byte once, no gap that is not worth it."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.config import KIB, MIB, FetchConfig
from penstock.fetch import PlanItem
from penstock.sources.readers import (
    BREAK_EVEN_BYTES,
    REQUEST_COST_BYTES,
    PackedStrings,
    RequestedRange,
    break_even_bytes,
    gap_worth_bytes,
    merged_reads,
)
from penstock.store.memory import MemoryStore
from penstock.store.traced import Traced
from penstock.types import Attempt, ByteRange, Completion, Get, Landing

PART_BYTES = 64 * KIB
SPANS = st.tuples(st.integers(0, 200_000), st.integers(1, 5_000)).map(lambda pair: ByteRange(pair[0], sum(pair)))
ITEMS = st.lists(st.tuples(st.sampled_from("ab"), SPANS).map(lambda each: PlanItem(*each)), max_size=30)


def ranges_of(items: list[PlanItem]) -> list[RequestedRange]:
    return [RequestedRange(row, 0, item) for row, item in enumerate(items)]


@given(ITEMS, st.integers(0, 20_000))
def test_every_piece_lies_in_one_read(items: list[PlanItem], gap_bytes: int) -> None:
    """Each piece comes in exactly one read, inside its span; reads are of one object, and no longer than a part."""
    reads = merged_reads(ranges_of(items), [MemoryStore()], FetchConfig(part_bytes=PART_BYTES), gap_bytes=gap_bytes)
    assert sorted(each.row for read in reads for each in read.ranges) == list(range(len(items)))
    for read in reads:
        outer = read.item.span
        assert outer is not None
        assert outer.length_bytes <= PART_BYTES
        reached = outer.start
        for each in read.ranges:
            span = each.item.span
            assert span is not None
            assert each.item.key == read.item.key
            assert outer.start <= span.start < span.end <= outer.end
            assert span.start - reached <= gap_bytes
            reached = max(reached, span.end)
        assert reached == outer.end


def test_objects_are_reads_of_their_own() -> None:
    """A whole object is asked for as it is, whatever lies beside it."""
    items = [PlanItem("a"), PlanItem("b", size_bytes=5)]
    reads = merged_reads(ranges_of(items), [MemoryStore()], FetchConfig())
    assert [(read.item, [each.row for each in read.ranges]) for read in reads] == [(items[0], [0]), (items[1], [1])]


@pytest.mark.parametrize(
    ("gaps", "requests_max", "expected"),
    [
        ([MIB, 2 * MIB, 3 * MIB], 8, REQUEST_COST_BYTES),  # all fit in flight: only what costs less than a request
        ([MIB, 2 * MIB, 3 * MIB], 4, REQUEST_COST_BYTES),
        ([3 * MIB, MIB, 2 * MIB], 2, 2 * MIB),  # two too many: the two narrowest are read through
        ([3 * MIB, MIB, 9 * MIB], 1, 4 * MIB),  # but none that takes longer than asking again
        ([], 1, REQUEST_COST_BYTES),
    ],
)
def test_gaps_are_read_until_the_rest_fits_in_flight(gaps: list[int], requests_max: int, expected: int) -> None:
    """A second request that hides behind others saves nothing, so only surplus ones are traded for bytes."""
    found = gap_worth_bytes(gaps, others_count=1, break_even_bytes=4 * MIB, requests_max=requests_max)
    assert found == expected


def answered(store: Traced, *, first_byte_s: float, received_bytes: int, body_s: float) -> None:
    completion = Completion(Get("a"))
    completion.landing = Landing(bytearray(), 0, 0)
    times: dict[str, Any] = {"start_s": 0.0, "queued_s": 0.0, "connect_s": 0.0, "total_s": first_byte_s + body_s}
    completion.attempts = (
        Attempt(
            status=200, offset_bytes=0, received_bytes=received_bytes, first_byte_s=first_byte_s, throttled=False,
            request_id=None, **times,
        ),
    )  # fmt: skip
    store.note(completion)


def test_break_even_is_measured_per_store() -> None:
    """First-byte time times the rate of a body, of that store's own answers; a documented number before there are any."""
    near, far = Traced(MemoryStore()), Traced(MemoryStore())
    assert break_even_bytes([near]) == BREAK_EVEN_BYTES
    assert break_even_bytes([MemoryStore()]) == BREAK_EVEN_BYTES
    for _ in range(5):
        answered(near, first_byte_s=0.001, received_bytes=10**6, body_s=0.01)
        answered(near, first_byte_s=0.001, received_bytes=200_000, body_s=10.0)  # says nothing of a rate
        answered(far, first_byte_s=0.03, received_bytes=9 * 10**6, body_s=0.1)
    assert break_even_bytes([near]) == pytest.approx(10**5)
    assert break_even_bytes([far]) == pytest.approx(2.7 * 10**6)


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_strings_are_kept(strings: list[str]) -> None:
    """By index and in order, also after pickling."""
    packed = pickle.loads(pickle.dumps(PackedStrings(strings)))
    assert len(packed) == len(strings)
    assert list(packed) == strings
    assert [packed[index] for index in range(len(strings))] == strings
