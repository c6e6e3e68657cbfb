"""What goes wrong with the disk: counted, said once, never raised. A cache that fails is a slower job, not a failed one."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("penstock.cache")

_PAUSE_S = 5.0
"""After a failed write, none is tried for so long: a full disk is asked again, but not for every block."""


class Troubles:
    """Counts by errno's name, and the pause after a failed write. Safe from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._paused_until_s = 0.0
        self._lock = threading.Lock()

    def after_fork_in_child(self) -> None:
        """The lock may have been held."""
        self._lock = threading.Lock()

    def note(self, what: str, error: Exception) -> None:
        """Something failed: count it, and warn if it is the first of its kind. A failed write begins a pause."""
        number = getattr(error, "errno", None)
        kind = errno.errorcode.get(number, str(number)) if number is not None else type(error).__name__
        with self._lock:
            self._counts[f"{what} {kind}"] += 1
            first = f"{what} {kind}" not in self._said
            self._said.add(f"{what} {kind}")
            # a directory that goes under way is made again at once; a disk that became read-only also refuses to evict
            if (what == "write" and number != errno.ENOENT) or (what == "evict" and number == errno.EROFS):
                self._paused_until_s = time.monotonic() + _PAUSE_S
        if first:
            reason = getattr(error, "strerror", None) or str(error)
            log.warning("cache %s: %s failed: %s; %s (said once)", self._path, what, reason, _MEANING.get(what, ""))

    def say(self, kind: str, text: str) -> None:
        """Count something that is no error of the disk, and warn if it is the first of its kind."""
        with self._lock:
            self._counts[kind] += 1
            first = kind not in self._said
            self._said.add(kind)
        if first:
            log.warning("cache %s: %s (said once)", self._path, text)

    def writable(self) -> bool:
        """Whether a write is worth trying now."""
        return time.monotonic() >= self._paused_until_s

    def counts(self) -> Mapping[str, int]:
        """By what failed and why: ``{"write ENOSPC": 12}``."""
        with self._lock:
            return dict(self._counts)


_MEANING = {
    "write": "what is read is not kept, the job goes on",
    "read": "the block is fetched from the store",
    "lock": "blocks may be fetched by several processes",
    "record": "what is read is not recorded",
    "evict": "the cache may grow beyond its limit",
}
