"""One result in this process: who produces it, and where its bytes are."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.gateway.objects import S3Error
from penstock.gateway.results.derived import was_copied
from penstock.gateway.results.reader import ResultReader
from penstock.gateway.results.run import AbandonedError, Cursor, Run, as_refusal
from penstock.redaction import public_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from penstock.gateway.results.context import ResultsContext
    from penstock.gateway.results.identity import ResultPlan
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.results import Results
    from penstock.types import ByteRange

log = logging.getLogger("penstock.gateway")

_POLL_S_MIN = 0.004
_POLL_S_MAX = 0.05
"""Time between two looks at another process's run."""

_UNBOUNDED = 1 << 62


class SharedResult:
    """A result that somebody in this process reads or produces. All methods run on the event loop.

    If another process of the node has the lease of the result, this process follows: it looks for new blocks on the disk, and
    for the lease, from time to time. If the other process dies, the lease is free, and this process produces the result.

    Args:
        plan: The result, and how it is produced.
        context: The parts that the results of this process share.
        keeper: Decides whether its run goes on.
        record: The record of the result if it is known to be kept.
        is_storable: Whether to store it at all.

    Attributes:
        context: The parts that the results of this process share.
        record: The record of the result: complete, or of a run in another process; None if neither is known.
        run: The run in this process, as long as it goes on or its readers need its memory.
        cursors: The readers in this process.
    """

    def __init__(
        self,
        plan: ResultPlan,
        *,
        context: ResultsContext,
        keeper: Results,
        record: ResultRecord | None,
        is_storable: bool = True,
    ) -> None:
        self.plan = plan
        self.record = record
        self.run: Run | None = None
        self.cursors: set[Cursor] = set()
        self._attempts_count = 0
        self.context = context
        self._keeper = keeper
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None  # of the last attempt
        self._waiters: list[asyncio.Future[None]] = []
        self._size_waiters_count = 0
        self._is_storable = is_storable
        self._runs_count = 0

    # ── what is known ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def size_bytes(self) -> int | None:
        """The size of the result; None if it is not known yet."""
        if self.run is not None and self.run.known_bytes is not None:
            return self.run.known_bytes
        if self.record is not None and self.record.size_bytes is not None:
            return self.record.size_bytes
        return self.plan.size_bytes

    @property
    def headers(self) -> dict[str, str] | None:
        """The headers of the result; None if they are not known yet."""
        if self.record is not None:
            return self.record.sent_headers
        return dict(self.run.headers) if self.run is not None and self.run.has_begun else None

    @property
    def is_busy(self) -> bool:
        """Whether the result is being produced, or another process is being followed."""
        return self._task is not None

    @property
    def attempts_count(self) -> int:
        """Number of attempts to produce the result that have ended, successfully or not; their clean-up may still go on."""
        return self._attempts_count + (self.run is not None and self.run.error is not None)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody in this process reads the result or waits for its size."""
        return bool(self.cursors) or self._size_waiters_count > 0

    async def wait_size_bytes(self) -> int:
        """Return the size of the result as soon as it is known; the result is produced if necessary.

        Raises:
            S3Error: It cannot be produced.
            PenstockError: The same.
        """
        attempts_count = self.attempts_count
        self._size_waiters_count += 1
        try:
            while (size_bytes := self.size_bytes) is None:
                self.ensure_produced(attempts_count)
                await self.wait(self.run)
            return size_bytes
        finally:
            self._size_waiters_count -= 1
            self._keeper.left(self)

    async def wait_complete(self) -> ResultRecord | None:
        """Return the record of the result once it is kept whole; the result is produced if necessary.

        Returns:
            None if the result was produced, but the cache did not take it.

        Raises:
            S3Error: It cannot be produced.
            PenstockError: The same.
        """
        attempts_count = self.attempts_count
        self._size_waiters_count += 1
        try:
            while self.record is None or not self.record.is_complete:
                if self._task is None and self.run is not None and self.run.is_done:
                    return None
                self.ensure_produced(attempts_count)
                await self.wait(None)
            return self.record
        finally:
            self._size_waiters_count -= 1
            self._keeper.left(self)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pieces(self, span: ByteRange | None) -> AsyncGenerator[memoryview]:
        """Iterate over the bytes of a range; None reads to the end.

        Raises:
            S3Error: The result cannot be produced.
            PenstockError: The same.
        """
        cursor = Cursor(*(span if span is not None else (0, _UNBOUNDED)))
        reader = ResultReader(self, cursor)
        self.cursors.add(cursor)
        self.context.count_reader(1)
        if self.record is not None:
            self.context.touch(self.plan.name)
        try:
            while (piece := await reader.next_piece()) is not None:
                yield piece
                cursor.move(len(piece))
                del piece
                if self.run is not None:
                    self.run.moved()
        finally:
            reader.close()
            self.cursors.discard(cursor)
            if self.run is not None:
                self.run.moved()
            self.context.count_reader(-1)
            self._keeper.left(self)

    async def wait(self, run: Run | None) -> None:
        """Wait until the run, or if there is none the result, has made progress."""
        if run is not None and self.run is run and not run.is_done and run.error is None:
            await run.wait_progress()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.run is not None:
            self.run.wake()

    # ── what is gone ───────────────────────────────────────────────────────────────────────────────────────────────

    def lost(self, record: ResultRecord) -> None:
        """Note that a block of a complete result is missing or corrupt, so that the result must be produced again."""
        if self.record is record:
            self.record = None
            self._runs_count += 1
            self.context.forget(record)

    def block_gone(self, run: Run) -> None:
        """Note that a block of a run was evicted before its reader got it: more blocks would only evict each other."""
        self._is_storable = False
        run.stop_keeping()

    def drop(self, run: Run) -> None:
        """Drop a run that is over and whose bytes are gone, so that the next reader starts another one."""
        if self.run is run:
            self.run = None

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def ensure_produced(self, attempts_count: int) -> None:
        """Begin to produce or follow the result if nobody does.

        Args:
            attempts_count: Attempts that had ended when the caller came. If a later one has failed, its error is raised.
        """
        if self._task is not None:
            self.context.count_shared(self.plan)
            return
        if self._failure is not None and self._attempts_count > attempts_count:
            raise as_refusal(self._failure, what=f"transform {self.plan.transform}")
        self._task = self._keeper.start(self, self._work())

    @property
    def goes_on_alone(self) -> bool:
        """Whether the run should go on without readers, because the result will be kept for the next one."""
        run = self.run
        return self.plan.is_deterministic and run is not None and run.is_kept and not run.is_done

    def cancel(self) -> None:
        """Stop producing or following, unless the result only remains to be stored."""
        if self._task is not None and (self.run is None or not self.run.is_done):
            self._task.cancel()

    async def _work(self) -> None:
        """Produce the result, or follow the process that does, until it is complete or has failed."""
        failure: BaseException | None = None
        try:
            if await self._take_lease():
                try:
                    await self._produce()
                finally:
                    self.context.storage.release_lease(self.plan.name)
        except asyncio.CancelledError:
            raise
        except AbandonedError:
            pass
        except Exception as error:
            failure = error
            if not self.plan.is_deterministic:
                self._keeper.held.drop(self.plan.name)
            is_known = isinstance(error, (S3Error, PenstockError))
            log.warning(
                "The result of %s for %r failed: %s",
                self.plan.transform,
                public_key(self.plan.name.key),
                error,
                exc_info=None if is_known else error,
            )
        finally:
            self._task = None
            self._failure = failure
            self._attempts_count += 1
            self._wake()

    async def _take_lease(self) -> bool:
        """Wait for the right to produce the result; False if it turns out to be complete."""
        storage, name = self.context.storage, self.plan.name
        pause_s = _POLL_S_MIN
        while True:
            is_taken = storage.try_lease(name)
            try:
                record = storage.find(name)
                if record is not None and record.is_complete:
                    self._complete(record)
                    return False
                if is_taken:
                    await self._clean_up(record)
                    is_taken = False  # now it is the caller's
                    return True
            finally:
                if is_taken:
                    storage.release_lease(name)
            pause_s = _POLL_S_MIN if record != self.record else min(_POLL_S_MAX, 1.5 * pause_s)
            self.record = record
            self._wake()
            await asyncio.sleep(pause_s)

    async def _clean_up(self, record: ResultRecord | None) -> None:
        """Remove the files of a process that was killed while it produced the result.

        Raises:
            S3Error: Somebody may have read bytes of it, and another run would have others.
        """
        self.record = None
        if record is not None:
            await self.context.on_thread(self.context.storage.remove, record)
        if not self.plan.is_deterministic and (record is not None or self._runs_count):
            raise S3Error("InternalError", "This result is lost; read the object again.")

    def _complete(self, record: ResultRecord) -> None:
        self.record = record
        self.context.remember(record)

    async def _produce(self) -> None:
        async with nullcontext() if self.plan.waits_for_results else self.context.turn():
            self._runs_count += 1
            run = self.run = Run(
                self.plan,
                self.context,
                cursors=self.cursors,
                is_size_wanted=lambda: self._size_waiters_count > 0,
                stores=self._is_storable,
            )
            if not self.plan.is_deterministic:
                await run.announce()  # so that the next producer knows that bytes were read
            self._wake()
            outcome = "failed"
            began_s = time.monotonic()
            try:
                record = await run.produce()
                outcome = "copied" if was_copied(self.plan) else "ok"
            except BaseException:
                self.run = None
                raise
            finally:
                self._count_run(run, outcome, time.monotonic() - began_s)
            if run.is_kept:
                self._complete(record)
                self.run = None
                self._keeper.completed(self, record)
            else:  # its readers need its memory; if they are too slow for it, it is produced again
                self._is_storable = False
                self._keeper.remember_unkept(self)
            if self.plan.is_deterministic and self.plan.size_bytes is None:
                self.plan = replace(self.plan, size_bytes=record.size_bytes)

    def _count_run(self, run: Run, outcome: str, seconds: float) -> None:
        name, add = self.plan.access_point, self.context.metrics.add
        add("penstock_gateway_result_runs_total", access_point=name, outcome=outcome)
        add("penstock_gateway_result_run_seconds_total", seconds, access_point=name)
        add("penstock_gateway_result_produced_bytes_total", run.produced_bytes, access_point=name)
