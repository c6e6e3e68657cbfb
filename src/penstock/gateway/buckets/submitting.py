"""Submits operations to a store, and awaits them on the event loop. Nothing here blocks, and no thread waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import ObjectChangedError, StoreError
from penstock.fetch.budget import POOLED_BYTES_MIN
from penstock.memory.buffers import small_buffer
from penstock.types import UNKNOWN_BYTES, GrowingLanding, Landing, same_version

if TYPE_CHECKING:
    from penstock.fetch import Budget
    from penstock.store.base import Store
    from penstock.types import ByteRange, Completion, Get, ObjectInfo, Operation, Transfer


_AT_ONCE_BYTES_MAX = 256 << 10
"""A body of at most this length is not announced before it has arrived, which saves waking the event loop twice."""


class LoopSink:
    """A sink whose end the event loop awaits.

    Attributes:
        landing: None; a body gets a private buffer.
        ended: Set to the completion when the operation has ended.
    """

    landing: Landing | None = None

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Completion] = self._loop.create_future()

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return None: the store makes a buffer."""
        return None

    def done(self, completion: Completion) -> None:
        """Wake the loop."""
        self.on_loop(self._end, completion)

    def on_loop(self, function: object, *arguments: object) -> None:
        """Have the loop call a function soon; nothing happens if the loop was closed."""
        with suppress(RuntimeError):  # the process is ending
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _end(self, completion: Completion) -> None:
        if not self.ended.done():
            self.ended.set_result(completion)


async def perform_on_loop(store: Store, operation: Operation) -> Completion:
    """Perform an operation and wait for its end; cancelling the task cancels the operation.

    Raises:
        StoreError: The operation failed.
        PenstockError: The store refused the operation.
    """
    sink = LoopSink()
    transfer = store.submit(operation, sink)
    try:
        completion = await sink.ended
    except asyncio.CancelledError:
        transfer.cancel()
        raise
    if completion.error is not None:
        raise completion.error
    return completion


class FirstRead(LoopSink):
    """A ``Get`` of the beginning of an object or range, whose size is known before its bytes have arrived.

    Args:
        store: The store.
        operation: The read.
        length_bytes_max: The most bytes to read; of a longer object only the beginning is read. They are charged to the
            budget at once, because many reads begin before the first of them has an answer.

    Attributes:
        described: Set when the answer has begun; if its body is short or missing, only when it has ended.
        info: The object, once ``described`` is set.
        span: The bytes that are being read; None for an empty object.
        leaves_body_alone: True: nobody can change the bytes that ``wait_body`` returns.
    """

    def __init__(self, store: Store, operation: Get, *, length_bytes_max: int) -> None:
        super().__init__()
        self.leaves_body_alone = True
        self._budget: Budget = store.budget
        self._length_bytes_max = length_bytes_max
        self._reserved_bytes = length_bytes_max
        self._budget.reserve(length_bytes_max, force=True)
        self.described: asyncio.Future[None] = self._loop.create_future()
        self.info: ObjectInfo | None = None
        self.span: ByteRange | None = None
        self._landing: Landing | None = None
        self._transfer: Transfer = store.submit(operation, self)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Make room for the body; a second attempt must be of the same version."""
        landing = self._landing
        if landing is not None and self.info is not None and not isinstance(landing, GrowingLanding):
            if not same_version(info, self.info):
                raise ObjectChangedError("the object was replaced between two attempts to read it")
            landing.offset = landing.start
            return landing
        if span.end == UNKNOWN_BYTES:
            self._landing = GrowingLanding(self._check_length)
            return self._landing
        length_bytes = min(span.length_bytes, self._length_bytes_max)
        self.info, self.span = info, span._replace(end=span.start + length_bytes)
        self._landing = landing = self._make_landing(length_bytes)
        if length_bytes > _AT_ONCE_BYTES_MAX:
            self.on_loop(self._describe)
        return landing

    def _release(self) -> None:
        """Release the bytes that were reserved before the size was known; idempotent."""
        size_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if size_bytes:
            self._budget.release(size_bytes)

    def _make_landing(self, length_bytes: int) -> Landing:
        self._release()
        if length_bytes < POOLED_BYTES_MIN:
            return Landing(small_buffer(length_bytes), 0, length_bytes)
        buffer = self._budget.acquire(length_bytes, force=True)
        assert buffer is not None
        return Landing(buffer.view, 0, length_bytes, direct=buffer.owner)

    def _check_length(self, length_bytes: int) -> None:
        half_bytes = self._budget.bytes_max // 2
        if length_bytes > half_bytes:
            raise StoreError(
                f"a body of unknown length has {length_bytes} bytes or more, which is more than half of the budget of "
                f"{self._budget.bytes_max} bytes",
                retryable=False,
            )

    def _describe(self) -> None:
        if not self.described.done():
            self.described.set_result(None)

    def _end(self, completion: Completion) -> None:
        self._release()
        if completion.error is None:
            self.info = completion.info
            if self.span is None and completion.span is not None:
                self.span = completion.span
        super()._end(completion)
        self._describe()

    async def wait_described(self) -> ObjectInfo:
        """Wait until the object is known.

        Raises:
            StoreError: It cannot be read.
        """
        await self.described
        if self.ended.done():
            error = self.ended.result().error
            if error is not None:
                raise error
        assert self.info is not None
        return self.info

    async def wait_body(self) -> memoryview:
        """Wait for the bytes: uint8[n], read-only.

        Raises:
            StoreError: Reading failed.
        """
        completion = await self.ended
        if completion.error is not None:
            raise completion.error
        return completion.body.toreadonly()

    def cancel(self) -> None:
        """End reading; idempotent."""
        if not self.ended.done():
            self._transfer.cancel()
