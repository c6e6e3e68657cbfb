"""Samples that are objects: single ones, or groups with one stem (``ObjectSampleReader``); and samples that a function reads.

A user's function of a key is called in parallel in threads, ahead of the consumer (``FunctionReader``).
"""

from __future__ import annotations

import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import ClosedError
from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.formats.sample import NO_EXTENSION, member_of
from penstock.sources.readers import LocatedSample, PackedStrings, SampleReader, StoredReader
from penstock.store.threaded import Pool
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

    def __len__(self) -> int:
        return len(self._stores_of)

    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order."""
        if self._group_by is None:
            return iter(self._names)
        return (self._member(self._bounds[number])[0] for number in range(len(self)))

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

    read: ReadFunction
    number: int
    key: str
    fields: dict[str, memoryview] = field(default_factory=dict)
    error: BaseException | None = None
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Make the call, on a thread of a pool, unless it was cancelled."""
        if not self.is_cancelled:
            try:
                result = self.read(self.key)
                members = result if isinstance(result, Mapping) else {NO_EXTENSION: result}
                self.fields = {name: memoryview(value) for name, value in members.items()}
            except BaseException as error:
                self.error = error
            self.done.set()

    def cancel(self) -> None:
        """Cancel the call: it is not made unless it has already started, and its result is discarded."""
        self.is_cancelled = True
        self.done.set()


class CallStream:
    """Samples that a function reads, in the order of their numbers; calls run ahead of the consumer.

    Args:
        reader: The keys of the samples, and the function.
        pool: The threads that call the function.
        numbers: Numbers of the samples; pulled by the iterating thread.
        owns_pool: Whether the threads end with the stream.
    """

    def __init__(self, reader: FunctionReader, pool: Pool, numbers: Iterable[int], *, owns_pool: bool) -> None:
        self._reader = reader
        self._pool = pool
        self._numbers = iter(numbers)
        self._calls: deque[_Call] = deque()
        self._ahead_count = CALLS_AHEAD_PER_THREAD * pool.threads_max
        self._end = weakref.finalize(self, _end, self._calls, pool if owns_pool else None)

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
            call = _Call(self._reader.read, number, self._reader.keys[number])
            self._pool.put(call)
            calls.append(call)
        if not calls:
            raise StopIteration
        call = calls[0]
        call.done.wait()
        if call.is_cancelled:
            raise ClosedError("the source was closed while its samples were read")
        calls.popleft()
        if call.error is not None:
            raise failed(call.read, call.error, stage="read", sample_key=call.key) from call.error
        size_bytes = sum(map(len, call.fields.values()))
        return call.number, Sample(call.key, call.fields, 0, size_bytes), call.key

    def close(self) -> None:
        """Cancel the calls that have not started, and wait a while for the others; any thread may call this; idempotent."""
        _join(self._end() or ())


def _end(calls: deque[_Call], pool: Pool | None) -> list[threading.Thread]:
    """Cancel calls, and let the threads of a pool end."""
    for call in list(calls):
        call.cancel()
    return [] if pool is None else pool.end()


def _join(threads: Iterable[threading.Thread]) -> None:
    deadline_s = time.monotonic() + JOIN_S_MAX
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


class FunctionReader(SampleReader):
    """Samples that a user's function reads, one for each key.

    Args:
        source: The keys and the function.

    Attributes:
        read: The function.
        keys: The keys.
    """

    def __init__(self, source: Objects) -> None:
        assert source.read is not None
        self.read: ReadFunction = source.read
        self.keys = PackedStrings(source.urls)
        self._make_pool()

    def _make_pool(self) -> None:
        self._streams: weakref.WeakSet[CallStream] = weakref.WeakSet()
        self._pool = Pool(threads_max=THREADS_MAX, name="read-fn")
        self._end = weakref.finalize(self, self._pool.end)

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        return {"read": self.read, "keys": self.keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_pool()

    def read_batch(self, numbers: Sequence[int]) -> Iterator[NumberedSample]:
        """Read some samples, in the order of `numbers`."""
        return self.stream(numbers)

    def stream(self, numbers: Iterable[int], *, threads_count: int | None = None) -> CallStream:
        """Return a stream of samples in the order of `numbers`.

        Args:
            numbers: Numbers of the samples; pulled a little ahead of the reads.
            threads_count: Number of threads that call the function for this stream; None: the threads that all streams
                of the reader share.
        """
        pool = self._pool if threads_count is None else Pool(threads_max=threads_count, name="read-fn")
        stream = CallStream(self, pool, numbers, owns_pool=threads_count is not None)
        if threads_count is None:
            self._streams.add(stream)
        return stream

    def requests(self, number: int) -> Sequence[PlanItem]:
        """Return nothing, because the function reads."""
        del number
        return ()

    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order."""
        return iter(self.keys)

    def close(self) -> None:
        """Wait for running calls at most ``JOIN_S_MAX`` seconds, and end the threads; idempotent."""
        for stream in list(self._streams):
            stream.close()
        _join(self._end() or ())
