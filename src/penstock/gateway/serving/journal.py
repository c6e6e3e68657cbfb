"""The journal: messages on stderr beside the access log, as lines or JSON, and recent activity for the status page.

Messages report the start, reloads and ends of processes; none shows a secret. Activity is the bytes and requests of each of
the last seconds, and the last errors.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from penstock.redaction import printable, public_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.gateway.http.access_log import AccessLog, AccessRecord


class Journal:
    """Writes events to stderr, each as one line; further lines of a traceback are indented.

    Args:
        log_format: ``"lines"`` for people, ``"json"`` for machines.
    """

    def __init__(self, log_format: Literal["lines", "json"]) -> None:
        self._is_json = log_format == "json"

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info", **fields: object) -> None:
        """Write an event.

        Args:
            text: A sentence on what happened. Secrets in URLs, and characters that control a terminal, are removed from it.
            level: Level of ``logging``.
            fields: Further members of the JSON object; lines do not show them.
        """
        shown = printable(public_text(text), lines=True)
        if self._is_json:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps({"time": now, "level": level, "message": shown, **fields}, default=str)
        else:
            line = f"penstock gateway: {'' if level == 'info' else level + ': '}{shown}".replace("\n", "\n    ")
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class JournalHandler(logging.Handler):
    """Writes the package's log to the journal: output of handlers, failures of transforms with key and request.

    Args:
        journal: Takes the records.
    """

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + _TRACEBACKS.formatException(record.exc_info)
        level: Literal["info", "warning", "error"] = "info"
        if record.levelno >= logging.WARNING:
            level = "error" if record.levelno >= logging.ERROR else "warning"
        more = {"request_id": record.request_id} if hasattr(record, "request_id") else {}
        self._journal.say(text, level=level, logger=record.name, **more)


_TRACEBACKS = logging.Formatter()


SECONDS_MAX = 60
ERRORS_MAX = 50
TEXT_CHARACTERS_MAX = 400
TRANSFORM_CODES = ("Transform", "Lambda")
"""Beginnings of error codes that are a transform's fault. Some of them come with status 400, as on AWS."""


class Activity:
    """Counts requests by second, and keeps the last errors. Only the event loop's thread uses it.

    Args:
        write: Writes the access log.
    """

    def __init__(self, write: AccessLog) -> None:
        self._write = write
        self._seconds: deque[list[float]] = deque(maxlen=SECONDS_MAX)  # [second, requests, bytes]
        self._errors: deque[dict[str, Any]] = deque(maxlen=ERRORS_MAX)

    def __call__(self, record: AccessRecord) -> None:
        """Take the record of a request that has ended."""
        second = int(record.time_s + record.seconds)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += 1
        self._seconds[-1][2] += record.sent_bytes
        if record.status >= 500 or not record.complete or record.code.startswith(TRANSFORM_CODES):
            target = f"/{record.bucket}/{record.key}" if record.bucket else "/"
            reason = record.code or ("the client left" if record.status == 499 else "broken off")
            self.note_error(f"{record.method} {target}", f"{record.status} {reason}", record.request_id)
        self._write(record)

    def note_error(self, what: str, reason: str, request_id: str = "") -> None:
        """Keep an error for the status page. Several errors of one request become one entry.

        Args:
            what: Name of the part that failed: a request, or a part of the gateway; empty if only the request's ID is known.
            reason: Why; secrets in URLs are removed.
            request_id: ID of the request; empty if there is none.
        """
        known = next((each for each in self._errors if request_id and each["request_id"] == request_id), None)
        if known is None:
            known = {"time_s": time.time(), "what": "", "reason": "", "request_id": request_id}
            self._errors.append(known)
        if what:
            known["what"] = _shortened(what)
        known["reason"] = _shortened(f"{known['reason']}; {reason}" if known["reason"] else reason)

    def details(self) -> dict[str, Any]:
        """Return the part of it that a snapshot shows."""
        return {"seconds": list(self._seconds), "errors": list(self._errors)}


class ErrorHandler(logging.Handler):
    """Keeps warnings and errors of the package's loggers for the status page. Any thread may log.

    Args:
        activity: Takes them.
        call_soon: Runs a function on the event loop's thread.
    """

    def __init__(self, activity: Activity, call_soon: Callable[..., object]) -> None:
        super().__init__(logging.WARNING)
        self._activity = activity
        self._call_soon = call_soon

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        reason = record.getMessage().split("\n")[0]  # the log has the traceback
        if record.exc_info and record.exc_info[1] is not None:
            reason += f" {record.exc_info[1]!r}"
        request_id = str(getattr(record, "request_id", ""))
        what = "" if request_id else record.name.removeprefix("penstock.")
        try:
            self._call_soon(self._activity.note_error, what, reason, request_id)
        except RuntimeError:  # the loop has ended
            return


def _shortened(text: str) -> str:
    shown = printable(public_text(text))
    return shown if len(shown) <= TEXT_CHARACTERS_MAX else shown[: TEXT_CHARACTERS_MAX - 1] + "…"
