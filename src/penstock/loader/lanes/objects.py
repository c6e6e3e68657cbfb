"""Samples that are objects of their own: read in the order in which they leave, so that nothing waits in a run.

Any object can be read by itself, so the whole permutation of an epoch is free: no window is held. Requests run ahead of
the consumer across batches, as many as ``fetch`` keeps in flight.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ClosedError
from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.loader.lanes.feed import SampleBlock
from penstock.loader.position import IndexPosition
from penstock.store.multi import MultiStore
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.loader.lanes.segments import SampleSource, SourcedSamples
    from penstock.loader.position import LanePosition
    from penstock.loader.statistics import Meter
    from penstock.order import IndexedOrder
    from penstock.pipeline import Objects
    from penstock.sources.shards import Shard
    from penstock.store import Store

LOCATED_COUNT = 4096
"""Positions that are located at once."""

CALLS_AHEAD_PER_THREAD = 4
JOIN_S_MAX = 5.0


class ObjectSampleSource(NamedTuple):
    """Where an object's sample came from: what ``SampleSource`` asks."""

    url: str
    source: int


class _Group(NamedTuple):
    """One sample: its key, where its members lie in ``ObjectSource.store``, and what to call it."""

    key: str
    members: Sequence[tuple[str, PlanItem]]
    url: str


class ObjectSource:
    """The samples of a source of objects.

    Args:
        shards: The objects, as listed; empty where the user's function reads.
        source: As the pipeline describes it.
        number: Of the source, in a mix.

    Attributes:
        groups: The samples, in stored order.
        store: That they lie in; None where the user's function reads.
    """

    def __init__(self, shards: Sequence[Shard], source: Objects, *, number: int) -> None:
        self.number = number
        self.read = source.read
        self.store: Store | None = None
        if source.read is not None:
            self.groups = [_Group(url, (), url) for url in source.urls]
            return
        self.groups = []
        runs = [(store, list(run)) for store, run in groupby(shards, key=attrgetter("store"))]
        self.store = runs[0][0] if len(runs) == 1 else MultiStore([store for store, _ in runs])
        for at, (_, run) in enumerate(runs):
            prefix = "" if len(runs) == 1 else f"{at}/"
            listed = _named(run)
            for found in group_objects(listed, group_by=source.group_by):
                members = [(field, listed[key]) for field, key in found.members.items()]
                items = [
                    (name, PlanItem(prefix + each.key, None, each.listed_etag, each.listed_size_bytes))
                    for name, each in members
                ]
                self.groups.append(_Group(found.key, items, members[0][1].url))

    def __len__(self) -> int:
        return len(self.groups)

    def samples(self, numbers: Iterator[int], *, meter: Meter, threads_count: int) -> ObjectReader | CallReader:
        """Those with these numbers, in this order; reading ahead begins with the first ``next``."""
        if self.read is not None:
            return CallReader(self, numbers, meter=meter, threads_count=threads_count)
        return ObjectReader(self, numbers, meter=meter)


def _named(shards: Sequence[Shard]) -> dict[str, Shard]:
    """Objects by the name that their sample's key and field come from: without the query of a URL, which may be a signature."""
    named: dict[str, Shard] = {}
    for shard in shards:
        name = shard.key
        if "?" in name:
            name = shard.url.removeprefix(shard.store.describe(""))
            name += f"#{len(named)}" if name in named else ""  # where the query tells one object from another
        named[name] = shard
    return named


class ObjectReader:
    """Samples that are objects of stores, read ahead.

    Args:
        source: Whose.
        numbers: Of the samples, in order.
        meter: Told of bytes and seconds.
    """

    def __init__(self, source: ObjectSource, numbers: Iterator[int], *, meter: Meter) -> None:
        self._source = source
        self._meter = meter
        self._asked: deque[_Group] = deque()
        self._numbers = numbers
        self._blobs: Any = None
        self._closed = False

    def next(self) -> tuple[Sample, SampleSource] | None:
        """The next sample; None at the end. Blocks for bytes.

        Raises:
            StoreError: an object cannot be read.
        """
        if self._blobs is None:
            if self._closed:
                return None
            assert self._source.store is not None
            self._blobs = self._source.store.read_many(self._requests())
        return self._take()

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._closed = True
        close = getattr(self._blobs, "close", None)
        if close is not None:
            close()

    def _requests(self) -> Iterator[PlanItem]:
        """Pulled by the iterating thread, a little ahead."""
        for number in self._numbers:
            group = self._source.groups[number]
            self._asked.append(group)
            for _, item in group.members:
                yield item

    def _take(self) -> tuple[Sample, SampleSource] | None:
        began_s = time.perf_counter()
        blob = next(self._blobs, None)
        if blob is None:
            return None
        group = self._asked.popleft()
        fields = {group.members[0][0]: blob.data}
        for name, _ in group.members[1:]:
            fields[name] = next(self._blobs).data
        size_bytes = sum(map(len, fields.values()))
        self._meter.bytes += size_bytes
        self._meter.store_s += time.perf_counter() - began_s
        return Sample(group.key, fields, 0, size_bytes), ObjectSampleSource(group.url, self._source.number)


