"""The conditions of a request (``If-Match`` and so on), with S3's precedence. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.gateway.objects import S3Error
from penstock.gateway.s3_text import date_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import ObjectHead


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
        status=412,
        details={"Condition": name},
    )
