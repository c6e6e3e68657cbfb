"""Operations in flight together, and one thread that collects how they end; for listing, writing, deleting and copying."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.types import Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.types import ByteRange, Completion, Core, Landing, ObjectInfo, Operation, Transfer

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
