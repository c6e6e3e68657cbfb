"""The access log: one record for each request, as a line or as JSON. It contains no secret and no signature."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from penstock.redaction import printable

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXT_CHARACTERS_MAX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    """One request, after its answer.

    Attributes:
        time_s: When the request arrived, in seconds since 1970.
        remote: Address of the client.
        access_key: ID of the access key; empty if the request was anonymous or refused.
        method: HTTP method.
        bucket: Name of the bucket.
        key: Key.
        query: Query without the parameters that sign it.
        status: HTTP status; 499 if the client left before an answer began.
        code: S3's code of the error; empty if there was none.
        sent_bytes: Length of the answer's body as far as it was sent.
        received_bytes: Length of the request's body as far as it was read.
        seconds: Time from the request's head to the end of the answer.
        complete: Whether the answer was sent to its end.
        request_id: ID in the answer.
        user_agent: Header ``User-Agent``.
    """

    time_s: float
    remote: str
    access_key: str
    method: str
    bucket: str
    key: str
    query: str
    status: int
    code: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    complete: bool
    request_id: str
    user_agent: str


class AccessLog(Protocol):
    """Takes the record of each request."""

    def __call__(self, record: AccessRecord) -> None:
        """Take one record; must return soon."""


def as_line(record: AccessRecord) -> str:
    """Return a record as one line of text.

    The line has these fields: time, address, key ID, method, ``/bucket/key?query``, status, bytes sent, seconds, request ID,
    user agent and, if there was one, the code of the error. An empty field is ``-``.
    """
    target = f"/{record.bucket}/{record.key}" if record.bucket else "/"
    if record.query:
        target += f"?{record.query}"
    fields = [
        _time(record.time_s),
        record.remote or "-",
        record.access_key or "-",
        record.method,
        _quoted(target),
        str(record.status) if record.complete else f"{record.status}!",
        str(record.sent_bytes),
        f"{record.seconds:.4f}",
        record.request_id,
        _quoted(record.user_agent),
    ]
    return " ".join([*fields, record.code] if record.code else fields)


def as_json(record: AccessRecord) -> str:
    """Return a record as a line of JSON, whose names are the attributes of ``AccessRecord``."""
    row = {
        name: value[:_TEXT_CHARACTERS_MAX] if isinstance(value, str) else value
        for name, value in asdict(record).items()
    }
    row["time"] = _time(record.time_s)
    return json.dumps(row, ensure_ascii=True)


class AccessLogWriter:
    """Writes records to a text stream, one per line.

    Args:
        stream: Where lines go, e.g. ``sys.stderr``.
        style: ``"lines"`` or ``"json"``.
    """

    def __init__(self, stream: TextIO, *, style: Literal["lines", "json"] = "lines") -> None:
        self._stream = stream
        self._text: Callable[[AccessRecord], str] = as_json if style == "json" else as_line

    def __call__(self, record: AccessRecord) -> None:
        """Write one record."""
        self._stream.write(self._text(record) + "\n")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(text: str) -> str:
    shown = printable(text[:_TEXT_CHARACTERS_MAX]).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown}"'
