"""The interfaces between the parts of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class RunningChannel(Protocol):
    """A channel of a run, in one of the modes. The factory of its mode returns it when the program may start."""

    @property
    def path(self) -> Path:
        """What ``SM_CHANNEL_<NAME>`` says; in Pipe mode the program appends ``_<epoch>`` to it."""

    def check(self) -> None:
        """Raise what has gone wrong since it began.

        Raises:
            PenstockError: The channel cannot give the program its data.
        """

    def warnings(self) -> list[str]:
        """Return what the program could not hear from the channel: the objects and causes of reads that failed."""

    def close(self) -> None:
        """End it. Nothing of it stays mounted, running or half-written; idempotent."""
