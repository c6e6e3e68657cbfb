"""The log of the process that serves a mount: writing it, and reading the warnings in it.

A program that uses a mount sees only the number of an error, such as "Input/output error". The object and the cause are in
this log.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOG_BYTES_MAX = 1 << 20
"""Size at which a log file is put aside; one older file is kept."""

READ_BYTES_MAX = 1 << 18
"""Bytes of the end of a log that are searched for warnings."""

MESSAGE_CHARACTERS_MAX = 2000

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (.*)")
_SHOWN_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_VARYING = re.compile(r" bytes \[\d+, \d+\)|\d+ attempts?(?: in [\d.]+ s)?|request id [^),]+")
"""What differs in the messages of one failure that happens again: the range, the attempts, the id of the request."""
_TRACEBACK = "Traceback (most recent call last):"


def start_logging(path: Path, *, is_verbose: bool) -> None:
    """Send everything that penstock logs in this process to a file, to which it is appended.

    Args:
        path: The file; its directory is made if it is missing.
        is_verbose: Whether requests and retries are logged as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if is_verbose else logging.INFO)
    logger.propagate = False


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a log file.

    Attributes:
        path: The log file.
        inode: Inode of the file at the time; None if there was none.
        size_bytes: Size of the file at the time.
    """

    path: Path
    inode: int | None
    size_bytes: int

    @classmethod
    def at_end(cls, path: Path) -> LogPosition:
        """Return the end of a log file as it is now."""
        try:
            status = path.stat()
        except OSError:
            return cls(path, None, 0)
        return cls(path, status.st_ino, status.st_size)

    def warnings(self, *, count_max: int) -> list[str]:
        """Return the last warnings and errors that were logged after this place.

        Args:
            count_max: The most messages. If the same request failed in the same way again, only the last one counts.

        Returns:
            Messages of one line each, in the order of the log. The list is empty if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                is_same = self.inode == self.path.stat().st_ino and self.size_bytes <= size_bytes
                file.seek(max(self.size_bytes if is_same else 0, size_bytes - READ_BYTES_MAX))
                text = file.read(READ_BYTES_MAX).decode(errors="replace")
        except OSError:
            return []
        last: dict[str, str] = {}
        for message in reversed(_messages(text)):
            last.setdefault(_VARYING.sub("", message), message)
        return list(last.values())[:count_max][::-1]


def _messages(text: str) -> list[str]:
    """Return the messages of the warnings and errors in a log, without tracebacks; a beginning that is cut off is left out."""
    found: list[list[str]] = []
    current: list[str] | None = None
    for line in text.splitlines():
        if match := _RECORD.fullmatch(line):
            current = [match[2]] if match[1] in _SHOWN_LEVELS else None
            if current is not None:
                found.append(current)
        elif line == _TRACEBACK:
            current = None
        elif current is not None:
            current.append(line.strip())
    return [" ".join(lines)[:MESSAGE_CHARACTERS_MAX] for lines in found]
