"""How many bad samples a stage may drop (``max_errors=``), and how many it did."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.errors import DataError


class Tolerance:
    """Counts of dropped samples by stage: over all epochs to read, within one to bound. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._within: dict[str, tuple[int, int]] = {}  # stage: epoch, count in it

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Count a sample as dropped, if one more may be.

        Raises:
            DataError: `error`, where the epoch's bound is reached.
        """
        if not max_errors:
            raise error
        with self._lock:
            counted_epoch, count = self._within.get(stage, (epoch, 0))
            if counted_epoch != epoch:
                count = 0
            if count < max_errors:
                self._within[stage] = (epoch, count + 1)
                self._counts[stage] = self._counts.get(stage, 0) + 1
                return
        error.add_note(f"max_errors={max_errors}: {stage} has dropped as many samples in epoch {epoch} already")
        raise error

    def count(self, stage: str) -> None:
        """Count a sample as dropped where that has no bound."""
        with self._lock:
            self._counts[stage] = self._counts.get(stage, 0) + 1

    def counts(self) -> dict[str, int]:
        """Samples dropped so far, by stage; a copy."""
        with self._lock:
            return dict(self._counts)


class Uncounted(Tolerance):
    """For samples that go through the stages once more: those that are dropped then have been counted before."""

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """See ``Tolerance``: without a bound, where the stage drops samples at all."""
        if not max_errors:
            raise error

    def count(self, stage: str) -> None:
        """See ``Tolerance``."""
