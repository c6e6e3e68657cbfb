"""Lanes: the shards of one lane streamed end to end, and its samples permuted in runs.

A lane is a sequence of whole shards, read one after the other by one ``read_parts``, so that the end of a shard costs
no round trip. Runs are filled while the run before is handed out, one sample in for each one out: reading stays even,
and a lane never holds more than one run's worth of samples.
"""

from __future__ import annotations

import time
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import MIB, FetchConfig, default_budget_bytes
from penstock.fetch import PlanItem
from penstock.formats import Sample, detect, parser_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.fetch import Chunk
    from penstock.formats import Parser
    from penstock.loader.shards import Shard
    from penstock.loader.statistics import Meter
    from penstock.order import StreamOrder

READ_AHEAD_BYTES_MAX = 256 * MIB  # all lanes together; 128 requests of 0.7 MiB cover 30 ms at 2 GB/s
PART_BYTES_MIN = 256 * 1024
REQUESTS_MAX = 32  # of all lanes together, where there are few
REQUESTS_PER_LANE_MIN = 2
PARTS_PER_REQUEST = 3  # that `fetch` keeps for each request in flight: one on its way, two waiting


class Item(NamedTuple):
    """A sample on its way, and the shard that it came from."""

    sample: Sample
    shard: Shard
    size_bytes: int


class ReadAhead(NamedTuple):
    """How each lane reads: parts of this size, so many at a time."""

    part_bytes: int
    requests_max: int


