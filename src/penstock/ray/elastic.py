"""How many workers a loader asks for: arithmetic, without Ray."""

from __future__ import annotations

from penstock.loader.statistics import STALL_RATIO_OK

GROW_S_MIN = 3.0
"""Seconds of iterating between two decisions to grow, so that the last one shows its effect."""
IDLE_S_MIN = 60.0
IDLE_S_MAX = 960.0
"""Seconds without a stall after which a worker is given back; twice as many each time when that made the loop stall."""
IDLE_RATIO_MAX = 0.01


class Elasticity:
    """Follows the stalls of a training loop, and says how many workers it should have.

    Args:
        low: Smallest number of workers.
        high: Largest number of workers.

    Attributes:
        wanted_count: Number of workers that the loop should have.
    """

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high
        self.wanted_count = low
        self._idle_s = IDLE_S_MIN
        self._has_shrunk = False
        self._since = (0.0, 0.0)

    def note(self, elapsed_s: float, stall_s: float, *, has_all: bool) -> None:
        """Note the statistics of the loader so far.

        Args:
            elapsed_s: Seconds of iterating.
            stall_s: Seconds of these in which the loop waited.
            has_all: Whether the loader has as many workers as it should; otherwise they are still being started.
        """
        spent_s, stalled_s = elapsed_s - self._since[0], stall_s - self._since[1]
        if not has_all or spent_s < 0:
            self._since = elapsed_s, stall_s
            return
        if spent_s < GROW_S_MIN:
            return
        ratio = stalled_s / spent_s
        if ratio >= STALL_RATIO_OK:
            self._since = elapsed_s, stall_s
            if self._has_shrunk:
                self._idle_s = min(IDLE_S_MAX, 2 * self._idle_s)
            self._has_shrunk = False
            # a loop that waits for a third of the time needs half as many more
            needed = self.wanted_count / max(0.5, 1 - ratio)
            self.wanted_count = min(self._high, max(self.wanted_count + 1, round(needed)))
        elif spent_s >= self._idle_s:
            self._since = elapsed_s, stall_s
            if ratio <= IDLE_RATIO_MAX and self.wanted_count > self._low:
                self.wanted_count -= 1
                self._has_shrunk = True
