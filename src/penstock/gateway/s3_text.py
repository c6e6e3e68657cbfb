"""How S3 writes text and times in documents and headers, and some of its messages. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from urllib.parse import quote

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
OWNER = (("ID", "75aa57f09aa0c8caeab4f8c24e99d10f8e7faeebf76c078efc7c6caea54ba06a"), ("DisplayName", "penstock"))
"""Names and texts of the elements of ``<Owner>``. One owner owns everything; clients only need one to be named."""

UPLOAD_MESSAGES = {
    "NoSuchUpload": "The specified upload does not exist. The upload ID may be invalid, or the upload may have been aborted or "
    "completed.",
    "InvalidPart": "One or more of the specified parts could not be found. The part may not have been uploaded, or the "
    "specified entity tag may not match the part's entity tag.",
    "InvalidPartOrder": "The list of parts was not in ascending order. Parts must be ordered by part number.",
}
"""S3's messages of what clients do wrong in multipart uploads, by code. Stores raise errors with these codes too."""

_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\r": "&#13;", "\n": "&#10;", "\t": "&#9;"}
)
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def escaped(text: str) -> str:
    """Return text for an XML document. Characters that XML 1.0 cannot hold become ``U+FFFD``."""
    return _FORBIDDEN.sub("\ufffd", text).translate(_ESCAPES)


def url_encoded(text: str) -> str:
    """Return a key or prefix as a listing with ``encoding-type=url`` writes it."""
    return quote(text, safe="/-_.~*", errors="surrogatepass")


def timestamp(seconds: float | None) -> str:
    """Return a time in the form of S3's documents, e.g. ``2026-01-02T03:04:05.000Z``.

    Args:
        seconds: Seconds since 1970; None counts as 0.
    """
    return datetime.fromtimestamp(seconds or 0, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@lru_cache(maxsize=1024)
def date_s(text: str | None) -> float | None:
    """Return an HTTP date in seconds since 1970; None if there is none, or if it is not a date."""
    if not text:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
