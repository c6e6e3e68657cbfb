"""``Reachability``: whether an endpoint answers, and the operations that wait until it does again.

There is one record for each endpoint and process, whatever the number of stores. ``Retrying`` notes the answers in it, and
lets operations wait here whose attempts are spent while the endpoint does not answer. One of them at a time is sent again, as a
probe. If it is answered, all others are sent again, spread over a moment, so that a store that comes back is not trampled.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.system import forks
from penstock.transport import engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store.retrying import RetriedOperation

log = logging.getLogger("penstock.store")

PAUSE_S_MIN = 0.5
"""Mean pause before the first probe in seconds; it grows by half with each probe that fails."""
PAUSE_S_MAX = 10.0
RELEASE_S = 0.005
"""Seconds for each operation that is sent again when the endpoint answers: 256 of them are spread over 1.3 s."""
RELEASE_S_MAX = 2.0
_TICK_S = 0.1
"""How often the waiting operations are looked at: the precision of their deadlines, and of ``close()``."""
_ENDPOINTS_MAX = 4096
"""Records that are kept; a data set of URLs may name any number of hosts."""

_jitter = random.SystemRandom()  # a generator of its own, because that of the `random` module belongs to the user


class Reachability:
    """Whether one endpoint answers this process, and the operations that wait for it.

    Args:
        address: The endpoint, ``scheme://host:port``.

    Attributes:
        address: The endpoint.
        answered_s: Start of the latest request that was answered, on the monotonic clock; 0 if only the parent process was
            answered, and negative if nobody was.
        since_s: Start of the wait of the first operation, on the monotonic clock; None while none waits.
        probe: The operation that is sent again to see whether the endpoint answers.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.answered_s = -1.0
        self._lasted_s = 0.0
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finaliser may cancel or submit in the midst of it
        self._waiting: dict[RetriedOperation, None] = {}  # an ordered set
        self.since_s: float | None = None
        self.probe: RetriedOperation | None = None
        self._pause_s = PAUSE_S_MIN
        self._due_s = 0.0  # when the next probe may be sent

    def after_fork_in_child(self) -> None:
        """Forget the operations of the parent. That the endpoint was reached holds for the child, too."""
        self._reset()

    @property
    def is_reached(self) -> bool:
        """Whether the endpoint has ever answered."""
        return self.answered_s >= 0

    @property
    def unreachable_s(self) -> float:
        """Seconds in which operations of this process waited for the endpoint."""
        since_s = self.since_s
        return self._lasted_s + (time.monotonic() - since_s if since_s is not None else 0.0)

    def note_reached(self) -> None:
        """Note that the endpoint has answered the process that started this one."""
        self.answered_s = max(self.answered_s, 0.0)

    def wait(self, operation: RetriedOperation, error: Exception, *, wait_s_min: float) -> None:
        """Let an operation wait until the endpoint answers, or its time is over.

        Args:
            operation: The operation; its ``again`` is called exactly once.
            error: The failure of its last attempt, for the log.
            wait_s_min: Time that the store asks to wait, in seconds.
        """
        now_s = time.monotonic()
        with self._lock:
            begins = self.since_s is None
            if begins:
                self.since_s = now_s
                self._pause_s = PAUSE_S_MIN
                self._delay_probe(now_s)
            self._due_s = max(self._due_s, now_s + min(wait_s_min, PAUSE_S_MAX))
            self._waiting[operation] = None
        if begins:
            left_s = max(0.0, operation.deadline_s - now_s)
            log.warning("%s does not answer; waiting for it, for up to %.0f s: %s", self.address, left_s, error)
            self._tick_later()

    def answered(self, operation: RetriedOperation, started_s: float) -> None:
        """Note an answer while operations wait; one to a request that began before they did proves nothing."""
        since_s = self.since_s
        if since_s is not None and (operation is self.probe or started_s > since_s):
            self._end("answers again")

    def probe_failed(self) -> None:
        """Note that the probe was not answered; another follows after a longer pause."""
        with self._lock:
            self.probe = None
            self._pause_s = min(1.5 * self._pause_s, PAUSE_S_MAX)
            self._delay_probe(time.monotonic())

    def _delay_probe(self, now_s: float) -> None:
        self._due_s = now_s + self._pause_s * _jitter.uniform(0.5, 1)

    def _tick_later(self) -> None:
        engine.call_later(_TICK_S, partial(self._tick, engine.closings))

    def _tick(self, closings: int) -> None:
        """End what has waited long enough or is not wanted any more, and send a probe if it is time."""
        if self.since_s is None:
            return
        now_s = time.monotonic()
        with self._lock:
            closed = closings != engine.closings
            ending = [each for each in self._waiting if closed or each.is_wait_over(now_s)]
            for each in ending:
                del self._waiting[each]
            probe = None
            if self._waiting and self.probe is None and now_s >= self._due_s:
                self.probe = probe = next(iter(self._waiting))
                del self._waiting[probe]
            is_over = closed or (not self._waiting and self.probe is None)
        for each in ending:
            engine.call_later(0.0, each.again)
        if is_over:
            self._end("did not answer, and nothing waits for it any more")
            return
        self._tick_later()
        if probe is not None and not probe.again():  # it was cancelled meanwhile
            self.probe = None

    def _end(self, what: str) -> None:
        with self._lock:
            if self.since_s is None:
                return
            released, self._waiting = self._waiting, {}
            lasted_s = time.monotonic() - self.since_s
            self._lasted_s += lasted_s
            self.since_s = self.probe = None
        log.warning("%s %s, after %.1f s", self.address, what, lasted_s)
        spread_s = min(RELEASE_S * len(released), RELEASE_S_MAX)
        for each in released:
            engine.call_later(_jitter.uniform(0, spread_s), each.again)


_lock = threading.Lock()
_endpoints: dict[str, Reachability] = {}


def reachability(url: str) -> Reachability:
    """Return this process's record of the endpoint of `url`, which has no credentials."""
    address = "/".join(url.split("/", 3)[:3])
    found = _endpoints.get(address)
    if found is None:
        with _lock:
            found = _endpoints.setdefault(address, Reachability(address))
            if len(_endpoints) > _ENDPOINTS_MAX:
                del _endpoints[next(iter(_endpoints))]
    return found


def longest_wait_s() -> float:
    """Return for how long operations of this process have been waiting for an endpoint, in seconds; 0 if none waits."""
    begun_s = [since_s for each in tuple(_endpoints.values()) if (since_s := each.since_s) is not None]
    return time.monotonic() - min(begun_s) if begun_s else 0.0


class ReachedEndpoints:
    """The endpoints that have answered this process. Unpickling it tells another process, e.g. a worker that was spawned."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _note_reached, (tuple(each.address for each in _endpoints.values() if each.is_reached),)


def _note_reached(addresses: Iterable[str]) -> ReachedEndpoints:
    for address in addresses:
        reachability(address).note_reached()
    return ReachedEndpoints()
