"""What was read, as lines of JSON: an access profile, from which ``penstock cache warm --accesses`` fills a cache."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

from penstock import forks
from penstock.private import open_private

if TYPE_CHECKING:
    from penstock.cache.troubles import Troubles
    from penstock.types import ByteRange, Key

_LINES_MAX = 256


class Recorder:
    """Appends ``{"key": ..., "start": ..., "end": ...}`` for each read; several processes may append to one file.

    Args:
        path: Of the file; made where there is none.
        troubles: Told when it cannot be written; the reads go on.
    """

    def __init__(self, path: str, troubles: Troubles) -> None:
        self._path = path
        self._troubles = troubles
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """The parent writes its lines."""
        self._reset()

    def note(self, key: Key, span: ByteRange | None) -> None:
        """Remember one read. Cost: 2 µs, and a write per 256."""
        row: dict[str, object] = {"key": key}
        if span is not None:
            row["start"], row["end"] = span
        line = json.dumps(row) + "\n"
        with self._lock:
            self._lines.append(line)
            full = len(self._lines) >= _LINES_MAX
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what was noted: whole lines, in one piece."""
        with self._lock:
            lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            fd = open_private(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, "".join(lines).encode())
            finally:
                os.close(fd)
        except OSError as error:
            self._troubles.note("record", error)
