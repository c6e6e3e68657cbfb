"""The worker processes of one handler, and the calls that wait for them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.worker import HandlerSettings, HandlerWorker
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

WAITING_MAX = 1024
"""Largest number of calls that wait for a worker process; further ones are refused with ``SlowDown``."""
GRACE_S = 1.0
"""How long a handler may go on after its answer is no longer needed, in seconds. Killing it costs another import."""
LOG = logging.getLogger("penstock.gateway.lambda")


class HandlerPool:
    """A fixed number of places, each with a worker or free for one.

    A worker that ended is replaced in the background, so that the next call need not wait for imports.

    Args:
        settings: The handler.
        size: Largest number of worker processes.
    """

    def __init__(self, settings: HandlerSettings, *, size: int) -> None:
        self._settings = settings
        self._size = size
        self._places: asyncio.LifoQueue[HandlerWorker | None] = asyncio.LifoQueue()
        for _ in range(size):
            self._places.put_nowait(None)
        self._waiting = 0
        self._workers: set[HandlerWorker] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start all workers.

        Raises:
            ConfigError: The handler cannot be imported; the message has its traceback.
        """
        places = [self._places.get_nowait() for _ in range(self._size)]
        workers: list[HandlerWorker | None] = [None] * len(places)
        try:
            workers[0] = await self._new()
            others = await asyncio.gather(*(self._new() for _ in places[1:]), return_exceptions=True)
            workers[1:] = [each if isinstance(each, HandlerWorker) else None for each in others]
        except S3Error as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            what = f"the handler {self._settings.config.handler!r} cannot be used. {error.message}\n{notes}".rstrip()
            hint = "check the handler's name, code_dir, and the interpreter that has its dependencies"
            raise ConfigError(what, hint=hint) from error
        finally:
            for worker in workers:
                self._places.put_nowait(worker)

    async def acquire(self) -> HandlerWorker:
        """Wait for a worker, which ``call`` or ``release`` returns to the pool.

        Raises:
            S3Error: Too many calls are waiting, or a new worker could not be started.
        """
        if self._is_closed or self._waiting >= WAITING_MAX:
            message = f"{self._waiting} calls wait for a worker of the handler. Reduce your request rate."
            raise S3Error("SlowDown", message, status=503)
        self._waiting += 1
        try:
            worker = await self._places.get()
        finally:
            self._waiting -= 1
        if worker is not None and worker.is_alive:
            return worker
        try:
            if worker is not None:
                await self._discard(worker)
            return await self._new()
        except BaseException:
            self._places.put_nowait(None)
            raise

    def call(self, worker: HandlerWorker, event: Mapping[str, object], **options: Any) -> asyncio.Task[Any]:
        """Start ``HandlerWorker.call`` with an acquired worker, which is released when it ends."""

        async def run() -> Any:
            try:
                return await worker.call(event, **options)
            finally:
                self.release(worker)

        return self._keep(run())

    def release(self, worker: HandlerWorker) -> None:
        """Give a worker back; one that ended is replaced."""
        if worker.is_alive:
            self._places.put_nowait(worker)
        else:
            self._keep(self._replace(worker))

    def abandon(self, call: asyncio.Task[Any]) -> None:
        """Give a call whose result is not needed a short time to end, then kill its worker process."""
        if not call.done():
            handle = asyncio.get_running_loop().call_later(GRACE_S, call.cancel)
            call.add_done_callback(lambda _: handle.cancel())

    async def close(self) -> None:
        """Kill all workers; idempotent."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._tasks:  # releasing a worker starts a task that replaces it
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._discard(worker) for worker in list(self._workers)))

    async def _new(self) -> HandlerWorker:
        worker = HandlerWorker(self._settings)
        await worker.start()
        if self._is_closed:
            await worker.close()
            raise S3Error("ServiceUnavailable", "The gateway is stopping.", status=503)
        self._workers.add(worker)
        return worker

    async def _discard(self, worker: HandlerWorker) -> None:
        self._workers.discard(worker)
        await worker.close()

    async def _replace(self, worker: HandlerWorker) -> None:
        new = None
        try:
            await self._discard(worker)
            if not self._is_closed:
                new = await self._new()
        except S3Error as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            LOG.warning("%s A worker could not be replaced. %s\n%s", self._settings.name, error.message, notes)
        finally:
            self._places.put_nowait(new)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work as a task that ``close`` ends, and whose error somebody else may look at."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
