"""Worker processes of one kind, on the event loop: calls wait in line for them, and workers that end are replaced."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from penstock.errors import ClosedError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Coroutine

CANCEL_S_MAX = 2.0
"""Time in which a cancelled call may end by itself, in seconds."""
RESTART_S = 0.5
RESTART_S_MAX = 30.0
"""First and longest pause before another attempt to start a worker that failed to start, in seconds."""


class PooledWorker(Protocol):
    """A worker process, which runs one call at a time.

    Attributes:
        is_clean: Whether it waits for a call.
        calls_count: Number of calls that it has got.
    """

    is_clean: bool
    calls_count: int

    @property
    def process_id(self) -> int:
        """Id of the process."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""

    async def start(self) -> None:
        """Wait until it can take calls. The pool closes it if this fails."""

    def watch(self, ended: Callable[[], object] | None) -> None:
        """While it waits for a call: have `ended` called once if the process ends; None takes it back."""

    def cancel(self) -> None:
        """Tell it that the result of its call is not wanted any more."""

    async def settle(self) -> bool:
        """Wait a little for the end of a call that was cancelled; returns whether another call can follow."""

    async def close(self) -> None:
        """End the process and all that it started; idempotent."""


W = TypeVar("W", bound=PooledWorker)


class WorkerPool(ABC, Generic[W]):
    """Worker processes, and the calls that wait for them, first come, first served.

    Args:
        name: Name for messages and logs.
        workers_count: Number of workers.
        waiting_max: Largest number of calls that wait.
        calls_max: Number of calls after which a worker is replaced; 0 for no limit.
        log: Takes events of workers that no call hears of.

    Attributes:
        starts_count: Number of workers that were started.
    """

    def __init__(
        self, name: str, *, workers_count: int, waiting_max: int, calls_max: int = 0, log: logging.Logger
    ) -> None:
        self._name = name
        self._workers_count = workers_count
        self._waiting_max = waiting_max
        self._calls_max = calls_max
        self._log = log
        self._workers: set[W] = set()
        self._idle: list[W] = []
        self._running: set[W] = set()
        self._waiting: deque[asyncio.Future[W]] = deque()
        self._ended_call = asyncio.Event()
        self._recovering: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._start_lock = asyncio.Lock()
        self._is_started = False
        self._start_failure: Exception | None = None
        self._is_closed = False
        self.starts_count = 0

    @abstractmethod
    def new_worker(self) -> W:
        """Return another worker, whose process has been started."""

    @abstractmethod
    def busy_error(self) -> Exception:
        """Return the error of a call that cannot wait, because too many do."""

    @abstractmethod
    def unavailable_error(self, failure: Exception) -> Exception:
        """Return the error of a call for which there is no worker, because none starts."""

    @abstractmethod
    def reason(self, failure: Exception) -> str:
        """Return why a worker did not start, for the log."""

    def check_started(self, worker: W) -> None:
        """Raise an error if a worker that has started cannot be used."""

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that are there."""
        return sorted(worker.process_id for worker in self._workers)

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait for a worker."""
        return sum(not waiter.done() for waiter in self._waiting)

    async def start(self) -> None:
        """Start the workers, and wait for the first of them; idempotent.

        Raises:
            Exception: The first worker does not start.
        """
        async with self._start_lock:
            if self._is_started:
                return
            worker = await self._start_worker()
            self._is_started = True
            self._offer(worker)
            for _ in range(self._workers_count - 1):
                self._spawn(self._add_worker(), self._starting)

    async def close(self) -> None:
        """End all workers; calls that wait fail, and those that run are cancelled. Idempotent."""
        self._is_closed = True
        self._fail_waiting(ClosedError(f"the workers of {self._name} were closed"))
        for task in self._starting:
            task.cancel()
        for worker in self._running:
            worker.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S_MAX):  # calls clean up
                while self._running:
                    self._ended_call.clear()
                    await self._ended_call.wait()
        await asyncio.gather(*self._starting, *self._recovering, return_exceptions=True)
        for worker in self._idle:
            worker.watch(None)
        self._idle.clear()
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)), return_exceptions=True)

    # ── who is free ────────────────────────────────────────────────────────────────────────────────────────────────

    async def take(self) -> W:
        """Wait for a worker, which ``give_back`` returns. The first call starts the workers.

        Raises:
            ClosedError: The pool was closed.
            Exception: ``busy_error`` or ``unavailable_error``, or the first worker does not start.
        """
        if self._is_closed:
            raise ClosedError(f"the workers of {self._name} were closed")
        if not self._is_started:
            await self.start()
        while self._idle:
            worker = self._idle[-1]
            if worker.has_ended:
                self._note_idle_end(worker)
                continue
            self._idle.pop()
            worker.watch(None)
            self._running.add(worker)
            return worker
        if self._start_failure is not None and not self._workers:
            raise self.unavailable_error(self._start_failure)
        if self.waiting_count >= self._waiting_max:
            raise self.busy_error()
        waiter: asyncio.Future[W] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(waiter.result())
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)

    def give_back(self, worker: W, *, retires: bool = False) -> None:
        """Let another call have a worker, or replace it if it `retires` or cannot take one."""
        is_worn = 0 < self._calls_max <= worker.calls_count
        self._running.discard(worker)
        self._ended_call.set()
        if worker.is_clean and not retires and not is_worn:
            self._offer(worker)
        elif worker.is_clean or retires:
            self._spawn(self._replace(worker, settles=True), self._recovering)
        else:
            self._spawn(self._recover(worker), self._recovering)

    def _offer(self, worker: W) -> None:
        """Give a worker that is ready to the call that has waited longest."""
        if self._is_closed:
            return  # close() ends it
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._running.add(worker)
                waiter.set_result(worker)
                return
        self._idle.append(worker)
        worker.watch(lambda: self._note_idle_end(worker))

    def _note_idle_end(self, worker: W) -> None:
        """Replace a worker that ended while it had no call."""
        worker.watch(None)
        self._idle.remove(worker)
        worker.is_clean = False
        self._log.warning("%s: worker process %d ended while it waited for a call", self._name, worker.process_id)
        self._spawn(self._replace(worker), self._recovering)

    # ── starting and replacing ─────────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _recover(self, worker: W) -> None:
        """Use a worker again whose call was cancelled, if it ends the call in time."""
        if await worker.settle():
            self._offer(worker)
        else:
            await self._replace(worker)

    async def _replace(self, worker: W, *, settles: bool = False) -> None:
        if settles:
            await worker.settle()  # lets the call clean up
        await self._end(worker)
        if not self._is_closed:
            self._spawn(self._add_worker(), self._starting)

    async def _end(self, worker: W) -> None:
        try:
            await worker.close()
        finally:
            self._workers.discard(worker)

    async def _add_worker(self) -> None:
        """Start a worker, again and again until it has started."""
        pause_s = RESTART_S
        while True:
            try:
                worker = await self._start_worker()
            except Exception as error:
                failure = error
            else:
                self._start_failure = None
                self._offer(worker)
                return
            reason = self.reason(failure)
            if self._start_failure is None or reason != self.reason(self._start_failure):
                self._log.error("%s: a worker process does not start: %s", self._name, reason)
            self._start_failure = failure
            if not self._workers:
                self._fail_waiting(self.unavailable_error(failure))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)

    async def _start_worker(self) -> W:
        worker = self.new_worker()
        self._workers.add(worker)
        self.starts_count += 1
        try:
            await worker.start()
            self.check_started(worker)
        except BaseException:
            await self._end(worker)
            raise
        return worker

    def _fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)
