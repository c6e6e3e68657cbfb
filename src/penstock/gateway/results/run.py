r"""A run: it produces a result block by block, and readers take what exists so far.

::

    producer -> tail -> [full blocks being stored] -> disk, and for a while RecentBlocks
                  \________________\______________________ readers

The producer writes into the tail, a block of memory. Readers see its output immediately. A thread stores a full block; until
then the block stays in the run. If the disk does not take blocks, because it is full or the result is too large, the run is
*paced*: it holds each block until all readers that need it have taken it, and the producer waits for the slowest of them.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32c import crc32c
from penstock.errors import PenstockError
from penstock.gateway.objects import S3Error
from penstock.gateway.results.record import DEFAULT_TYPE, HEADERS_BYTES_MAX, ResultRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.results.context import ResultsContext
    from penstock.gateway.results.identity import ResultPlan
    from penstock.types import Buffer

log = logging.getLogger("penstock.gateway")


class AbandonedError(Exception):
    """A run ended early, because no reader took its output. The next reader starts another run."""


STOPPED = (AbandonedError, asyncio.CancelledError)
"""Errors after which the next reader starts another run, because neither the source nor the transform is at fault."""


class Cursor:
    """The offset of one reader in a run.

    Attributes:
        offset: Next byte that the reader needs.
        end: End of its range.
        moved_s: When it last took a piece, on the monotonic clock, in seconds.
    """

    __slots__ = ("end", "moved_s", "offset")

    def __init__(self, offset: int, end: int) -> None:
        self.offset = offset
        self.end = end
        self.moved_s = time.monotonic()

    def move(self, length_bytes: int) -> None:
        """Note that the reader took a piece."""
        self.offset += length_bytes
        self.moved_s = time.monotonic()

    def needs(self, start: int, end: int) -> bool:
        """Whether the reader has still to take some of these bytes."""
        return self.offset < min(end, self.end) and start < self.end


class Run:
    """One run of what produces a result; its output is written to the run as to a ``ResultWriter``.

    Args:
        plan: Describes the result, and how it is produced.
        context: The parts that the results of the process share.
        cursors: The readers of the result; the set changes as they come and go.
        is_size_wanted: Whether anybody waits for the size, so that the result is produced even if nobody takes its bytes.
        stores: Whether to store blocks; False paces the run from its first block.

    Attributes:
        blocks: Identity of the run's blocks.
        headers: Headers of the result.
        announced_bytes: Size that the transform announced; None if it did not.
        produced_bytes: Number of bytes that readers may have.
        error: Why the run failed; None as long as it has not.
        is_done: Whether the producer has ended without an error, so that the size is final.
        is_kept: Whether all blocks so far were stored or are being stored.
        cursors: The readers of the result.
    """

    def __init__(
        self,
        plan: ResultPlan,
        context: ResultsContext,
        *,
        cursors: set[Cursor],
        is_size_wanted: Callable[[], bool],
        stores: bool,
    ) -> None:
        self.plan = plan
        self.token = secrets.token_hex(8)
        self.blocks = context.storage.blocks_of(plan.name, self.token)
        self.headers: Mapping[str, str] = {"Content-Type": DEFAULT_TYPE}
        self.announced_bytes = plan.size_bytes
        self.produced_bytes = 0
        self.error: BaseException | None = None
        self.is_done = False
        self.is_kept = stores
        self.has_begun = False
        self.cursors = cursors
        self._is_size_wanted = is_size_wanted
        self._left_behind: set[Cursor] = set()
        self._context = context
        self._storage = context.storage
        self._config = context.config
        self._block_bytes = context.storage.block_bytes
        self._tail: memoryview | None = None
        self._held: dict[int, memoryview] = {}  # full blocks that are being stored, or that readers of a paced run need
        self._storing: dict[int, asyncio.Future[tuple[int, bool]]] = {}
        self._crcs: dict[int, tuple[int, int]] = {}  # with sizes, of blocks beyond the first that has none yet
        self._joined_count = 0
        self._crc = 0
        self._is_recorded = False
        self._is_whole = False  # the result is one block, which is stored together with its record
        self._waiters: list[asyncio.Future[None]] = []
        self._timeout: asyncio.Timeout | None = None

    # ── producing ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def produce(self) -> ResultRecord:
        """Run the producer to its end.

        Returns:
            The record of the result. It is stored if all blocks could be stored, which ``is_kept`` shows.

        Raises:
            Exception: The error of the producer; then nothing is kept.
        """
        produce = self.plan.produce
        try:
            if produce is None:
                raise S3Error("NoSuchKey", "This result is no longer held; read the object again.")
            try:
                async with asyncio.timeout(self.plan.time_s_max) as self._timeout:
                    await produce(self)
            except TimeoutError as error:
                if self._timeout is None or not self._timeout.expired():
                    raise
                raise S3Error(
                    "RequestTimeout",
                    f"The transform {self.plan.transform} took longer than {self.plan.time_s_max:g} seconds.",
                ) from error
            self._check_size()
            self._end_producing()
            return await self._keep()
        except BaseException as error:
            await self._fail(error)
            raise

    def _check_size(self) -> None:
        if self.announced_bytes is not None and self.announced_bytes != self.produced_bytes:
            raise S3Error(
                "InternalError",
                f"The transform {self.plan.transform} announced {self.announced_bytes} bytes, "
                f"but produced {self.produced_bytes}.",
            )

    def _end_producing(self) -> None:
        self.has_begun = True
        fill_bytes = self.produced_bytes % self._block_bytes
        if fill_bytes and self._tail is not None:
            last = self._tail[:fill_bytes]
            if fill_bytes <= self._block_bytes // 2:
                last = memoryview(bytearray(last))  # otherwise it would keep a whole block of memory alive
            self._tail = None
            if self.produced_bytes < self._block_bytes and self.is_kept and not self._is_recorded:
                self._is_whole = True
                self._store_by(0, last, partial(self._storage.put_result, self.blocks, last, self._whole_record))
            else:
                self._store(self.produced_bytes // self._block_bytes, last)
        self.is_done = True
        self.wake()

    async def _keep(self) -> ResultRecord:
        """Wait until all blocks are stored, then store the record, which makes the result complete."""
        while self._storing:
            await asyncio.wait(list(self._storing.values()))
            await asyncio.sleep(0)  # the callbacks of the futures
        record = self.record(is_complete=True)
        if self.is_kept and not self._is_whole:
            self.is_kept = await self._context.on_thread(self._storage.put_record, record)
        if not self.is_kept:
            await self._remove_blocks()
        return record

    def record(self, *, is_complete: bool) -> ResultRecord:
        """Return the record of the result as far as it is known."""
        plan = self.plan
        return ResultRecord(
            scope=plan.name.scope,
            key=plan.name.key,
            etag=plan.name.etag,
            run=self.token,
            headers=self.headers,
            size_bytes=self.produced_bytes if is_complete else self.announced_bytes,
            crc32c=self._crc if is_complete else None,
            last_modified_s=plan.last_modified_s,
            transform=plan.transform,
            arguments=plan.arguments,
            block_bytes=self._block_bytes,
            is_complete=is_complete,
        )

    def _whole_record(self, crc: int) -> ResultRecord:
        """Return the record of a result of one block, whose checksum is that of the block."""
        return replace(self.record(is_complete=True), crc32c=crc)

    async def _fail(self, error: BaseException) -> None:
        self.error = error
        self._tail = None
        self._held.clear()
        self._context.recent.drop_run(self.blocks.digest)
        self.wake()
        if self._storing:
            await asyncio.wait(list(self._storing.values()))
        if self._is_recorded or self.produced_bytes >= self._block_bytes:
            await self._context.on_thread(self._storage.remove, self.record(is_complete=False))

    async def _remove_blocks(self) -> None:
        stored_count = -(-self.produced_bytes // self._block_bytes)
        if self._is_recorded:
            await self._context.on_thread(self._storage.remove, self.record(is_complete=False))
        else:
            await self._context.on_thread(self._storage.remove_blocks, self.blocks, stored_count)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        """Describe the output before its first byte."""
        if self.produced_bytes or self.has_begun:
            raise RuntimeError("begin() was called after the first byte, or twice")
        if sum(len(name) + len(value) for name, value in headers.items()) > HEADERS_BYTES_MAX:
            raise S3Error("InternalError", f"The result's headers exceed {HEADERS_BYTES_MAX} bytes.")
        self.headers = {"Content-Type": DEFAULT_TYPE, **headers}
        if size_bytes is not None:
            if self.announced_bytes is not None and self.announced_bytes != size_bytes:
                raise S3Error(
                    "InternalError",
                    f"The transform {self.plan.transform} announced {self.announced_bytes} bytes first, then {size_bytes}.",
                )
            self.announced_bytes = size_bytes
            self._check_limit(size_bytes)
            if size_bytes > self._storage.result_bytes_max:
                self.stop_keeping()
        self.has_begun = True
        self.wake()

    def buffer(self) -> memoryview:
        """Return memory into which the next bytes may be written directly: the free part of the tail."""
        if self._tail is None:
            self._tail = self._context.pool.take()
        return self._tail[self.produced_bytes % self._block_bytes :]

    async def write(self, data: Buffer) -> None:
        """Append bytes to the output; waits while too much of it is in memory."""
        view = memoryview(data).cast("B")
        while view:
            free = self.buffer()
            count = min(len(free), len(view))
            free[:count] = view[:count]
            view = view[count:]
            if self._grow(count):
                await self.pace()

    async def filled(self, length_bytes: int) -> None:
        """Append the first bytes of ``buffer()`` to the output."""
        if not 0 <= length_bytes <= len(self.buffer()):
            raise ValueError(f"{length_bytes} bytes do not fit into the buffer")
        if self._grow(length_bytes):
            await self.pace()

    def _grow(self, length_bytes: int) -> bool:
        """Make the next bytes of the tail visible; True if the tail is full, and ``pace`` must be awaited."""
        end = self.produced_bytes + length_bytes
        self._check_limit(end)
        if self.announced_bytes is not None and end > self.announced_bytes:
            raise S3Error(
                "InternalError",
                f"The transform {self.plan.transform} announced {self.announced_bytes} bytes, but produced more.",
            )
        self.produced_bytes = end
        is_full = end % self._block_bytes == 0 and length_bytes > 0
        if is_full:
            assert self._tail is not None
            block, self._tail = self._tail, None
            if end > self._storage.result_bytes_max and self.is_kept:
                self.stop_keeping()
            self._store(end // self._block_bytes - 1, block)
        self.wake()
        return is_full

    def _check_limit(self, size_bytes: int) -> None:
        if size_bytes > self.plan.output_bytes_max:
            raise S3Error(
                "EntityTooLarge",
                f"The result of the transform {self.plan.transform} is longer than {self.plan.output_bytes_max} bytes.",
                status=500,
            )

    async def pace(self) -> None:
        """Wait while too many blocks are in memory.

        Raises:
            AbandonedError: The disk does not take the blocks, and no reader is left.
        """
        await asyncio.sleep(0)  # a producer that never waits must not starve the readers
        while len(self._storing) >= self._config.storing_blocks_max:
            await asyncio.wait(list(self._storing.values()), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        if not self._is_recorded:
            await self.announce()
        await self._wait_for_readers()

    async def announce(self) -> None:
        """Store an incomplete record, by which other processes find the run."""
        if self.is_kept:
            self._is_recorded = True
            await self._context.on_thread(self._storage.put_record, self.record(is_complete=False))

    async def _wait_for_readers(self) -> None:
        """Wait until the readers of a paced run have taken all but a few blocks. The transform's clock stands still."""
        began_s = time.monotonic()
        while not self.is_kept:
            self._drop_taken()
            readers = self.cursors - self._left_behind
            if not readers and not self._is_size_wanted():
                raise AbandonedError
            if len(self._held) < self._config.held_blocks_max:
                break
            slow = [cursor for cursor in readers if self._holds_for(cursor)]
            if not slow:  # the blocks are still being checksummed
                await self.wait_progress()
                continue
            laggard = min(slow, key=lambda cursor: cursor.moved_s)
            left_s = max(laggard.moved_s, began_s) + self._config.lag_s_max - time.monotonic()
            if left_s <= 0:
                self._left_behind.add(laggard)  # it will find its block gone
            else:
                await self.wait_progress(left_s)
        waited_s = time.monotonic() - began_s
        if self._timeout is not None and waited_s > 0 and (when_s := self._timeout.when()) is not None:
            self._timeout.reschedule(when_s + waited_s)

    def _holds_for(self, cursor: Cursor) -> bool:
        """Whether a block is held that a reader needs."""
        size = self._block_bytes
        return any(cursor.needs(index * size, (index + 1) * size) for index in self._held)

    def _drop_taken(self) -> None:
        """Drop the blocks of a paced run that no reader needs."""
        for index in [index for index in self._held if index not in self._storing]:
            start = index * self._block_bytes
            end = start + self._block_bytes
            if not any(cursor.needs(start, end) for cursor in self.cursors if cursor not in self._left_behind):
                del self._held[index]

    def _store(self, index: int, block: memoryview) -> None:
        put = self._storage.put_block if self.is_kept else self._checksum_only
        self._store_by(index, block, partial(put, self.blocks, index, block))

    def _store_by(self, index: int, block: memoryview, put: Callable[[], tuple[int, bool]]) -> None:
        """Have a thread store a block, and hold it until then."""
        self._held[index] = block
        future = self._context.on_thread(put)
        self._storing[index] = future
        future.add_done_callback(lambda done: self._stored(index, block, done))

    @staticmethod
    def _checksum_only(_blocks: object, _index: int, data: memoryview) -> tuple[int, bool]:
        return crc32c(data), False

    def _stored(self, index: int, block: memoryview, done: asyncio.Future[tuple[int, bool]]) -> None:
        """Note that a thread has dealt with a block."""
        self._storing.pop(index, None)
        if done.cancelled() or self.error is not None:
            return
        if (error := done.exception()) is not None:
            log.error("A block of a result could not be stored.", exc_info=error)
            self.stop_keeping()
            return
        crc, stored = done.result()
        self._join(index, crc, len(block))
        if self.error is None:
            self._context.recent.put(self.blocks.digest, index, block.toreadonly())
        if not stored:
            self.stop_keeping()
        if self.is_kept:
            self._held.pop(index, None)
        else:
            self.moved()

    def _join(self, index: int, crc: int, size_bytes: int) -> None:
        """Add the checksum of a block to that of the result, as soon as those of all earlier blocks are known."""
        self._crcs[index] = crc, size_bytes
        while self._joined_count in self._crcs:
            crc, size_bytes = self._crcs.pop(self._joined_count)
            self._crc = combined_crc(self._crc, crc, size_bytes)
            self._joined_count += 1

    def stop_keeping(self) -> None:
        """From now on, hold blocks for the readers instead of storing them."""
        self.is_kept = False

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def known_bytes(self) -> int | None:
        """The size of the result; None if it is not known yet."""
        return self.produced_bytes if self.is_done else self.announced_bytes

    @property
    def readable_bytes(self) -> int:
        """The end of what readers may have.

        The last byte of an announced size is held back until the producer has ended without an error, because a client that
        has got all announced bytes takes them for a result.
        """
        if self.is_done or self.announced_bytes is None:
            return self.produced_bytes
        return min(self.produced_bytes, self.announced_bytes - 1)

    def piece(self, offset: int, end: int) -> memoryview | None:
        """Return bytes from `offset` on, as far as they are in memory in one block; None if none are."""
        index, start = divmod(offset, self._block_bytes)
        readable = min(end, self.readable_bytes) - index * self._block_bytes
        if readable <= start:
            return None
        block = self._held.get(index)
        if block is None and index == self.produced_bytes // self._block_bytes:
            block = self._tail
        if block is None:
            block = self._context.recent.get(self.blocks.digest, index)
        return block[start : min(readable, self._block_bytes)].toreadonly() if block is not None else None

    def moved(self) -> None:
        """Note that a reader has moved or left, which lets the producer of a paced run go on."""
        if not self.is_kept:
            self._drop_taken()
            self.wake()

    def wake(self) -> None:
        """Wake everyone who waits for progress."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_progress(self, time_s_max: float | None = None) -> None:
        """Wait until something happens, or for `time_s_max` seconds."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if time_s_max is None:
            await waiter
        else:
            await asyncio.wait([waiter], timeout=time_s_max)


def as_refusal(error: BaseException, *, what: str) -> Exception:
    """Return what readers of a failed run get: the error itself if it may be shown, else one without details."""
    if isinstance(error, S3Error):
        return S3Error(error.code, error.message, status=error.status, headers=error.headers, details=error.details)
    if isinstance(error, PenstockError):
        return error
    return S3Error("InternalError", f"The {what} failed.")
