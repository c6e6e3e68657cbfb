"""If-Match and the other conditions, with S3's precedence."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.conditions import (
    WantedRange,
    check_conditions,
    parse_part_number,
    parse_range,
    part_range,
    still_matches,
)
from penstock.gateway.objects import ObjectHead, S3Error
from penstock.gateway.s3_text import date_s
from penstock.types import ByteRange

HEAD = ObjectHead(key="k", size_bytes=1, etag='"abc"', last_modified_s=1_700_000_000.9)
SAME = "Tue, 14 Nov 2023 22:13:20 GMT"
BEFORE = "Tue, 14 Nov 2023 22:13:19 GMT"
AFTER = "Tue, 14 Nov 2023 22:13:21 GMT"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"If-Match": '"abc"'}, 200),
        ({"If-Match": "abc"}, 200),
        ({"If-Match": "*"}, 200),
        ({"If-Match": '"x", "abc"'}, 200),
        ({"If-Match": '"x"'}, 412),
        ({"If-Match": ""}, 412),
        ({"If-None-Match": '"abc"'}, 304),
        ({"If-None-Match": 'W/"abc"'}, 304),
        ({"If-None-Match": "*"}, 304),
        ({"If-None-Match": '"x"'}, 200),
        ({"If-Modified-Since": SAME}, 304),
        ({"If-Modified-Since": AFTER}, 304),
        ({"If-Modified-Since": BEFORE}, 200),
        ({"If-Modified-Since": "yesterday"}, 200),
        ({"If-Unmodified-Since": SAME}, 200),
        ({"If-Unmodified-Since": BEFORE}, 412),
        ({"If-Unmodified-Since": "yesterday"}, 200),
        ({"If-Match": '"abc"', "If-Unmodified-Since": BEFORE}, 200),
        ({"If-Match": '"x"', "If-Unmodified-Since": AFTER}, 412),
        ({"If-None-Match": '"x"', "If-Modified-Since": AFTER}, 200),
        ({"If-None-Match": '"abc"', "If-Modified-Since": BEFORE}, 304),
        ({"If-Match": '"abc"', "If-None-Match": '"abc"'}, 304),
        ({"If-Match": '"x"', "If-None-Match": '"abc"'}, 412),
    ],
)
def test_conditions(headers: dict[str, str], status: int) -> None:
    """ETags overrule dates, and a condition that fails overrules one that spares the body."""
    if status != 412:
        assert check_conditions(headers, HEAD) == status
        return
    with pytest.raises(S3Error) as caught:
        check_conditions(headers, HEAD)
    assert (caught.value.status, caught.value.code) == (412, "PreconditionFailed")


@pytest.mark.parametrize(
    ("condition", "matches"), [('"abc"', True), ('W/"abc"', False), ('"x"', False), (SAME, True), (AFTER, False)]
)
def test_if_range(condition: str, matches: bool) -> None:
    """If-Range holds for exactly this version."""
    assert still_matches(condition, HEAD) is matches


@pytest.mark.parametrize(
    "text", [None, "", "x", "Tue, 99 Nov 2023 22:13:20 GMT", "\0", "Mon, 01 Jan 99999 00:00:00 GMT"]
)
def test_what_is_not_a_date_is_ignored(text: str | None) -> None:
    """A text that is not a date is no condition."""
    assert date_s(text) is None


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
