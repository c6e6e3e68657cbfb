"""Plans: requests in every spelling, and neighbours read as one."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.fetch import PlanItem, coalesce, requests_count
from penstock.fetch.plan import as_item, cut
from penstock.store import MemoryStore
from penstock.types import ByteRange

SPANS = st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda pair: ByteRange(pair[0], pair[0] + pair[1]))
ITEMS = st.lists(
    st.tuples(st.sampled_from("ab"), st.one_of(st.none(), SPANS), st.sampled_from([None, "e"])).map(
        lambda each: PlanItem(*each)
    ),
    max_size=20,
).map(lambda items: [item._replace(request_index=index) for index, item in enumerate(items)])


def apart(items: list[PlanItem]) -> list[tuple[int, str, ByteRange | None, str | None]]:
    """The requests that merged items stand for."""
    found: list[tuple[int, str, ByteRange | None, str | None]] = []
    for item in items:
        cuts = [(each.request_index, each.span) for each in item.cuts] or [(item.request_index, item.span)]
        found += [(index, item.key, span, item.etag) for index, span in cuts]
    return found


@given(ITEMS, st.integers(0, 50), st.integers(60, 300))
def test_coalescing_loses_and_reorders_nothing(items: list[PlanItem], gap_bytes: int, length_bytes_max: int) -> None:
    """Taken apart again, merged items are the requests that went in, in their order; each lies inside its read."""
    merged = coalesce(items, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max)
    assert apart(merged) == [(item.request_index, item.key, item.span, item.etag) for item in items]
    for item in merged:
        for each in item.cuts:
            assert item.span is not None
            assert item.span.start <= each.span.start < each.span.end <= item.span.end


@given(ITEMS, st.integers(0, 50), st.integers(60, 300))
def test_coalescing_keeps_its_bounds(items: list[PlanItem], gap_bytes: int, length_bytes_max: int) -> None:
    """A merged read is not longer than the bound, reads through no wider gap, and merges only one version of one key."""
    for item in coalesce(items, gap_bytes=gap_bytes, length_bytes_max=length_bytes_max):
        if not item.cuts:
            continue
        assert len(item.cuts) > 1
        assert item.span is not None
        assert item.span.length_bytes <= length_bytes_max
        reached = item.span.start
        for each in item.cuts:
            assert each.span.start - reached <= gap_bytes
            reached = max(reached, each.span.end)
        assert reached == item.span.end


@given(ITEMS)
def test_coalescing_is_complete(items: list[PlanItem]) -> None:
    """With nothing to hold them apart, ascending neighbours of one key and version are never left as two."""
    merged = coalesce(items, gap_bytes=1000, length_bytes_max=10_000)
    for left, right in itertools.pairwise(merged):
        if left.span is not None and right.span is not None and (left.key, left.etag) == (right.key, right.etag):
            assert right.span.start < left.span.start


def test_requests_in_every_spelling() -> None:
    """A key, a pair, a pair with None and a plan item are requests, numbered as they come."""
    span = ByteRange(1, 5)
    assert as_item("k", 3) == PlanItem("k", request_index=3)
    assert as_item(("k", span), 4) == PlanItem("k", span, request_index=4)
    assert as_item(("k", (1, 5)), 4) == PlanItem("k", span, request_index=4)  # type: ignore[arg-type]
    assert as_item(("k", None), 5) == PlanItem("k", request_index=5)
    assert as_item(PlanItem("k", span, "e", 9, 77), 6) == PlanItem("k", span, "e", 9, 6)


@pytest.mark.parametrize(
    "bad", [5, b"k", None, ("k",), ("k", 5), (b"k", None), ("k", (5, 1)), ("k", (-1, 4)), ("k", (3, 3))]
)
def test_what_is_no_request_is_refused(bad: Any) -> None:
    """Anything else, and ranges that are none, are ConfigError when planned."""
    with pytest.raises(ConfigError):
        as_item(bad, 0)


@pytest.mark.parametrize("size_bytes", [0, 1, 8, 12, 13, 16, 17, 160])
def test_requests_are_counted_as_they_are_cut(size_bytes: int) -> None:
    """The number of requests is that of ``cut``."""
    assert requests_count(ByteRange(3, 3 + size_bytes), 8) == len(cut(ByteRange(3, 3 + size_bytes), 8))


def test_an_object_larger_than_any_is_refused_before_it_is_cut() -> None:
    """A size that no object has, as a listing may state it, takes neither time nor memory, in a read and in an estimate."""
    size_bytes = 10**18 - 1
    store = MemoryStore({"k": b"x"})
    with pytest.raises(ConfigError, match=f"an object of {size_bytes} bytes or more is larger than any store has"):
        list(store.read_parts([PlanItem("k", size_bytes=size_bytes)]))
    assert requests_count(ByteRange(0, size_bytes), 8 * MIB) == 119_209_289_551
