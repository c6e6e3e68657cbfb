"""How many requests to keep in flight: few at first, more while that pays, fewer when the store throttles.

The number grows only under three conditions. The consumer waits, so it needs more. Throughput rose with the number, so more
requests help. And the receiving thread has time to spare, because requests that wait for a busy thread only spread the bytes
over more memory.

The first measurement after a step still contains requests that were sent before it, and connections that had to be opened.
So a step that seems to gain too little is judged by its second measurement. A step that gained less than two fifths is undone
(on loopback, 8 parts in flight move more bytes a second than 32, because they stay in the processor's cache), and tried again
later, each time after a longer pause.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_GAIN_MIN = 1.4
"""If latency is the limit, a step brings its whole factor. Noise, and memory that warms up meanwhile, look like a gain too,
and connections cost: libcurl takes 30 µs more of CPU per small object with 256 of them than with 64."""
_LOOKS_MAX = 2
_STEADY_MAX = 1.2
"""A rate is steady when it is less than this many times the one before it at the same limit."""
_MEASURED_S_MIN = 0.02
"""A measurement lasts at least this long, because completions come in bursts: measurements of 32 small objects on loopback,
which take 5 ms, gave anything from 900 to 46 000 objects a second. With a latency of 20 ms or more it changes nothing."""
_HOLD_MEASUREMENTS_MIN = 4
_HOLD_MEASUREMENTS_MAX = 64
_BACKOFF = 0.5
_THROTTLED_HOLD_MEASUREMENTS = 16
_BUSY_MIN = 0.8
"""The receiving thread is busy if it runs for this share of a measurement. While it decrypts objects of 100 KB on loopback
it runs 90% of the time, and takes 213 µs for each with 256 requests in flight but 159 µs with 32. The first 800 MB that a
process reads touch 300 MB of fresh memory with 8 requests of 8 MiB, and 600 MB with 32."""
_SMALL_BYTES = 512 * 1024
_SMALL_LIMIT = 64
_SMALL_LIMIT_MIN = 32
"""Small objects keep at least this many requests in flight: on loopback, 8 are slower than 32 by a third, which is less
than ``_GAIN_MIN`` would notice."""
_REQUEST_BYTES = 64 * 1024
"""Bytes that each request counts for besides its body, because small objects cost by the request."""


@dataclass(slots=True)
class Concurrency:
    """The number of requests to have in flight, adapted once for as many completions as it allows.

    Attributes:
        limit: The most requests to have in flight now.
        limit_min: Lower bound of `limit`.
        limit_max: Upper bound of `limit`.
        waits_for_steady_rate: Whether large answers are measured at the same limit until their rate no longer rises, before
            the limit grows. Objects that are delivered whole land in fresh memory at first, and a rate that rises because
            memory warms up looks like the gain of more requests, which would need even more fresh memory.
        cpu_s: Function that returns the seconds that the calling thread has run.
    """

    limit: int
    limit_min: int
    limit_max: int
    waits_for_steady_rate: bool = False
    cpu_s: Callable[[], float] = time.thread_time
    _cpu_since: tuple[int, float] = (0, 0.0)  # the thread that began this measurement, and how long it had run by then
    _completed: int = 0
    _bytes: int = 0
    _since_s: float = 0.0
    _starved: bool = False
    _rate: float = 0.0
    _rate_here: float = 0.0  # the rate before, if it was measured at this limit too
    _hold: int = 0
    _next_hold: int = _HOLD_MEASUREMENTS_MIN
    _looks: int = 0
    _before: int = 0
    _since_shrink: int = 1 << 62  # completions since the store throttled last; the first time counts at once

    def starving(self) -> None:
        """Note that the consumer had to wait."""
        self._starved = True

    def begin_small(self) -> None:
        """Start with the limit of the second step, because the answers are known to be small."""
        self.limit = min(self.limit_max, 4 * self.limit)

    def started(self, now_s: float) -> None:
        """Note that the first request was sent: the first measurement begins here, and includes its round trip."""
        if self._since_s == 0.0:
            self._since_s = now_s

    def completed(self, received_bytes: int, now_s: float, *, throttled: bool) -> None:
        """Note that a request ended.

        Args:
            received_bytes: Bytes of its body.
            now_s: Time now, in seconds of the monotonic clock.
            throttled: Whether the store asked to slow down.
        """
        self.started(now_s)
        if not self._completed and not self._cpu_since[0]:
            self._cpu_since = threading.get_ident(), self.cpu_s()  # another thread sends than receives
        self._completed += 1
        self._since_shrink += 1
        self._bytes += received_bytes
        if throttled:
            self._shrink(now_s)
        elif self._completed >= self.limit and now_s - self._since_s >= _MEASURED_S_MIN:
            self._adapt(now_s)

    def _shrink(self, now_s: float) -> None:
        """Slow down, at most once for the requests that were in flight when the store first said so."""
        if self._since_shrink > self.limit:
            self._since_shrink = 0
            self.limit = max(self.limit_min, int(self.limit * _BACKOFF))
        self._hold = _THROTTLED_HOLD_MEASUREMENTS
        self._looks = 0
        self._restart(now_s)

    def _adapt(self, now_s: float) -> None:
        elapsed_s = now_s - self._since_s
        rate = (self._bytes + _REQUEST_BYTES * self._completed) / elapsed_s if elapsed_s > 0 else float("inf")
        if self._looks and rate < _GAIN_MIN * self._rate:
            self._looks += 1
            if self._looks > _LOOKS_MAX:
                self._step_back()
        elif self._hold > 0:
            self._hold -= 1
            self._rate = rate
        elif self._starved and self.limit < self.limit_max and not self._is_busy(elapsed_s):
            if self._looks:
                self._next_hold = _HOLD_MEASUREMENTS_MIN  # the last step paid
            self._rate, self._looks = rate, 0
            if self.waits_for_steady_rate and not self._is_small() and rate > _STEADY_MAX * self._rate_here:
                self._rate_here = rate
            else:
                self._step_up()
        else:
            self._looks = 0
            self._rate = rate
        self._restart(now_s)

    def _step_up(self) -> None:
        self._before, self._looks, self._rate_here = self.limit, 1, 0.0
        self.limit = min(self.limit_max, self.limit * self._factor())

    def _is_busy(self, elapsed_s: float) -> bool:
        """Whether the receiving thread has run nearly all the time; False if there are several, because that is unknown."""
        thread, before_s = self._cpu_since
        return thread == threading.get_ident() and self.cpu_s() - before_s > _BUSY_MIN * elapsed_s

    def _step_back(self) -> None:
        self.limit = max(self.limit_min, self._before)
        if self._is_small():
            self.limit = min(self.limit_max, max(self.limit, _SMALL_LIMIT_MIN))
        self._looks, self._rate_here = 0, 0.0
        self._hold = self._next_hold
        self._next_hold = min(_HOLD_MEASUREMENTS_MAX, 2 * self._next_hold)

    def _factor(self) -> int:
        """Four for small answers, because saving a round trip matters more than a few requests too many."""
        return 4 if self._is_small() and self.limit <= _SMALL_LIMIT else 2

    def _is_small(self) -> bool:
        return self._bytes < _SMALL_BYTES * self._completed

    def _restart(self, now_s: float) -> None:
        self._completed = 0
        self._bytes = 0
        self._since_s = now_s
        self._cpu_since = threading.get_ident(), self.cpu_s()
        self._starved = False
