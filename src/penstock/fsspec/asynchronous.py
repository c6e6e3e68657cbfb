"""The asynchronous face: coroutines that leave the caller's event loop free.

Each coroutine runs the synchronous method of its name on a thread of a small pool; the engine does the reading and writing,
many requests at a time, so a thread only waits. Reads of single objects and ranges are the exception: libraries such as Zarr
ask for thousands at once. Those that come in one turn of the event loop become one ``read_many``, which reads neighbours
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import ConfigError, SpanError, StoreError
from penstock.fetch import PlanItem
from penstock.fsspec.bulk import read_streamed
from penstock.store.threaded import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from penstock.store.base import Store
    from penstock.types import ByteRange

THREADS_MAX = 32
"""Coroutines of this process that wait for the engine at the same time; more of them queue."""

_pool = Pool(threads_max=THREADS_MAX, name="fsspec-async")


class ThreadedCall:
    """A call that a thread of the pool makes for an event loop.

    Args:
        call: The function, without arguments.
        future: Gets the result, in the loop that it belongs to.
    """

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self._call = call
        self._future = future

    def run(self) -> None:
        """Make the call, unless it was cancelled before it began."""
        if self._future.cancelled():
            return
        try:
            result, error = self._call(), None
        except BaseException as caught:  # whatever it is, the coroutine has to hear of it
            result, error = None, caught
        with suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            self._future.get_loop().call_soon_threadsafe(_settle, self._future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future cannot hold it
        future.set_exception(RuntimeError(str(error)))
    else:
        future.set_exception(error)


async def in_thread(call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call a function on a thread of the pool, and wait for its result without blocking the event loop.

    If the coroutine is cancelled, a call that has begun goes on to its end, and its result is dropped.
    """
    future = asyncio.get_running_loop().create_future()
    _pool.put(ThreadedCall(partial(call, *arguments, **options), future))
    return await future


def as_coroutine(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the coroutine method that runs the method `name` on a thread."""

    async def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return await in_thread(getattr(self, name), *arguments, **options)

    method.__name__ = method.__qualname__ = f"_{name}"
    method.__doc__ = f"Do what ``{name}`` does, without blocking the event loop."
    return method


class ReadBatches:
    """Collects the reads that coroutines ask for in one turn of an event loop, and has them made together."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[asyncio.AbstractEventLoop, int], _ReadBatch] = {}

    async def read(self, store: Store, key: str, span: ByteRange | None) -> bytes:
        """Read an object, or a range of it; a range past the end of the object is empty, or ends there.

        Raises:
            StoreError: The read failed.
        """
        loop = asyncio.get_running_loop()
        batch = self._waiting.get((loop, id(store)))
        if batch is None:
            batch = self._waiting[loop, id(store)] = _ReadBatch(store, loop)
            loop.call_soon(self._send, batch)
        return await batch.add(key, span)

    def _send(self, batch: _ReadBatch) -> None:
        del self._waiting[batch.loop, id(batch.store)]
        _pool.put(batch)


class _ReadBatch:
    """Reads of one store for one event loop; a thread of the pool makes them."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.loop = loop
        self._reads: list[tuple[str, ByteRange | None, asyncio.Future[bytes]]] = []
        self._sent: list[int] = []  # numbers of those that were not cancelled before they were requested
        self._answers: deque[tuple[asyncio.Future[bytes], bytes, BaseException | None]] = deque()

    def add(self, key: str, span: ByteRange | None) -> asyncio.Future[bytes]:
        """Add a read; called in the event loop."""
        future = self.loop.create_future()
        self._reads.append((key, span, future))
        return future

    def run(self) -> None:
        """Make the reads, on a thread of the pool."""
        with suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            try:
                self._read()
            except ConfigError:  # one is too long to be held whole by the engine, or its key is not valid
                self._read_one_by_one()
            except BaseException as error:  # whatever it is, the coroutines have to hear of it
                for _, _, future in self._reads:
                    self._answer(future, b"", error)

    def _requests(self) -> Iterator[tuple[str, ByteRange | None]]:
        for number, (key, span, future) in enumerate(self._reads):
            if not future.cancelled():
                self._sent.append(number)
                yield key, span

    def _read(self) -> None:
        for answer in self.store.try_read_many(self._requests(), ordered=False):
            assert answer.request_index is not None
            number = self._sent[answer.request_index]
            _, span, future = self._reads[number]
            if isinstance(answer, SpanError) and span is not None:
                self._answer(future, b"", None)
            elif isinstance(answer, StoreError):
                self._answer(future, b"", answer)
            else:
                self._answer(future, bytes(answer.data), None)

    def _read_one_by_one(self) -> None:
        for key, span, future in self._reads:
            if future.done():
                continue
            try:
                self._answer(future, read_streamed(self.store, PlanItem(key, span)), None)
            except BaseException as error:  # whatever it is, the coroutine has to hear of it
                self._answer(future, b"", error)

    def _answer(self, future: asyncio.Future[bytes], data: bytes, error: BaseException | None) -> None:
        """Hand an answer to the event loop, which is woken once for all answers that it has not taken yet."""
        self._answers.append((future, data, error))
        if len(self._answers) == 1:
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._answers:
            _settle(*self._answers[0])
            self._answers.popleft()


class AsyncFile:
    """A file whose methods are coroutines: ``await fs.open_async(path)`` returns it.

    Args:
        file: The file that does the work, on a thread at a time.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Size of the file in bytes; of one that is being written, what was written so far."""
        return int(self._file.size)

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return bool(self._file.closed)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to another position, and return it; this asks for nothing."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position."""
        return int(self._file.tell())

    async def read(self, length: int | None = -1) -> bytes:
        """Read at most `length` bytes; all the rest if it is negative or None."""
        return bytes(await in_thread(self._file.read, length))

    async def write(self, data: Any) -> int:
        """Take all of `data`."""
        return int(await in_thread(self._file.write, data))

    async def close(self) -> None:
        """Close the file, which makes a written object visible."""
        await in_thread(self._file.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and hasattr(self._file, "abort"):
            await in_thread(self._file.abort)
        else:
            await self.close()
