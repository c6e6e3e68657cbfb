"""The gateway's messages on stderr beside the access log, as lines or JSON: start, reloads, ends of processes. No secrets."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

from penstock.redaction import printable, public_text


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
            level: How bad it is.
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
    """Writes what the package's loggers say to the journal: output of handlers, failures of transforms with key and request.

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
