"""The Range header and part numbers."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.byte_ranges import WantedRange, parse_part_number, parse_range, part_range
from penstock.gateway.objects import S3Error
from penstock.types import ByteRange


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("bytes=0-9", WantedRange(0, 9)),
        ("Bytes = 3 - ", WantedRange(3, None)),
        ("bytes=-5", WantedRange(None, 5)),
        ("bytes=-0", WantedRange(None, 0)),
        ("bytes=5-5", WantedRange(5, 5)),
        (None, None),
        ("", None),
        ("bytes=-", None),
        ("bytes=5-4", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
        ("bytes=1", None),
        ("bytes=0x1-2", None),
        ("bytes=" + "9" * 5000 + "-", None),
        ("bytes=\u0661-", None),
    ],
)
def test_one_range_of_bytes_is_taken(header: str | None, wanted: WantedRange | None) -> None:
    """One range of bytes is a range; everything else, several ranges included, is ignored."""
    assert parse_range(header) == wanted


@pytest.mark.parametrize(
    ("wanted", "size_bytes", "span"),
    [
        (WantedRange(0, 0), 10, (0, 1)),
        (WantedRange(2, 99), 10, (2, 10)),
        (WantedRange(9, None), 10, (9, 10)),
        (WantedRange(None, 3), 10, (7, 10)),
        (WantedRange(None, 99), 10, (0, 10)),
        (WantedRange(10, None), 10, None),
        (WantedRange(10, 20), 10, None),
        (WantedRange(None, 0), 10, None),
        (WantedRange(0, 0), 0, None),
        (WantedRange(None, 5), 0, None),
    ],
)
def test_ranges_are_cut_at_the_end(wanted: WantedRange, size_bytes: int, span: tuple[int, int] | None) -> None:
    """A range is cut at the end of the object; one without a byte in it is 416 and tells the size."""
    if span is not None:
        assert wanted.within(size_bytes) == span
        return
    with pytest.raises(S3Error) as caught:
        wanted.within(size_bytes)
    error = caught.value
    assert (error.status, error.code, error.details["ActualObjectSize"]) == (416, "InvalidRange", str(size_bytes))
    assert error.headers["Content-Range"] == f"bytes */{size_bytes}"


@given(st.text(alphabet="bytes=-, 0123456789") | st.text(), st.integers(0, 1 << 40))
def test_any_header_is_ignored_or_within(header: str, size_bytes: int) -> None:
    """Whatever the header says, the bytes that are sent lie inside the object."""
    wanted = parse_range(header)
    if wanted is None:
        return
    assert re.search(r"bytes", header, re.IGNORECASE)
    with contextlib.suppress(S3Error):
        span = wanted.within(size_bytes)
        assert 0 <= span.start < span.end <= size_bytes
        assert wanted.hint is None or wanted.hint.start == span.start


@pytest.mark.parametrize(("text", "number"), [(None, None), ("1", 1), ("10000", 10_000)])
def test_part_numbers(text: str | None, number: int | None) -> None:
    """Parts have the numbers 1 to 10 000."""
    assert parse_part_number(text) == number


@pytest.mark.parametrize("text", ["", "0", "10001", "-1", "x", "\u0661", "9" * 5000])
def test_bad_part_numbers(text: str) -> None:
    """Other numbers are refused."""
    with pytest.raises(S3Error) as caught:
        parse_part_number(text)
    assert caught.value.code == "InvalidArgument"


def test_parts_of_an_object() -> None:
    """A part is a range; an object in one part has the part 1; further parts are 416."""
    assert part_range(2, (5, 5, 2), 12) == ByteRange(5, 10)
    assert part_range(3, (5, 5, 2), 12) == ByteRange(10, 12)
    assert part_range(1, (), 12) == ByteRange(0, 12)
    assert part_range(1, (), 0) is None
    for number, sizes in ((2, ()), (4, (5, 5, 2))):
        with pytest.raises(S3Error) as caught:
            part_range(number, sizes, 12)
        assert (caught.value.status, caught.value.code) == (416, "InvalidPartNumber")
