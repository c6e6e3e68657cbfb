"""The worker processes of one access point: calls wait in line for them, and those that end abnormally are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import ClosedError, ConfigError, PenstockError, WorkerDiedError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.process import (
    CANCEL_S_MAX,
    ProcessOptions,
    TransformFailedError,
    TransformProcess,
)
from penstock.gateway.transforms.program import ProcessSetup

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from penstock.gateway.objects import ResultWriter
    from penstock.gateway.transforms.deadline import CallDeadline
    from penstock.gateway.transforms.messages import TransformCall, TransformLimits
    from penstock.gateway.transforms.program import ProgramDescription, TransformProgram
    from penstock.types import ObjectInfo

log = logging.getLogger("penstock.gateway.transforms")

RESTART_S = 0.5
RESTART_S_MAX = 30.0
"""First and longest pause before another attempt to start a process that failed to start, in seconds."""
RETIRING = frozenset({"MemoryError", "SystemError", "RecursionError"})
"""Errors after which a process is replaced, because it may be short of memory or of stack for good."""


class TransformPool:
    """Worker processes, and the calls that wait for them, first come, first served.

    Args:
        program: Program that they run.
        name: Name of the access point, for logs.
        limits: Limits of a call.
        processes_count: Number of processes.

    Attributes:
        starts_count: Number of processes that were started.
    """

    def __init__(self, program: TransformProgram, *, name: str, limits: TransformLimits, processes_count: int) -> None:
        self._name = name
        self._limits = limits
        self._processes_count = processes_count
        self._options = ProcessOptions(name, ProcessSetup(program, limits.memory_bytes_max, processes_count))
        self._description: ProgramDescription | None = None
        self._processes: set[TransformProcess] = set()
        self._idle: list[TransformProcess] = []
        self._waiting: deque[asyncio.Future[TransformProcess]] = deque()
        self._running: set[TransformProcess] = set()
        self._ended_call = asyncio.Event()
        self._recovering: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._start_failure = ""
        self._is_closed = False
        self.starts_count = 0

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that are there."""
        return sorted(process.process_id for process in self._processes)

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait for a process."""
        return sum(not waiter.done() for waiter in self._waiting)

    async def start(self) -> ProgramDescription:
        """Start the processes, and wait for the first of them; idempotent.

        Raises:
            ConfigError: The program cannot be imported, or its arguments are wrong; the message has the traceback.
        """
        if self._description is None:
            try:
                process, self._description = await self._start_process()
            except (PenstockError, TimeoutError) as error:
                raise ConfigError(f"the transform of {self._name} does not start: {_reason(error)}") from None
            self._offer(process)
            for _ in range(self._processes_count - 1):
                self._spawn(self._add_process(), self._starting)
        return self._description

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
        process = await self._take()
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
            self._give_back(process, retires=retires)

    async def sizes(self, infos: Sequence[ObjectInfo], arguments: dict[str, str]) -> list[int | None]:
        """Ask the transform for sizes of results; raises the same as ``run``."""
        process = await self._take()
        try:
            return await process.sizes(infos, arguments)
        finally:
            self._give_back(process, retires=False)

    async def close(self) -> None:
        """End all processes; calls that wait fail, and those that run are cancelled. Idempotent."""
        self._is_closed = True
        self._fail_waiting(ClosedError(f"the transform of {self._name} was closed"))
        for task in self._starting:
            task.cancel()
        for process in self._running:
            process.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S_MAX):  # transforms clean up
                while self._running:
                    self._ended_call.clear()
                    await self._ended_call.wait()
        await asyncio.gather(*self._starting, *self._recovering, return_exceptions=True)
        for process in self._idle:
            asyncio.get_running_loop().remove_reader(process.fileno())
        self._idle.clear()
        await asyncio.gather(*(self._end(process) for process in list(self._processes)), return_exceptions=True)

    # ── who is free ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _take(self) -> TransformProcess:
        if self._is_closed:
            raise ClosedError(f"the transform of {self._name} was closed")
        while self._idle:
            process = self._idle[-1]
            if process.exited.is_set():
                self._note_idle_death(process)
                continue
            self._idle.pop()
            asyncio.get_running_loop().remove_reader(process.fileno())
            self._running.add(process)
            return process
        if self._start_failure and not self._processes:
            raise _unavailable(self._name)
        if self.waiting_count >= self._limits.waiting_max:
            raise S3Error("SlowDown", "Too many requests wait for this transform.", status=503)
        waiter: asyncio.Future[TransformProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result(), retires=False)
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)

    def _offer(self, process: TransformProcess) -> None:
        """Give a process that is ready to the call that has waited longest."""
        if self._is_closed:
            return  # close() ends it
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._running.add(process)
                waiter.set_result(process)
                return
        self._idle.append(process)
        asyncio.get_running_loop().add_reader(process.fileno(), self._note_idle_death, process)

    def _note_idle_death(self, process: TransformProcess) -> None:
        """Replace a process that died, or sent something, while it had no call."""
        asyncio.get_running_loop().remove_reader(process.fileno())
        self._idle.remove(process)
        process.is_clean = False
        log.warning("%s: worker process %d ended while it waited for a call", self._name, process.process_id)
        self._spawn(self._replace(process), self._recovering)

    def _give_back(self, process: TransformProcess, *, retires: bool) -> None:
        is_worn = 0 < self._limits.calls_max <= process.calls_count
        self._running.discard(process)
        self._ended_call.set()
        if process.is_clean and not retires and not is_worn:
            self._offer(process)
        elif process.is_clean or retires:
            self._spawn(self._replace(process, settles=True), self._recovering)
        else:
            self._spawn(self._recover(process), self._recovering)

    # ── starting and replacing ─────────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _recover(self, process: TransformProcess) -> None:
        """Use a process again whose call was cancelled, if it ends the call in time."""
        if await process.settle():
            self._offer(process)
        else:
            await self._replace(process)

    async def _replace(self, process: TransformProcess, *, settles: bool = False) -> None:
        if settles:
            await process.settle()  # lets the transform clean up
        await self._end(process)
        if not self._is_closed:
            self._spawn(self._add_process(), self._starting)

    async def _end(self, process: TransformProcess) -> None:
        try:
            await process.close()
        finally:
            self._processes.discard(process)

    async def _add_process(self) -> None:
        """Start a process, again and again until it has started."""
        pause_s = RESTART_S
        while True:
            try:
                process, description = await self._start_process()
                if description == self._description:
                    self._start_failure = ""
                    self._offer(process)
                    return
                await self._end(process)
                reason = "its code has changed since the gateway was started; restart the gateway to use it"
            except (PenstockError, TimeoutError, OSError) as error:
                reason = _reason(error)
            if reason != self._start_failure:
                log.error("%s: a worker process does not start: %s", self._name, reason)
            self._start_failure = reason
            if not self._processes:
                self._fail_waiting(_unavailable(self._name))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)

    async def _start_process(self) -> tuple[TransformProcess, ProgramDescription]:
        process = TransformProcess(self._options)
        self._processes.add(process)
        self.starts_count += 1
        try:
            async with asyncio.timeout(self._limits.start_s_max):
                return process, await process.begin()
        except BaseException:
            await self._end(process)
            raise

    def _fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)


def _unavailable(name: str) -> S3Error:
    return S3Error(
        "TransformUnavailable", f"The transform of {name} cannot be started; the log has the reason.", status=503
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TransformFailedError):
        failure = error.failure
        is_plain = failure.kind == "ConfigError"
        return failure.message if is_plain else f"{failure.kind}: {failure.message}\n{failure.traceback}"
    if isinstance(error, TimeoutError):
        return "importing it takes too long"
    if isinstance(error, WorkerDiedError):
        return f"{error.what} while it imported the transform"
    return str(error)
