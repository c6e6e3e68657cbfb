"""Conditions, ranges and part numbers: the version and the bytes that a request asks for. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.gateway.objects import S3Error
from penstock.gateway.s3_text import date_s
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import ObjectHead

_ONE_RANGE = re.compile(r"\s*bytes\s*=\s*([0-9]*)\s*-\s*([0-9]*)\s*\Z", re.ASCII | re.IGNORECASE)
_DIGITS_COUNT_MAX = 19
PARTS_COUNT_MAX = 10_000


def has_conditions(headers: Mapping[str, str]) -> bool:
    """Whether a request has any of the conditions."""
    return (
        "If-None-Match" in headers
        or "If-Match" in headers
        or "If-Modified-Since" in headers
        or "If-Unmodified-Since" in headers
    )


def check_conditions(headers: Mapping[str, str], head: ObjectHead) -> Literal[200, 304]:
    """Compare an object with the conditions of a GET or HEAD.

    A true ``If-Match`` overrules ``If-Unmodified-Since``, and ``If-None-Match``, true or false, overrules
    ``If-Modified-Since``, as S3 documents for GetObject. A date that cannot be parsed, or lies in the future, is ignored.

    Returns:
        200, or 304 if the client has the object already.

    Raises:
        S3Error: The condition ``If-Match`` or ``If-Unmodified-Since`` does not hold.
    """
    modified_s = int(head.last_modified_s)
    match = headers.get("If-Match")
    if match is not None:
        if not _matches(match, head.etag):
            raise _failed("If-Match")
    elif (since_s := date_s(headers.get("If-Unmodified-Since"))) is not None and modified_s > since_s:
        raise _failed("If-Unmodified-Since")
    none_match = headers.get("If-None-Match")
    if none_match is not None:
        return 304 if _matches(none_match, head.etag) else 200
    since_s = date_s(headers.get("If-Modified-Since"))
    return 304 if since_s is not None and modified_s <= since_s else 200


def still_matches(condition: str, head: ObjectHead) -> bool:
    """Whether the value of ``If-Range``, an ETag or a date, names this version of an object."""
    since_s = date_s(condition)
    if since_s is not None:
        return int(head.last_modified_s) == since_s
    return _bare(condition) == _bare(head.etag) and not condition.strip().startswith("W/")


def _matches(condition: str, etag: str) -> bool:
    return any(candidate == "*" or candidate == _bare(etag) for candidate in map(_bare, condition.split(",")))


def _bare(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')


def _failed(name: str) -> S3Error:
    return S3Error(
        "PreconditionFailed",
        "At least one of the pre-conditions you specified did not hold.",
        details={"Condition": name},
    )


class WantedRange(NamedTuple):
    """A range as the client wrote it, in bytes from 0, with the last byte included.

    Attributes:
        first: First byte; None if the last bytes are wanted.
        last: Last byte, or the number of last bytes; None if the range is open.
    """

    first: int | None
    last: int | None

    @property
    def hint(self) -> ByteRange | None:
        """The range as far as it is known without the object's size; None for the last bytes and for an open range."""
        return ByteRange(self.first, self.last + 1) if self.first is not None and self.last is not None else None

    def within(self, size_bytes: int) -> ByteRange:
        """Return the bytes that are wanted of an object of `size_bytes` bytes.

        Raises:
            S3Error: There are none: 416.
        """
        first, last = self.first, self.last
        if first is None:
            assert last is not None
            first, end = max(0, size_bytes - last), size_bytes
        else:
            end = size_bytes if last is None else min(last + 1, size_bytes)
        if first >= end:
            raise unsatisfiable(size_bytes, str(self))
        return ByteRange(first, end)

    def __str__(self) -> str:
        first, last = ("" if number is None else number for number in self)
        return f"bytes={first}-{last}"


def parse_range(header: str | None) -> WantedRange | None:
    """Parse a ``Range`` header.

    Returns:
        The range, or None if the header is ignored and the whole object is sent: HTTP demands this for other units than
        bytes, and S3 does it for several ranges.
    """
    match = _ONE_RANGE.match(header) if header is not None else None
    if match is None:
        return None
    first, last = match.groups()
    if max(len(first), len(last)) > _DIGITS_COUNT_MAX or not (first or last):
        return None
    found = WantedRange(int(first) if first else None, int(last) if last else None)
    if found.first is not None and found.last is not None and found.first > found.last:
        return None
    return found


def parse_part_number(text: str | None) -> int | None:
    """Parse the parameter ``partNumber``.

    Raises:
        S3Error: It is not a number from 1 to 10 000.
    """
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_COUNT_MAX and 1 <= int(text) <= PARTS_COUNT_MAX:
        return int(text)
    raise S3Error(
        "InvalidArgument",
        f"Part number must be an integer between 1 and {PARTS_COUNT_MAX}, inclusive.",
        details={"ArgumentName": "partNumber", "ArgumentValue": text[:100]},
    )


def part_range(number: int, part_sizes_bytes: tuple[int, ...], size_bytes: int) -> ByteRange | None:
    """Return the bytes of a part; None if the object, or the part, is empty.

    Args:
        number: Number of the part, from 1.
        part_sizes_bytes: Sizes of the parts; empty if the object has one part or they are not known.
        size_bytes: Size of the object.

    Raises:
        S3Error: The object has no such part: 416.
    """
    sizes = part_sizes_bytes or (size_bytes,)
    if number > len(sizes):
        raise S3Error(
            "InvalidPartNumber",
            "The requested partnumber is not satisfiable.",
            headers={"Content-Range": f"bytes */{size_bytes}"},
            details={"PartNumberRequested": str(number), "ActualPartCount": str(len(sizes))},
        )
    start = sum(sizes[: number - 1])
    return ByteRange(start, start + sizes[number - 1]) if sizes[number - 1] else None


def unsatisfiable(size_bytes: int, requested: str) -> S3Error:
    """Return the error of a range that an object does not have."""
    return S3Error(
        "InvalidRange",
        "The requested range is not satisfiable",
        headers={"Content-Range": f"bytes */{size_bytes}"},
        details={"RangeRequested": requested, "ActualObjectSize": str(size_bytes)},
    )
