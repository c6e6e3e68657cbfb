"""Counters and a record of each request; the log writes records as lines or as JSON, without secrets and signatures."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TextIO

from penstock.gateway.http.addressing import path_and_query, public_query
from penstock.gateway.http.service import METHODS
from penstock.redaction import printable

if TYPE_CHECKING:
    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.metrics import LabelledName, Metrics

_TEXT_CHARACTERS_MAX = 2048
_WAITING_COUNT_MAX = 100_000
_PAUSE_S = 0.02
_CLOSE_S_MAX = 2.0
_SENT_BYTES: Final[LabelledName] = ("penstock_gateway_sent_bytes_total", ())


class AccessRecord(NamedTuple):
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
        sent_bytes: Bytes of the answer's body that were sent.
        received_bytes: Bytes of the request's body that were read.
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


AccessLog = Callable[[AccessRecord], None]
"""Takes the record of each request. It must return quickly, because it runs on the event loop."""


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
        for name, value in record._asdict().items()
    }
    row["time"] = _time(record.time_s)
    return json.dumps(row, ensure_ascii=True)


class AccessLogWriter:
    """Writes records to a text stream, one per line.

    A thread writes them, many at a time when there are many, because a terminal or a pipe that nobody reads must not stop the
    event loop. If 100 000 of them wait, further ones are dropped and counted; a line says how many.

    Args:
        stream: The text file that lines are written to, e.g. ``sys.stderr``.
        style: ``"lines"`` or ``"json"``.
    """

    def __init__(self, stream: TextIO, *, style: Literal["lines", "json"] = "lines") -> None:
        self._stream = stream
        self._text: Callable[[AccessRecord], str] = as_json if style == "json" else as_line
        self._waiting: deque[AccessRecord] = deque()
        self._dropped_count = 0
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()

    def __call__(self, record: AccessRecord) -> None:
        """Take one record, which is written soon. Only one thread may call it."""
        if len(self._waiting) >= _WAITING_COUNT_MAX:
            self._dropped_count += 1
            return
        self._waiting.append(record)
        if not self._wake.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-access-log", daemon=True)
                self._thread.start()
            self._wake.set()

    def close(self) -> None:
        """Write the waiting records, unless the stream takes nothing for 2 seconds. Idempotent."""
        self._closed.set()
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._write()
            self._closed.wait(_PAUSE_S)
            self._wake.clear()
            self._write()  # what came before it was cleared
        self._write()

    def _write(self) -> None:
        lines = []
        while self._waiting:
            lines.append(self._text(self._waiting.popleft()))
        dropped_count, self._dropped_count = self._dropped_count, 0
        if dropped_count:
            what = f"{dropped_count} lines of the access log were dropped: nobody read them."
            lines.append(json.dumps({"message": what}) if self._text is as_json else f"penstock gateway: {what}")
        if lines:
            with suppress(OSError, ValueError):  # the reader has closed it
                self._stream.write("\n".join([*lines, ""]))
                self._stream.flush()


def _time(seconds: float) -> str:
    whole = int(seconds)
    return f"{_second(whole)}.{min(999, int((seconds - whole) * 1e3 + 1e-4)):03d}Z"


@lru_cache(maxsize=8)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _quoted(text: str) -> str:
    if text.isprintable() and len(text) <= _TEXT_CHARACTERS_MAX and '"' not in text and "\\" not in text:
        return f'"{text}"'
    shown = printable(text[:_TEXT_CHARACTERS_MAX]).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown}"'


def take_note(
    exchange: ClientExchange, code: str, *, is_complete: bool, metrics: Metrics, log: AccessLog | None
) -> None:
    """Count a request that has ended, and pass a record of it to the log.

    Args:
        exchange: The request and its answer.
        code: S3's code of the error; empty if there was none.
        is_complete: Whether the answer was sent to its end.
        metrics: Takes the numbers.
        log: Takes the record; None for no access log.
    """
    request, status = exchange.request, exchange.status
    seconds = exchange.elapsed_s
    counter, histogram = _names_of(request.method, status)
    metrics.counters[counter] += 1
    metrics.counters[_SENT_BYTES] += exchange.sent_bytes
    metrics.histograms[histogram].add(seconds)
    if log is None:
        return
    log(
        AccessRecord(
            time_s=exchange.started_s,
            remote=request.remote or "",
            access_key=exchange.access_key,
            method=request.method,
            bucket=exchange.bucket,
            key=exchange.key,
            query=public_query(path_and_query(request.raw_path)[1]),
            status=status,
            code=code,
            sent_bytes=exchange.sent_bytes,
            received_bytes=exchange.received_bytes,
            seconds=seconds,
            complete=is_complete,
            request_id=exchange.request_id,
            user_agent=request.headers.get("User-Agent", ""),
        )
    )


@lru_cache(maxsize=1024)
def _names_of(method: str, status: int) -> tuple[LabelledName, LabelledName]:
    """Return the names of the counter and of the histogram of requests."""
    known = method if method in METHODS or method == "OPTIONS" else "other"
    return (
        ("penstock_gateway_requests_total", (("method", known), ("status", str(status)))),
        ("penstock_gateway_request_seconds", (("method", known),)),
    )
