"""How many bad samples a stage may drop per epoch (``max_errors=``), and how many it has dropped."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.errors import DataError


class Tolerance:
    """Counts dropped samples by stage, in total for the statistics and per epoch for the bound. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._in_epoch: dict[str, tuple[int, int]] = {}  # by stage: an epoch, and the count in it

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Count a sample as dropped, unless the stage has reached its bound.

        Args:
            error: Error of the sample.
            stage: Name of the stage that failed.
            max_errors: Number of samples that the stage may drop per epoch; 0: none.
            epoch: Epoch number, from 0.

        Raises:
            DataError: `error` itself, if the stage may not drop another sample in this epoch.
        """
        if not max_errors:
            raise error
        with self._lock:
            counted_epoch, count = self._in_epoch.get(stage, (epoch, 0))
            if counted_epoch != epoch:
                count = 0
            if count < max_errors:
                self._in_epoch[stage] = (epoch, count + 1)
                self._counts[stage] = self._counts.get(stage, 0) + 1
                return
        error.add_note(f"max_errors={max_errors}: {stage} has already dropped this many samples in epoch {epoch}")
        raise error

    def count(self, stage: str) -> None:
        """Count a sample as dropped by a stage whose drops have no bound."""
        with self._lock:
            self._counts[stage] = self._counts.get(stage, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return a copy of the numbers of samples dropped so far, by stage."""
        with self._lock:
            return dict(self._counts)


class Uncounted(Tolerance):
    """Counts nothing: for samples that pass the stages a second time, whose errors were counted the first time."""

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Raise `error` if the stage drops no samples at all; otherwise do nothing."""
        if not max_errors:
            raise error

    def count(self, stage: str) -> None:
        """Do nothing."""
