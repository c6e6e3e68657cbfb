"""How many requests to keep in flight: few at first, more while that pays, fewer when the store complains.

A consumer that waits says that more is wanted; throughput that rises with the number says that more helps. Both must
hold for the number to double. Where a doubling brought less than ``_GAIN_MIN``, the step is taken back (on loopback 8
parts in flight move more bytes per second than 32: they stay in the processor's cache) and tried again much later.
"""

from __future__ import annotations

from dataclasses import dataclass

_GAIN_MIN = 1.25
_HOLD_WINDOWS = 32
_BACKOFF = 0.5
_SMALL_BYTES = 512 * 1024
_SMALL_LIMIT = 32


@dataclass(slots=True)
class Window:
    """The number of requests in flight, adapted once per window's worth of completions.

    Attributes:
        limit: The most to have in flight now.
        limit_min: Never fewer.
        limit_max: Never more.
    """

    limit: int
    limit_min: int
    limit_max: int
    _completed: int = 0
    _bytes: int = 0
    _since_s: float = 0.0
    _starved: bool = False
    _rate: float = 0.0
    _hold: int = 0
    _grew: bool = False
    _before: int = 0

    def starving(self) -> None:
        """The consumer had to wait."""
        self._starved = True

    def completed(self, received_bytes: int, now_s: float, *, throttled: bool) -> None:
        """A request ended."""
        if throttled and self._hold < _HOLD_WINDOWS:
            self.limit = max(self.limit_min, int(self.limit * _BACKOFF))
            self._hold = _HOLD_WINDOWS
            self._grew = False
            self._restart(now_s)
            return
        if self._since_s == 0.0:
            self._restart(now_s)
        self._completed += 1
        self._bytes += received_bytes
        if self._completed >= self.limit:
            self._adapt(now_s)

    def _adapt(self, now_s: float) -> None:
        elapsed_s = now_s - self._since_s
        # objects of unequal size: bytes and completions both speak for progress; small ones cost per request
        rate = (self._bytes + 65536 * self._completed) / elapsed_s if elapsed_s > 0 else float("inf")
        if self._grew and rate < _GAIN_MIN * self._rate:
            self.limit = self._before
            self._grew = False
            self._hold = _HOLD_WINDOWS
        elif self._hold > 0:
            self._hold -= 1
            self._rate = rate
        elif self._starved and self.limit < self.limit_max:
            self._rate = rate
            self._before = self.limit
            self.limit = min(self.limit_max, self.limit * self._factor())
            self._grew = True
        else:
            self._grew = False
            self._rate = rate
        self._restart(now_s)

    def _factor(self) -> int:
        """Small answers: four times, for a round trip saved counts more than a few requests too many."""
        return 4 if self._bytes < _SMALL_BYTES * self._completed and self.limit <= _SMALL_LIMIT else 2

    def _restart(self, now_s: float) -> None:
        self._completed = 0
        self._bytes = 0
        self._since_s = now_s
        self._starved = False
