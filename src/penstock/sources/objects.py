"""``ObjectSampleReader``: samples that are objects of their own, or groups of objects with one stem."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import ClosedError
from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.formats.sample import NO_EXTENSION, member_of
from penstock.sources.readers import LocatedSample, PackedStrings, StoredReader
from penstock.system import forks
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from penstock.pipeline import Objects
    from penstock.sources.readers import NumberedSample
    from penstock.sources.shards import Shard
    from penstock.store import Store


class ObjectSampleReader(StoredReader):
    """Objects, or groups of objects, in the order in which they were listed, and in the versions that were listed.

    Names and versions are kept in blocks of memory and not as Python objects: each costs the bytes of its name and about
    50 bytes more.

    Args:
        source: The source as the pipeline describes it.
        shards: Objects of the source, as listed.
    """

    def __init__(self, source: Objects, shards: Sequence[Shard]) -> None:
        stores: list[Store] = []
        objects: list[Shard] = []
        names: list[str] = []
        bounds, stores_of = [0], []
        self._group_by = source.group_by
        for store, run in groupby(shards, key=attrgetter("store")):
            stores.append(store)
            listed = _by_name(run)
            for group in group_objects(listed, group_by=source.group_by):
                names += group.members.values()
                objects += [listed[name] for name in group.members.values()]
                bounds.append(len(objects))
                stores_of.append(len(stores) - 1)
        super().__init__(stores, gap_bytes=0)
        self._bounds = array("q", bounds)
        self._stores_of = array("I", stores_of)
        self._keys = PackedStrings(each.key for each in objects)
        is_named_by_key = all(name == each.key for name, each in zip(names, objects, strict=True))
        self._names = self._keys if is_named_by_key else PackedStrings(names)
        self._etags = PackedStrings(each.listed_etag or "" for each in objects)
        self._sizes = array("q", [-1 if each.listed_size_bytes is None else each.listed_size_bytes for each in objects])
        self._by_key: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._stores_of)

    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order."""
        if self._group_by is None:
            return iter(self._names)
        return (self._member(self._bounds[number])[0] for number in range(len(self)))

    def find(self, key: str) -> int | None:
        """Return the number of the first sample with this key, or None. Cost: the first call makes a dict of all keys."""
        if self._by_key is None:
            by_key: dict[str, int] = {}
            for number, each in enumerate(self.iter_keys()):
                by_key.setdefault(each, number)
            self._by_key = by_key
        return self._by_key.get(key)

    def located(self, numbers: Sequence[int]) -> list[LocatedSample]:
        """Return where the bytes of some samples lie."""
        return [self._located(number) for number in numbers]

    def made(self, located: LocatedSample, data: Sequence[memoryview]) -> NumberedSample:
        """Make a sample from the bytes of its objects."""
        number, items, (key, fields) = located
        assert self.store is not None
        if len(data) == 1:
            return number, Sample(key, {fields[0]: data[0]}, 0, len(data[0])), self.store.describe(items[0].key)
        members = dict(zip(fields, data, strict=True))
        return number, Sample(key, members, 0, sum(map(len, data))), self.store.describe(items[0].key)

    def _located(self, number: int) -> LocatedSample:
        row, stop = self._bounds[number], self._bounds[number + 1]
        prefix = "" if len(self.stores) == 1 else f"{self._stores_of[number]}/"
        key, field = self._member(row)
        if stop == row + 1:
            return LocatedSample(number, (self._item(row, prefix),), (key, (field,)))
        fields = [self._member(each)[1] for each in range(row, stop)]
        return LocatedSample(number, [self._item(each, prefix) for each in range(row, stop)], (key, fields))

    def _member(self, row: int) -> tuple[str, str]:
        """Return the key of the sample that an object belongs to, and the object's field in it."""
        member = member_of(self._names[row], self._group_by)
        assert member is not None  # objects without a group were left out
        return member

    def _item(self, row: int, prefix: str) -> PlanItem:
        size_bytes = self._sizes[row]
        return PlanItem(
            prefix + self._keys[row], None, self._etags[row] or None, size_bytes if size_bytes >= 0 else None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_key": None}


def _by_name(objects: Any) -> dict[str, Shard]:
    """Return objects by the name from which key and field follow: without the query of a URL, which may be a signature."""
    named: dict[str, Shard] = {}
    for each in objects:
        name = each.key
        if "?" in name:
            name = each.url.removeprefix(each.store.describe(""))
            name += f"#{len(named)}" if name in named else ""  # only the query distinguishes the objects
        named[name] = each
    return named


ReadFunction: TypeAlias = "Callable[[str], bytes | Mapping[str, bytes]]"

THREADS_MAX = 32
"""Number of simultaneous calls over all streams that share the threads; it is large because calls mostly wait."""

CALLS_AHEAD_PER_THREAD = 4
JOIN_S_MAX = 5.0


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    """One call of the function. When ``done`` is set, it has fields or an error, or it is cancelled."""

    number: int
    key: str
    fields: dict[str, memoryview] = field(default_factory=dict)
    error: BaseException | None = None
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Cancel the call: it is not made unless it has already started, and its result is discarded."""
        self.is_cancelled = True
        self.done.set()


class CallThreads:
    """Threads that call a function. Every call starts another thread, up to `threads_max`.

    Args:
        read: The user's function, which takes a key and returns bytes, or the bytes of each field.
        threads_max: Largest number of threads.
    """

    def __init__(self, read: ReadFunction, threads_max: int) -> None:
        self.read = read
        self.threads_max = threads_max
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, number: int, key: str) -> _Call:
        """Schedule a call of the function.

        Args:
            number: Number of the sample.
            key: The key to call the function with.

        Returns:
            The call, which a thread makes.

        Raises:
            ClosedError: The threads were closed.
        """
        call = _Call(number, key)
        with self._lock:
            if self._closed:
                raise _closed()
            self._calls.put(call)
            if len(self._threads) < self.threads_max:
                self._start_one()
        return call

    def close(self) -> None:
        """Cancel waiting calls, and wait for running ones at most ``JOIN_S_MAX`` seconds; idempotent."""
        with self._lock:
            self._closed = True
        with suppress(Empty):
            while (call := self._calls.get_nowait()) is not None:
                call.cancel()
        self._end_threads()
        deadline_s = time.monotonic() + JOIN_S_MAX
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def __del__(self) -> None:
        if hasattr(self, "_threads"):  # the threads refer to the queue only, so they end with the last reader
            self._end_threads()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _start_one(self) -> None:
        name = f"penstock-read-fn-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._calls, self.read), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)


def _work(calls: SimpleQueue[_Call | None], read: ReadFunction) -> None:
    """Make the calls in the queue until it holds None."""
    while (call := calls.get()) is not None:
        if call.is_cancelled:
            continue
        try:
            result = read(call.key)
            members = result if isinstance(result, Mapping) else {NO_EXTENSION: result}
            call.fields = {name: memoryview(value) for name, value in members.items()}
        except BaseException as error:
            call.error = error
        call.done.set()
        del call  # do not keep its bytes while the thread waits for the next call


class CallStream:
    """Samples that a function reads, in the order of their numbers; calls run ahead of the consumer.

    Args:
        threads: The threads that call the function.
        keys: The key of each sample.
        numbers: Numbers of the samples; pulled by the iterating thread.
        owns_threads: Whether the threads end with the stream.
    """

    def __init__(
        self, threads: CallThreads, keys: PackedStrings, numbers: Iterable[int], *, owns_threads: bool
    ) -> None:
        self._threads = threads
        self._keys = keys
        self._numbers = iter(numbers)
        self._owns_threads = owns_threads
        self._calls: deque[_Call] = deque()
        self._ahead_count = CALLS_AHEAD_PER_THREAD * threads.threads_max

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NumberedSample:
        """Return the next sample; blocks until the function has returned it.

        Raises:
            DecodeError: The function failed; ``__cause__`` is the original error.
            ClosedError: The stream was closed in the meantime.
        """
        calls = self._calls
        while len(calls) < self._ahead_count and (number := next(self._numbers, None)) is not None:
            calls.append(self._threads.submit(number, self._keys[number]))
        if not calls:
            raise StopIteration
        call = calls[0]
        call.done.wait()
        if call.is_cancelled:
            raise _closed()
        calls.popleft()
        if call.error is not None:
            raise failed(self._threads.read, call.error, stage="read", sample_key=call.key) from call.error
        size_bytes = sum(map(len, call.fields.values()))
        return call.number, Sample(call.key, call.fields, 0, size_bytes), call.key

    def close(self) -> None:
        """Cancel the calls that have not started; any thread may call this; idempotent."""
        for call in list(self._calls):
            call.cancel()
        if self._owns_threads:
            self._threads.close()

    def __del__(self) -> None:
        if hasattr(self, "_calls"):
            for call in self._calls:
                call.cancel()


class FunctionReader:
    """Samples that a user's function reads, one for each key; a ``SampleReader``.

    Args:
        source: The keys and the function.
    """

    store: Store | None = None

    def __init__(self, source: Objects) -> None:
        assert source.read is not None
        self._read: ReadFunction = source.read
        self._keys = PackedStrings(source.urls)
        self._by_key: dict[str, int] | None = None
        self._make_threads()

    def _make_threads(self) -> None:
        self._threads = CallThreads(self._read, THREADS_MAX)
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Replace the threads, which are the parent's."""
        self._make_threads()

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": None, "_by_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_threads()

    def read_batch(self, numbers: Sequence[int]) -> Iterator[NumberedSample]:
        """Read some samples, in the order of `numbers`."""
        return self.stream(numbers)

    def stream(self, numbers: Iterable[int], *, threads_count: int | None = None) -> CallStream:
        """Return a stream of samples in the order of `numbers`.

        Args:
            numbers: Numbers of the samples; pulled a little ahead of what is read.
            threads_count: Number of threads that call the function for this stream; None: the threads that all streams
                of the reader share.
        """
        if threads_count is None:
            return CallStream(self._threads, self._keys, numbers, owns_threads=False)
        return CallStream(CallThreads(self._read, threads_count), self._keys, numbers, owns_threads=True)

    def requests(self, number: int) -> Sequence[PlanItem]:
        """Return nothing, because the function reads."""
        del number
        return ()

    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order."""
        return iter(self._keys)

    def find(self, key: str) -> int | None:
        """Return the number of the first sample with this key, or None. Cost: the first call makes a dict of all keys."""
        if self._by_key is None:
            self._by_key = {key: number for number, key in reversed(list(enumerate(self._keys)))}
        return self._by_key.get(key)

    def close(self) -> None:
        """Wait for running calls at most ``JOIN_S_MAX`` seconds, and end the threads; idempotent."""
        self._threads.close()


def _closed() -> ClosedError:
    return ClosedError("the source was closed while its samples were read")
