"""If-Match and the other conditions, with S3's precedence."""

from __future__ import annotations

import pytest

from penstock.gateway.http.conditions import check_conditions, still_matches
from penstock.gateway.objects import ObjectHead, S3Error
from penstock.gateway.s3_text import date_s

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
