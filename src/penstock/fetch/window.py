"""How many requests to keep in flight: few at first, more while that pays, fewer when the store complains.

A consumer that waits says that more is wanted; throughput that rises with the number says that more helps. Both must
hold for the number to grow, and the thread that receives must have time to spare: requests that wait for a busy thread only
spread the bytes over more memory. The first windows after a step still hold requests sent before it, on connections that had
to be made, so a step is judged by its second window where the first does not convince; one that brought less than
two fifths is taken back (on loopback 8 parts in flight move more bytes a second than 32: they stay in the processor's
cache) and tried again later, each time after a longer while.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_GAIN_MIN = 1.4
"""Where latency is the limit, a step brings its whole factor. Memory that warms up meanwhile, and noise, look like a
gain too; and connections cost: libcurl takes 30 us more of CPU per small object at 256 than at 64."""
_LOOKS_MAX = 2
_SETTLED_MAX = 1.2
"""A rate has settled when it is less than this many times the one before it at the same limit."""
_WINDOW_S_MIN = 0.02
"""A measurement lasts at least this long: completions come in bursts, and windows of 32 small objects on loopback, 5 ms long,
read anything from 900 to 46 000 objects a second. Behind 20 ms and more of latency it changes nothing."""
_HOLD_WINDOWS_MIN = 4
_HOLD_WINDOWS_MAX = 64
_BACKOFF = 0.5
_THROTTLED_HOLD_WINDOWS = 16
_BUSY_MIN = 0.8
"""Share of a window's time in which the receiving thread runs, from which on it is busy. Decrypting objects of 100 KB on
loopback it runs 90% of the time and costs 213 us for each with 256 requests in flight, 159 us with 32; and the first 800 MB
that a process reads touch 300 MB of fresh memory with 8 requests of 8 MiB, 600 MB with 32."""
_SMALL_BYTES = 512 * 1024
_SMALL_LIMIT = 64
_SMALL_LIMIT_MIN = 32
"""Small objects keep at least this many requests in flight: on loopback 8 are slower than 32 by a third, a difference that is
less than ``_GAIN_MIN``."""
_REQUEST_BYTES = 64 * 1024
"""What a request counts for beside its bytes: objects of unequal size, of which small ones cost per request."""


@dataclass(slots=True)
class Window:
    """The number of requests in flight, adapted once per window's worth of completions.

    Attributes:
        limit: The most to have in flight now.
        limit_min: Never fewer.
        limit_max: Never more.
        settles: Large answers are measured again at the same limit until their rate no longer rises, and only then does the
            limit grow. Objects that are delivered whole land in fresh memory at first, and a rate that rises because memory
            warms up looks like the gain of more requests, which would need more fresh memory still.
        cpu_s: Seconds that the calling thread has run.
    """

    limit: int
    limit_min: int
    limit_max: int
    settles: bool = False
    cpu_s: Callable[[], float] = time.thread_time
    _cpu_since: tuple[int, float] = (0, 0.0)  # the thread that began this window, and how long it had run by then
    _completed: int = 0
    _bytes: int = 0
    _since_s: float = 0.0
    _starved: bool = False
    _rate: float = 0.0
    _rate_here: float = 0.0  # the one before, if it was measured at this limit too
    _hold: int = 0
    _next_hold: int = _HOLD_WINDOWS_MIN
    _looks: int = 0
    _before: int = 0
    _since_shrink: int = 1 << 62  # completions; the first complaint counts at once

    def starving(self) -> None:
        """The consumer had to wait."""
        self._starved = True

    def begin_small(self) -> None:
        """Answers are known to be small before the first: begin with what the second window would have."""
        self.limit = min(self.limit_max, 4 * self.limit)

    def started(self, now_s: float) -> None:
        """The first request is on its way: the first window is measured from here, its round trip included."""
        if self._since_s == 0.0:
            self._since_s = now_s

    def completed(self, received_bytes: int, now_s: float, *, throttled: bool) -> None:
        """A request ended."""
        self.started(now_s)
        if not self._completed and not self._cpu_since[0]:
            self._cpu_since = threading.get_ident(), self.cpu_s()  # requests are sent by another thread than receives
        self._completed += 1
        self._since_shrink += 1
        self._bytes += received_bytes
        if throttled:
            self._shrink(now_s)
        elif self._completed >= self.limit and now_s - self._since_s >= _WINDOW_S_MIN:
            self._adapt(now_s)

    def _shrink(self, now_s: float) -> None:
        """The store asks to slow down: at most once per window, for the others were sent before it said so."""
        if self._since_shrink > self.limit:
            self._since_shrink = 0
            self.limit = max(self.limit_min, int(self.limit * _BACKOFF))
        self._hold = _THROTTLED_HOLD_WINDOWS
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
                self._next_hold = _HOLD_WINDOWS_MIN  # the last step paid
            self._rate, self._looks = rate, 0
            if self.settles and not self._is_small() and rate > _SETTLED_MAX * self._rate_here:
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
        """Whether the thread that receives has run nearly all the time; unknown, and so False, where there are several."""
        thread, before_s = self._cpu_since
        return thread == threading.get_ident() and self.cpu_s() - before_s > _BUSY_MIN * elapsed_s

    def _step_back(self) -> None:
        self.limit = max(self.limit_min, self._before)
        if self._is_small():
            self.limit = min(self.limit_max, max(self.limit, _SMALL_LIMIT_MIN))
        self._looks, self._rate_here = 0, 0.0
        self._hold = self._next_hold
        self._next_hold = min(_HOLD_WINDOWS_MAX, 2 * self._next_hold)

    def _factor(self) -> int:
        """Small answers: four times, for a round trip saved counts more than a few requests too many."""
        return 4 if self._is_small() and self.limit <= _SMALL_LIMIT else 2

    def _is_small(self) -> bool:
        return self._bytes < _SMALL_BYTES * self._completed

    def _restart(self, now_s: float) -> None:
        self._completed = 0
        self._bytes = 0
        self._since_s = now_s
        self._cpu_since = threading.get_ident(), self.cpu_s()
        self._starved = False