class CallReader:
    """Samples that the user's own function reads, called in threads, some ahead; given in order.

    Args:
        source: Whose.
        numbers: Of the samples, in order.
        meter: Told of bytes and seconds.
        threads_count: Calls at the same time.
    """

    def __init__(self, source: ObjectSource, numbers: Iterator[int], *, meter: Meter, threads_count: int) -> None:
        assert source.read is not None
        self._source = source
        self._read: Callable[[str], bytes | Mapping[str, bytes]] = source.read
        self._numbers = numbers
        self._meter = meter
        self._waiting: deque[_Call] = deque()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads_count = threads_count
        self._threads: list[threading.Thread] = []
        self._closed = False

    def next(self) -> tuple[Sample, SampleSource] | None:
        """The next sample; None at the end. Blocks for the function.

        Raises:
            DecodeError: the function failed; ``__cause__`` is what it raised.
            ClosedError: closed meanwhile.
        """
        if not self._threads and not self._closed:
            for index in range(self._threads_count):
                thread = threading.Thread(target=self._work, name=f"penstock-read-fn-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        while len(self._waiting) < CALLS_AHEAD_PER_THREAD * self._threads_count:
            number = next(self._numbers, None)
            if number is None:
                break
            call = _Call(self._source.groups[number].key)
            self._waiting.append(call)
            self._calls.put(call)
        if not self._waiting:
            return None
        call = self._waiting.popleft()
        began_s = time.perf_counter()
        call.done.wait()
        self._meter.store_s += time.perf_counter() - began_s
        if self._closed:
            raise ClosedError("the loader was closed while it was iterated")
        if call.error is not None:
            raise failed(self._read, call.error, stage="read", sample_key=call.key) from call.error
        size_bytes = sum(map(len, call.fields.values()))
        self._meter.bytes += size_bytes
        return Sample(call.key, call.fields, 0, size_bytes), ObjectSampleSource(call.key, self._source.number)

    def close(self) -> None:
        """Call no more, and wait for calls under way, but not for ever; idempotent."""
        self._closed = True
        for call in list(self._waiting):
            call.done.set()
        for _ in self._threads:
            self._calls.put(None)
        deadline_s = time.monotonic() + JOIN_S_MAX
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed:
            try:
                found = self._read(call.key)
                members = found if isinstance(found, Mapping) else {"data": found}
                call.fields = {name: memoryview(value) for name, value in members.items()}
            except BaseException as error:
                call.error = error
            call.done.set()


class _Call:
    """One call of a user's function."""

    __slots__ = ("done", "error", "fields", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self.fields: dict[str, memoryview] = {}
        self.error: BaseException | None = None
        self.done = threading.Event()


class ObjectsFeed:
    """A rank's samples where all are objects: one reading for all lanes, in the order of positions.

    Args:
        source: Of the samples.
        order: Of the epoch.
        positions: The rank's.
        meter: Told of bytes and seconds.
        threads_count: For the user's function.
    """

    def __init__(
        self, source: ObjectSource, *, order: IndexedOrder, positions: range, meter: Meter, threads_count: int
    ) -> None:
        self._positions = positions
        self._given_count = 0
        self._reader = source.samples(located(order, positions), meter=meter, threads_count=threads_count)

    def take(self, count: int) -> SampleBlock | None:
        """See ``Feed``."""
        samples: list[Sample] = []
        origins: list[SampleSource] = []
        while len(samples) < count and (item := self._reader.next()) is not None:
            samples.append(item[0])
            origins.append(item[1])
        if not samples:
            return None
        begin = self._given_count
        self._given_count += len(samples)
        positions = np.array(self._positions[begin : self._given_count], dtype=np.int64)
        return SampleBlock(samples, origins, positions)

    def mark(self) -> IndexPosition:
        """See ``Feed``."""
        left = len(self._positions) - self._given_count
        return IndexPosition(self._positions[self._given_count] if left else self._positions.stop)

    def close(self) -> None:
        """See ``Feed``."""
        self._reader.close()


def located(order: IndexedOrder, positions: range) -> Iterator[int]:
    """Which shard of one sample lies at each of a rank's positions."""
    lanes_count = order.lanes_count
    for begin in range(0, len(positions), LOCATED_COUNT):
        part = np.array(positions[begin : begin + LOCATED_COUNT], dtype=np.int64)
        rows, lanes = np.divmod(part, lanes_count)
        found = np.empty_like(part)
        for lane in np.unique(lanes).tolist():
            here = np.flatnonzero(lanes == lane)
            first = int(rows[here[0]])
            leaving = order.leaving(lane, first, int(rows[here[-1]]) - first + 1)
            found[here] = leaving.shards[rows[here] - first]
        yield from found.tolist()


class ObjectLane:
    """One lane of objects, for a mix with other sources: as ``Lane``.

    Args:
        source: Of the samples.
        order: Of the source's current pass.
        lane: In that order.
        taken: Samples that left it before.
        meter: Told of bytes and seconds.
        threads_count: For the user's function.
    """

    def __init__(
        self, source: ObjectSource, *, order: IndexedOrder, lane: int, taken: int, meter: Meter, threads_count: int
    ) -> None:
        self.number = lane
        numbers = (order.leaving(lane, first, 64).shards for first in range(taken, order.lane_length(lane), 64))
        flat = (number % len(source) for part in numbers for number in part.tolist())
        self._reader = source.samples(flat, meter=meter, threads_count=threads_count)
        self._ready: deque[tuple[Sample, SampleSource]] = deque()

    def prepare(self, count: int) -> int:
        """As ``Lane.prepare``."""
        while len(self._ready) < count and (item := self._reader.next()) is not None:
            self._ready.append(item)
        return len(self._ready)

    def take(self, count: int) -> SourcedSamples:
        """As ``Lane.take``."""
        items = [self._ready.popleft() for _ in range(count)]
        return [sample for sample, _ in items], [origin for _, origin in items]

    def mark(self) -> LanePosition:
        """Not asked: where it is follows from the position."""
        raise ClosedError("a lane of objects keeps no marks")

    @property
    def is_waiting(self) -> bool:
        """Never: there is no run to be filled."""
        return False

    def read_more(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """As ``Lane.close``."""
        self._reader.close()
