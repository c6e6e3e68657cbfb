"""Merging of near ranges: nothing is lost, no bound is passed, and neighbours do not stay apart."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from penstock.memory.ranges import covering, merged_spans, near_groups
from penstock.types import ByteRange

RANGES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 50)).map(lambda pair: ByteRange(pair[0], sum(pair))), max_size=30
)


@given(RANGES, st.integers(0, 50), st.none() | st.integers(60, 300))
def test_merging_loses_and_reorders_nothing(
    ranges: list[ByteRange], gap_bytes: int, length_bytes_max: int | None
) -> None:
    """The groups are the input in its order, and each range lies inside the range that covers its group."""
    groups = near_groups(ranges, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max)
    assert [index for first, stop in groups for index in range(first, stop)] == list(range(len(ranges)))
    for first, stop in groups:
        span = covering(ranges[first:stop])
        assert all(span.start <= start < end <= span.end for start, end in ranges[first:stop])


@given(RANGES, st.integers(0, 50), st.none() | st.integers(60, 300))
def test_merging_keeps_its_bounds(ranges: list[ByteRange], gap_bytes: int, length_bytes_max: int | None) -> None:
    """No group reads through a wider gap than allowed, or is longer than allowed."""
    for first, stop in near_groups(ranges, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max):
        span = covering(ranges[first:stop])
        reached = span.start
        for start, end in ranges[first:stop]:
            assert start - reached <= gap_bytes
            reached = max(reached, end)
        assert length_bytes_max is None or stop == first + 1 or span.length_bytes <= length_bytes_max


@given(RANGES, st.integers(0, 50))
def test_merging_is_complete(ranges: list[ByteRange], gap_bytes: int) -> None:
    """Of ascending ranges, none that lie near each other stay apart."""
    for before, after in itertools.pairwise(merged_spans(ranges, gap_bytes=gap_bytes)):
        assert after.start - before.end > gap_bytes


def test_nothing_is_grouped_of_nothing() -> None:
    """No ranges give no groups; one range is a group, also an empty one."""
    assert near_groups([], gap_bytes=9) == []
    assert near_groups([(0, 0)], gap_bytes=9) == [(0, 1)]
    assert merged_spans([ByteRange(3, 3)], gap_bytes=9) == (ByteRange(3, 3),)
