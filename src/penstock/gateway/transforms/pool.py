"""The worker processes of one access point, and the time limit of a call."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from penstock.errors import ConfigError, WorkerDiedError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.process import TransformFailedError, TransformProcess
from penstock.gateway.transforms.program import ProcessSetup
from penstock.processes.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import ResultWriter
    from penstock.gateway.transforms.messages import TransformCall
    from penstock.gateway.transforms.program import ProgramDescription, TransformProgram
    from penstock.types import ObjectInfo

log = logging.getLogger("penstock.gateway.transforms")

WAITING_MAX = 4096
"""Largest number of calls that wait for a process; further ones are refused with ``SlowDown``."""
PAUSED_S = 0.05
"""Time between two looks at a limit that has passed while the output was not taken, in seconds."""
RETIRING = frozenset({"MemoryError", "SystemError", "RecursionError"})
"""Errors after which a process is replaced, because it may be short of memory or of stack for good."""


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


class TransformPool(WorkerPool[TransformProcess]):
    """Worker processes that have imported a program.

    Args:
        program: Program that they run.
        access_point: Access point, whose limits apply.
        processes_count: Number of processes.

    Attributes:
        description: What the first process has said of the program; None before it has started.
    """

    def __init__(self, program: TransformProgram, *, access_point: AccessPoint, processes_count: int) -> None:
        name, calls_max = access_point.name, access_point.calls_max
        super().__init__(name, workers_count=processes_count, waiting_max=WAITING_MAX, calls_max=calls_max, log=log)
        self._setup = ProcessSetup(program, access_point.memory_bytes_max, processes_count)
        self.description: ProgramDescription | None = None

    def new_worker(self) -> TransformProcess:
        """Return another process."""
        return TransformProcess(self._name, self._setup)

    def check_started(self, worker: TransformProcess) -> None:
        """Refuse a process that has imported other code than the first one.

        Raises:
            ConfigError: The code has changed.
        """
        if self.description is None:
            self.description = worker.description
        elif worker.description != self.description:
            raise ConfigError("its code has changed since the gateway was started; restart the gateway to use it")

    def busy_error(self) -> S3Error:
        """Return the error of a call that cannot wait."""
        return S3Error("SlowDown", "Too many requests wait for this transform.", status=503)

    def unavailable_error(self, failure: Exception) -> S3Error:
        """Return the error of a call for which there is no process."""
        del failure
        message = f"The transform of {self._name} cannot be started; the log has the reason."
        return S3Error("TransformUnavailable", message, status=503)

    def reason(self, failure: Exception) -> str:
        """Return why a process did not start, with the author's traceback."""
        if isinstance(failure, TransformFailedError):
            cause = failure.failure
            is_plain = cause.kind == "ConfigError"
            return cause.message if is_plain else f"{cause.kind}: {cause.message}\n{cause.traceback}"
        if isinstance(failure, TimeoutError):
            return "importing it takes too long"
        if isinstance(failure, WorkerDiedError):
            return f"{failure.what} while it imported the transform"
        return str(failure)

    async def run(self, call: TransformCall, output: ResultWriter, *, deadline: CallDeadline) -> None:
        """Run a call in the next process that is free.

        Args:
            call: The call.
            output: Takes the output.
            deadline: Is started when the call begins.

        Raises:
            TransformFailedError: The transform failed.
            WorkerDiedError: The process died.
            S3Error: There is no process, or too many calls wait.
        """
        process = await self.take()
        retires = False
        try:
            deadline.start()
            await process.call(call, output)
        except TransformFailedError as error:
            retires = error.failure.kind in RETIRING
            raise
        except asyncio.CancelledError:
            retires = deadline.expired()
            raise
        finally:
            self.give_back(process, retires=retires)

    async def sizes(self, infos: Sequence[ObjectInfo], arguments: dict[str, str]) -> list[int | None]:
        """Ask the transform for sizes of results; raises the same as ``run``."""
        process = await self.take()
        try:
            return await process.sizes(infos, arguments)
        finally:
            self.give_back(process)
