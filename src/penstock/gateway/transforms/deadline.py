"""The time limit of one call, without the time in which its output is not taken."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

PAUSED_S = 0.05
"""Time between two looks at a limit that has passed while the output was not taken, in seconds."""


class CallDeadline:
    """Cancels the block ``async with deadline:`` when its call has taken too long, and raises ``TimeoutError`` there.

    Waiting for a worker does not count, and neither does time between ``pause`` and ``resume``.

    Args:
        time_s_max: Longest time in seconds.

    Cost: Pausing and resuming read a clock; the timer itself is looked at once in `time_s_max`.
    """

    def __init__(self, time_s_max: float) -> None:
        self._time_s_max = time_s_max
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._end_s = 0.0
        self._paused_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def start(self) -> None:
        """Begin to count."""
        self._end_s = self._loop.time() + self._time_s_max
        self._timer = self._loop.call_at(self._end_s, self._look)

    def pause(self) -> None:
        """Stop counting."""
        self._paused_at_s = self._loop.time()

    def resume(self) -> None:
        """Count again."""
        if self._paused_at_s is not None:
            self._end_s += self._loop.time() - self._paused_at_s
            self._paused_at_s = None

    def expired(self) -> bool:
        """Whether the call has taken too long."""
        return self._timeout.expired()

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._paused_at_s is not None:
            self._timer = self._loop.call_at(now_s + PAUSED_S, self._look)
        elif now_s < self._end_s:
            self._timer = self._loop.call_at(self._end_s, self._look)
        else:
            self._timeout.reschedule(now_s)
