"""``PenstockFileSystem``: stores as an fsspec file system, and its registration.

The synchronous methods come from the layers below: ``moving.py``, ``contents.py``, ``listing.py`` and ``stores.py``. Here are
the coroutines, which leave the caller's event loop free. Each runs the synchronous method of its name on a thread of a small
pool; the engine does the reading and writing, many requests at a time, so a thread only waits. Reads of single objects and
ranges are the exception: libraries such as Zarr ask for thousands at once. Those that come in one turn of the event loop become
one ``read_many``, which reads neighbours together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fsspec import register_implementation

from penstock.config import check_names
from penstock.errors import ConfigError
from penstock.fetch import PlanItem
from penstock.fsspec.contents import read_each
from penstock.fsspec.moving import MovingFileSystem
from penstock.fsspec.options import OPEN_NAMES
from penstock.store.threaded import Pool
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from penstock.store.base import Store


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
        except BaseException as caught:  # the coroutine has to hear of any error
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
    """Collects the reads that coroutines request in one turn of an event loop, and makes them together."""

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
        self._reads: list[tuple[PlanItem, asyncio.Future[bytes]]] = []
        self._answers: deque[tuple[asyncio.Future[bytes], bytes, BaseException | None]] = deque()

    def add(self, key: str, span: ByteRange | None) -> asyncio.Future[bytes]:
        """Add a read; called in the event loop."""
        future = self.loop.create_future()
        self._reads.append((PlanItem(key, span), future))
        return future

    def run(self) -> None:
        """Make the reads that were not cancelled, on a thread of the pool."""
        futures: list[asyncio.Future[bytes]] = []

        def items() -> Iterator[PlanItem]:
            for item, future in self._reads:
                if not future.cancelled():
                    futures.append(future)
                    yield item

        with suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            try:
                for number, answer in read_each(self.store, items()):
                    self._answer(futures[number], answer)
            except BaseException as error:  # the coroutines have to hear of any error
                for _, future in self._reads:
                    self._answer(future, error)

    def _answer(self, future: asyncio.Future[bytes], answer: bytes | BaseException) -> None:
        """Hand an answer to the event loop, which is woken once for all answers that it has not taken yet."""
        self._answers.append((future, answer, None) if isinstance(answer, bytes) else (future, b"", answer))
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
        """Size of the file in bytes; while it is being written, the number of bytes written so far."""
        return int(self._file.size)

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return bool(self._file.closed)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to another offset, and return it; this sends no request."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the current offset."""
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


@boundary
class PenstockFileSystem(MovingFileSystem):
    """Object storage, directories and HTTP as a file system: ``penstock://s3/bucket/key``, ``penstock://file/tmp/x``, ...

    Every method raises penstock's errors, which inherit the exceptions that users of files catch: ``FileNotFoundError``,
    ``PermissionError``, ``FileExistsError``, ``ValueError``, ``OSError``. It may be used from any thread, from a forked
    child and, pickled, from another process.

    Args:
        asynchronous: Whether the caller uses the coroutines, such as ``_cat_file``; the other methods work, too, and block.
        loop: The event loop that fsspec's own functions use; None takes fsspec's.
        **options: Options of ``penstock.connect`` and of fsspec (``use_listings_cache``, ``skip_instance_cache``, ...), also
            under s3fs's names: ``key``, ``secret``, ``token``, ``anon``, ``client_kwargs``, ``config_kwargs``.

    Raises:
        ConfigError: An option is unknown, cannot be followed, or is given twice.

    Cost: no request; a store is connected to when the first path in it is used.
    """

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, **options: Any) -> None:
        super().__init__(asynchronous=asynchronous, loop=loop, **options)
        self._batches = ReadBatches()

    async def open_async(self, path: Any, mode: str = "rb", **options: Any) -> AsyncFile:
        """Open an object as a file whose methods are coroutines."""
        if "b" not in mode or options.get("compression"):
            raise ConfigError(f"open_async() opens binary files without compression, not mode={mode!r}")
        return AsyncFile(await in_thread(self.open, path, mode, **options))

    async def _cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Do what ``cat_file`` does; reads that come in one turn of the event loop are made together."""
        check_names("cat_file", options, OPEN_NAMES)
        if (start or 0) < 0 or (end or 0) < 0 or (start and end is None):
            return bytes(await in_thread(self.cat_file, path, start, end))
        store, where = self._place(path)
        span = None if end is None else ByteRange(start or 0, end)
        if span is not None and span.end <= span.start:
            return b""
        return await self._batches.read(store, where.key, span)


_COROUTINES = (
    "ls info exists isdir isfile find glob du size sizes expand_path checksum url cat cat_ranges get get_file pipe pipe_file "
    "put put_file copy cp_file rm rm_file mv_file touch mkdir makedirs rmdir"
)
for _name in _COROUTINES.split():
    setattr(PenstockFileSystem, f"_{_name}", as_coroutine(_name))


class PenstockS3FileSystem(PenstockFileSystem):
    """The same file system for paths that are all in S3: ``s3://bucket/key``. ``register("s3")`` registers it."""

    protocol: ClassVar[Any] = ("s3", "s3a")
    scheme: ClassVar[str] = "s3"

    def ls(self, path: Any, detail: bool = False, refresh: bool = False, **options: Any) -> list[Any]:
        """List a directory as the base class does, but names by default, as s3fs, whose protocol this is."""
        return super().ls(path, detail, refresh, **options)

    def split_path(self, path: Any) -> tuple[str, str, None]:
        """Return bucket, key and, because penstock reads the current version, None, as s3fs does."""
        where = self.locate(path)
        return where.base.rstrip("/"), where.key, None


# The installed package says this too; where it was installed before it did, importing this module is enough.
register_implementation("penstock", PenstockFileSystem)

_REGISTERED = {"penstock": PenstockFileSystem, "s3": PenstockS3FileSystem, "s3a": PenstockS3FileSystem}


@boundary
def register(protocol: str = "s3") -> None:
    """Have fsspec open URLs of a protocol with penstock, in this process: ``s3://`` and ``s3a://``, or ``penstock://``.

    fsspec finds ``penstock://`` by itself if penstock is installed. Call this before anything opens a URL of the protocol:
    files that another file system has opened stay with it. Processes that start from scratch have to register again; a pickled
    file system takes its class with it.

    Args:
        protocol: ``"s3"``, ``"s3a"`` or ``"penstock"``.

    Raises:
        ConfigError: The protocol is another one.
    """
    if protocol not in _REGISTERED:
        raise ConfigError(f"register({protocol!r}) must be given one of {', '.join(map(repr, _REGISTERED))}")
    register_implementation(protocol, _REGISTERED[protocol], clobber=True)