def read_ahead(lanes_count: int, fetch: FetchConfig | None) -> ReadAhead:
    """Sizes with which all lanes' parts fit into a quarter of the byte budget.

    Few lanes read with many large requests each, many lanes with two small ones: the first batch of an epoch waits for
    one part of every lane.
    """
    fetch = fetch or FetchConfig()
    bytes_max = min(READ_AHEAD_BYTES_MAX, (fetch.budget_bytes_max or default_budget_bytes()) // 4)
    requests = min(fetch.requests_max, max(REQUESTS_PER_LANE_MIN, REQUESTS_MAX // max(lanes_count, 1)))
    part_bytes = bytes_max // (max(lanes_count, 1) * requests * PARTS_PER_REQUEST)
    return ReadAhead(max(PART_BYTES_MIN, min(part_bytes, fetch.part_bytes)), requests)


class LaneReader:
    """The samples of some shards, in stored order. Reading ahead begins at once.

    Args:
        shards: In reading order.
        sizes: See ``ReadAhead``.
        meter: Told of bytes, store and parse time.
    """

    def __init__(self, shards: Sequence[Shard], *, sizes: ReadAhead, meter: Meter) -> None:
        # usually one group; shards of several stores are read store by store
        self._groups = [list(group) for _, group in groupby(shards, key=attrgetter("store"))]
        self._sizes = sizes
        self._meter = meter
        self._chunks: Iterator[Chunk] | None = None
        self._group: list[Shard] = []
        self._index = -1
        self._parser: Parser | None = None
        self._closed = False
        self._open_next()

    def read(self) -> list[Item] | None:
        """The samples completed by the next chunk, perhaps none; None at the end.

        Raises:
            StoreError: as the store says.
            CorruptShardError: the shard is not of its format.
            ObjectChangedError: the shard is not the version that this job began with.
        """
        if self._chunks is None:
            return None
        began_s = time.perf_counter()
        chunk = next(self._chunks, None)
        self._meter.store_s += time.perf_counter() - began_s
        if chunk is None:
            items = self._end_shard()
            self._open_next()
            return items
        began_s = time.perf_counter()
        self._meter.bytes += len(chunk.data)
        items = []
        if chunk.request_index != self._index:
            items = self._end_shard()
            self._begin_shard(chunk)
        assert self._parser is not None
        items += self._items(self._parser.feed(chunk.data))
        if chunk.last:
            self._group[self._index].size_bytes = chunk.offset_bytes + len(chunk.data)
            items += self._end_shard()
        self._meter.parse_s += time.perf_counter() - began_s
        return items

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._closed = True
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()

    def _open_next(self) -> None:
        self._chunks = None
        if self._groups and not self._closed:
            self._group = self._groups.pop(0)
            self._index = -1
            self._chunks = self._group[0].store.read_parts(
                [PlanItem(shard.key, etag=shard.etag, size_bytes=shard.size_bytes) for shard in self._group],
                part_bytes=self._sizes.part_bytes,
                requests_max=self._sizes.requests_max,
            )

    def _begin_shard(self, chunk: Chunk) -> None:
        self._index = chunk.request_index
        shard = self._group[self._index]
        if shard.etag is None:
            shard.etag = chunk.etag  # later epochs read this version, or fail
        name = detect(shard.url, bytes(chunk.data[:512]))
        self._parser = parser_of(name, shard=shard.url)

    def _end_shard(self) -> list[Item]:
        parser, self._parser = self._parser, None
        if parser is None:
            return []
        return self._items(parser.finish())

    def _items(self, samples: list[Sample]) -> list[Item]:
        shard = self._group[self._index]
        return [Item(sample, shard, sum(map(len, sample.fields.values()))) for sample in samples]


class Pins:
    """Bytes of parts that waiting samples keep from being reused. Beyond the bound samples are copied out."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class Lane:
    """The samples of one lane in the order in which they leave it.

    Args:
        number: Of the lane.
        order: Says how long its runs are, and permutes them.
        reader: Gives its samples in stored order.
        pins: Shared by all lanes of this rank.
    """

    def __init__(self, number: int, *, order: StreamOrder, reader: LaneReader, pins: Pins) -> None:
        self.number = number
        self.taken_count = 0
        self._order = order
        self._reader = reader
        self._pins = pins
        self._waiting: list[Item] = []  # parsed, reversed: the next one is last
        self._leaving: list[Item] = []  # the run being handed out, reversed
        self._filling: list[Item] = []
        self._leaving_pinned_bytes = 0
        self._filling_pinned_bytes = 0
        self._run_index = 0
        self._run_length = order.run_length(number, 0)  # of the run being filled

    def take(self) -> Item | None:
        """The next sample, or None when the lane is empty. Blocks while bytes are on their way."""
        if not self._order.shuffled:
            item = self._next()
        else:
            if not self._leaving:
                self._turn_over()
            item = self._leaving.pop() if self._leaving else None
            if item is not None:
                self._fill_one()
        if item is not None:
            self.taken_count += 1
        return item

    def _turn_over(self) -> None:
        """Complete the run being filled, and begin to hand it out."""
        while len(self._filling) < self._run_length and self._fill_one():
            pass
        self._pins.held_bytes -= self._leaving_pinned_bytes
        self._leaving_pinned_bytes, self._filling_pinned_bytes = self._filling_pinned_bytes, 0
        run, self._filling = self._filling, []
        permuted = self._order.permute_run(self.number, self._run_index, len(run))
        self._leaving = [run[index] for index in reversed(permuted)]
        self._run_index += 1
        self._run_length = self._order.run_length(self.number, self._run_index)

    def _fill_one(self) -> bool:
        """Read one more sample into the next run, unless it is complete; False when there is none."""
        if len(self._filling) >= self._run_length:
            return True
        item = self._next()
        if item is None:
            return False
        if self._pins.held_bytes + item.size_bytes > self._pins.bytes_max:
            fields = {name: memoryview(bytes(value)) for name, value in item.sample.fields.items()}
            item = item._replace(sample=Sample(item.sample.key, fields, item.sample.offset_bytes))
        else:
            self._pins.held_bytes += item.size_bytes
            self._filling_pinned_bytes += item.size_bytes
        self._filling.append(item)
        return True

    def _next(self) -> Item | None:
        while not self._waiting:
            items = self._reader.read()
            if items is None:
                return None
            self._waiting = items[::-1]
        return self._waiting.pop()
