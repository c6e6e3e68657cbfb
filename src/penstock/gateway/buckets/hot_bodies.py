"""``HotBodies``: the bytes of small objects that are read again and again, in the memory of this process.

The page cache has them too, but opening a file, copying 100 KB out of it and closing it again take a third of the CPU time of a
GET. An object is read from the cache's directory again once a minute, so the directory still sees that it is in use.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.fetch.budget import Budget
    from penstock.gateway.buckets.believed_objects import BelievedObject

BODY_BYTES_MAX = 256 << 10
"""The largest body that is kept; for larger ones, copying costs more than what surrounds it."""
_BUDGET_SHARE = 8
"""The bodies take at most this part of the budget."""
_KEPT_S_MAX = 60.0


class HotBody(NamedTuple):
    """The bytes of one object.

    Attributes:
        body: uint8[n].
        size_bytes: Bytes of memory that it occupies.
        until_s: When it must be read again, on the monotonic clock, in seconds.
    """

    body: memoryview
    size_bytes: int
    until_s: float


class HotBodies:
    """Bodies by object. Only the event loop's thread uses it.

    Args:
        budget: The budget that the bodies are charged to. If it lacks the bytes, nothing more is kept.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes_max = budget.bytes_max // _BUDGET_SHARE
        self._used_bytes = 0
        self._bodies: dict[BelievedObject, HotBody] = {}  # the oldest first

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the bodies occupy."""
        return self._used_bytes

    def get(self, known: BelievedObject) -> memoryview | None:
        """Return the bytes of an object; None if they are not kept, or for too long."""
        found = self._bodies.get(known)
        return found.body if found is not None and time.monotonic() < found.until_s else None

    def keep(self, known: BelievedObject, body: memoryview) -> None:
        """Keep the bytes of an object if there is room.

        Args:
            known: The object.
            body: All of its bytes, in memory that nobody will change.
        """
        self._drop(known)
        size_bytes = memoryview(body.obj).nbytes
        now_s = time.monotonic()
        if self._used_bytes + size_bytes > self._bytes_max:
            self._drop_old(now_s)
        if self._used_bytes + size_bytes > self._bytes_max or not self._budget.reserve(size_bytes):
            return
        self._used_bytes += size_bytes
        self._bodies[known] = HotBody(body, size_bytes, now_s + _KEPT_S_MAX)

    def _drop_old(self, now_s: float) -> None:
        for known, hot in list(self._bodies.items()):
            if hot.until_s > now_s:
                return
            self._drop(known)

    def _drop(self, known: BelievedObject) -> None:
        found = self._bodies.pop(known, None)
        if found is not None:
            self._used_bytes -= found.size_bytes
            self._budget.release(found.size_bytes)

    def close(self) -> None:
        """Drop everything; idempotent."""
        for known in list(self._bodies):
            self._drop(known)
