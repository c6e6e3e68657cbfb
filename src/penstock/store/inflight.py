"""Operations in flight, and a thread that waits for the end of one operation or of many."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.errors import ClosedError
from penstock.types import Head, Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.types import ByteRange, Completion, Core, Key, Landing, ObjectInfo, Operation, Transfer


Tag = TypeVar("Tag")


class _QueueSink(Generic[Tag]):
    __slots__ = ("landing", "queue", "tag")

    def __init__(self, tag: Tag, queue: SimpleQueue[tuple[_QueueSink[Tag], Completion]]) -> None:
        self.landing: Landing | None = None
        self.tag = tag
        self.queue = queue

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let a body go to a private buffer."""
        return None

    def done(self, completion: Completion) -> None:
        """Hand the completion to the collecting thread; ``SimpleQueue.put`` never blocks."""
        operation = completion.operation
        if isinstance(operation, Put):
            completion.operation = operation._replace(body=b"")  # so that its memory is free before it is collected
        self.queue.put((self, completion))


class InFlight(Generic[Tag]):
    """Operations submitted to one core. For one thread at a time.

    Args:
        core: The store.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._queue: SimpleQueue[tuple[_QueueSink[Tag], Completion]] = SimpleQueue()
        self._transfers: dict[_QueueSink[Tag], Transfer | None] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def submit(self, operation: Operation, tag: Tag) -> None:
        """Start `operation`; ``wait`` returns `tag` together with its completion."""
        sink = _QueueSink(tag, self._queue)
        self._transfers[sink] = None
        try:
            self._transfers[sink] = self._core.submit(operation, sink)
        except BaseException:
            del self._transfers[sink]
            raise

    def wait(self, wait_s_max: float | None = None) -> tuple[Tag, Completion]:
        """Wait for the next operation to end, well or not; there must be one in flight. Ctrl-C interrupts the wait.

        Args:
            wait_s_max: Longest wait in seconds; None waits without a bound.

        Raises:
            queue.Empty: No operation ended within `wait_s_max`.
        """
        while True:
            sink, completion = self._queue.get(timeout=wait_s_max)
            if sink in self._transfers:  # otherwise `submit` raised, and nothing waits for it
                del self._transfers[sink]
                return sink.tag, completion

    def ready(self) -> bool:
        """Whether ``wait()`` would return at once."""
        return not self._queue.empty()

    def cancel(self) -> None:
        """Cancel all of them; they still end, and ``wait()`` still returns them."""
        for transfer in list(self._transfers.values()):
            if transfer is not None:
                transfer.cancel()

    def drain(self) -> list[tuple[Tag, Completion]]:
        """Wait until none is in flight, and return how they ended."""
        ended = []
        while self._transfers:
            ended.append(self.wait())
        return ended


def perform_many(
    core: Core, operations: Iterable[tuple[Tag, Operation]], *, requests_max: int
) -> Iterator[tuple[Tag, Completion]]:
    """Perform operations, many at a time; yield the tag and the completion of each, in the order in which they end.

    Args:
        core: The store.
        operations: Pairs of a tag and an operation; consumed lazily.
        requests_max: Largest number of operations in flight at once.

    Raises:
        StoreError: An operation failed. The others in flight are cancelled, as they are when the iterator is dropped.
    """
    in_flight: InFlight[Tag] = InFlight(core)
    waiting = iter(operations)
    try:
        while True:
            while len(in_flight) < requests_max and (item := next(waiting, None)) is not None:
                in_flight.submit(item[1], item[0])
            if not in_flight:
                return
            tag, completion = in_flight.wait()
            if completion.error is not None:
                raise completion.error
            yield tag, completion
    finally:
        in_flight.cancel()


# ── one operation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class WaitingSink:
    """A sink that one thread waits for.

    Args:
        landing: Memory for the body; None for a new private buffer.

    Attributes:
        completion: The end of the operation; None until then.
    """

    __slots__ = ("_ended", "completion", "landing")

    def __init__(self, landing: Landing | None = None) -> None:
        self.landing = landing
        self.completion: Completion | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let the body go to the landing given at construction."""
        if self.landing is not None:
            self.landing.offset = self.landing.start
        return self.landing

    def done(self, completion: Completion) -> None:
        """Wake the waiting thread."""
        self.completion = completion
        self._ended.release()

    def wait(self, transfer: Transfer) -> Completion:
        """Block until the operation has ended; Ctrl-C cancels `transfer` and propagates.

        There is no deadline here: the transport and ``Retrying`` have theirs, so every submitted operation ends.
        """
        try:
            self._ended.acquire()
        except BaseException:
            transfer.cancel()
            raise
        completion = self.completion
        if completion is None:  # pragma: no branch - released by done() only
            raise ClosedError("the operation ended without an answer")
        return completion


def perform(core: Core, operation: Operation) -> Completion:
    """Submit `operation` and wait for its end.

    Raises:
        StoreError: The operation failed.
        KeyboardInterrupt: Ctrl-C; the transfer is cancelled.
    """
    sink = WaitingSink()
    completion = sink.wait(core.submit(operation, sink))
    if completion.error is not None:
        raise completion.error
    return completion


def stat(core: Core, key: Key) -> ObjectInfo:
    """Return size, ETag and modification time of an object.

    Raises:
        ObjectMissingError: The object does not exist.
    """
    info = perform(core, Head(key)).info
    assert info is not None
    return info
