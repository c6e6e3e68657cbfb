"""``SampleReader``: the samples of a source by number; and the base of the readers whose samples lie in stores.

A reader is set up once, in the process that opens the source, and is pickled to worker processes without connections.
It reads samples in two ways. ``read_batch`` reads a batch that is needed as a whole: its ranges are sorted, merged and
requested together, and samples come in the order of the requests. ``stream`` returns samples in the order of the
requested numbers, reads ahead, and needs bounded memory for any number of samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import deque
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.config import KIB, FetchConfig
from penstock.fetch import coalesce
from penstock.memory.ranges import REQUEST_COST_BYTES
from penstock.store.base import MultiStore
from penstock.store.traced import StoreStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from penstock.fetch import PlanItem
    from penstock.formats import Sample
    from penstock.store import Store


NumberedSample: TypeAlias = "tuple[int, Sample, str]"
"""The number of a sample in its source, the sample as stored, and the URL of its object or shard."""

LOCATED_COUNT = 64
"""Samples of a stream that are located together, so that the indexes of their shards are read side by side."""


class SampleStream(Protocol):
    """Samples in the order of the requested numbers, read ahead. One thread iterates; any thread may close."""

    def __iter__(self) -> Self:
        """Return the stream itself."""

    def __next__(self) -> NumberedSample:
        """Return the next sample; blocks until its bytes are there.

        Raises:
            StoreError, DataError: The sample cannot be read.
            ClosedError: The stream was closed in the meantime.
        """

    def close(self) -> None:
        """Cancel the reads in progress; idempotent."""


class SampleReader(ABC):
    """The samples of a source by number, from 0.

    Attributes:
        store: The store that holds the samples; None if a user's function reads them.
    """

    store: Store | None = None
    _by_key: dict[str, int] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read_batch(self, numbers: Sequence[int]) -> Iterator[NumberedSample]:
        """Read some samples, in the order that is fastest to read.

        Args:
            numbers: Numbers of the samples; each may occur once only.

        Raises:
            StoreError, DataError: A sample cannot be read.
        """

    @abstractmethod
    def stream(self, numbers: Iterable[int], *, threads_count: int | None = None) -> SampleStream:
        """Return a stream of samples in the order of `numbers`. Reading ahead starts when the first sample is taken.

        Args:
            numbers: Numbers of the samples; pulled a little ahead of the reads.
            threads_count: Number of threads that call a user's function for this stream; None: the threads that all
                streams of the reader share.
        """

    @abstractmethod
    def requests(self, number: int) -> Sequence[PlanItem]:
        """Return the requests of a stream for a sample; nothing if a user's function reads it."""

    @abstractmethod
    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order."""

    def find(self, key: str) -> int | None:
        """Return the number of the first sample with this key, or None. Cost: the first call reads all keys, and keeps them.

        Raises:
            ConfigError: The index has no keys, for example because it came from another tool.
        """
        if self._by_key is None:
            by_key: dict[str, int] = {}
            for number, each in enumerate(self.iter_keys()):
                by_key.setdefault(each, number)
            self._by_key = by_key
        return self._by_key.get(key)

    @abstractmethod
    def close(self) -> None:
        """Close stores and threads; idempotent."""


class LocatedSample(NamedTuple):
    """Where the bytes of a sample lie.

    Attributes:
        number: Number of the sample.
        items: The ranges to read.
        context: Data of the reader, from which it makes the sample.
    """

    number: int
    items: Sequence[PlanItem]
    context: Any


class StoredReader(SampleReader):
    """Base of the readers whose samples lie in stores, each in one range or several.

    Args:
        stores: The stores. If there are several, keys in ``LocatedSample`` are those of ``MultiStore``.
        gap_bytes: The widest gap that ``read_batch`` reads through; None: as wide as measurements say is worthwhile.
    """

    def __init__(self, stores: Sequence[Store], *, gap_bytes: int | None) -> None:
        self.stores = tuple(stores)
        self.store = stores[0] if len(stores) == 1 else MultiStore(stores)
        self._gap_bytes = gap_bytes

    @abstractmethod
    def located(self, numbers: Sequence[int]) -> list[LocatedSample]:
        """Return where the bytes of some samples lie."""

    @abstractmethod
    def made(self, located: LocatedSample, data: Sequence[memoryview]) -> NumberedSample:
        """Make a sample from the bytes of each of its items."""

    def read_batch(self, numbers: Sequence[int]) -> Iterator[NumberedSample]:
        """Read some samples, in the order of their ranges in the stores; nearby ranges are read by one request."""
        assert self.store is not None
        located = self.located(numbers)
        ranges = [
            RequestedRange(row, slot, item) for row, each in enumerate(located) for slot, item in enumerate(each.items)
        ]
        config = self.store.fetch_config or FetchConfig()
        reads = merged_reads(ranges, self.stores, config, gap_bytes=self._gap_bytes)
        arrived: dict[int, list[Any]] = {}  # by row: the ranges that have arrived, of samples with several ranges
        for blob in self.store.read_many([read.item for read in reads]):
            item, inside = reads[blob.request_index]
            start = item.span.start if item.span is not None else 0
            for row, slot, (_, span, *_) in inside:
                data = blob.data if span is None else blob.data[span.start - start : span.end - start]
                count = len(located[row].items)
                if count == 1:
                    yield self.made(located[row], (data,))
                    continue
                parts = arrived.setdefault(row, [None] * count)
                parts[slot] = data
                if None not in parts:
                    yield self.made(located[row], arrived.pop(row))

    def stream(self, numbers: Iterable[int], *, threads_count: int | None = None) -> StoredStream:
        """Return a stream of samples in the order of `numbers`; neighbours that lie near each other are read together."""
        del threads_count  # no function is called
        return StoredStream(self, numbers)

    def requests(self, number: int) -> Sequence[PlanItem]:
        """Return the requests of a stream for a sample."""
        return self.located([number])[0].items

    def close(self) -> None:
        """Close the stores; idempotent."""
        for store in self.stores:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_key": None}


class StoredStream:
    """Samples of a ``StoredReader`` in the order of their numbers, read ahead.

    Args:
        reader: The reader of the samples.
        numbers: Numbers of the samples; pulled by the iterating thread.
    """

    def __init__(self, reader: StoredReader, numbers: Iterable[int]) -> None:
        self._reader = reader
        self._numbers = iter(numbers)
        self._requested: deque[LocatedSample] = deque()
        self._blobs: Any = None
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NumberedSample:
        blobs = self._blobs
        if blobs is None:
            if self._closed:
                raise StopIteration
            assert self._reader.store is not None
            blobs = self._blobs = self._reader.store.read_many(self._items())
        blob = next(blobs)
        located = self._requested.popleft()
        if len(located.items) == 1:
            return self._reader.made(located, (blob.data,))
        return self._reader.made(located, [blob.data, *(next(blobs).data for _ in range(len(located.items) - 1))])

    def close(self) -> None:
        """Cancel the reads in progress; any thread may call this; idempotent."""
        self._closed = True
        if self._blobs is not None:
            self._blobs.close()

    def _items(self) -> Iterator[PlanItem]:
        while some := list(islice(self._numbers, LOCATED_COUNT)):
            for located in self._reader.located(some):
                self._requested.append(located)
                yield from located.items


class PackedStrings:
    """An immutable sequence of strings.

    Args:
        strings: The strings, in order.

    Cost: the bytes of each string as UTF-8, and 8 bytes more.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [each.encode("utf-8", "surrogateescape") for each in strings]
        self._block = b"".join(encoded)
        self._bounds = array("q", accumulate(map(len, encoded), initial=0))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> str:
        return self._block[self._bounds[index] : self._bounds[index + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


BREAK_EVEN_BYTES = 512 * KIB
"""The break-even gap before anything is measured, in bytes: the default of ``FetchConfig.gap_bytes_max``."""


class RequestedRange(NamedTuple):
    """One range of a sample.

    Attributes:
        row: Index of the sample in the batch.
        slot: Index of the range among those of the sample.
        item: The object and the range to read.
    """

    row: int
    slot: int
    item: PlanItem


class MergedRead(NamedTuple):
    """One request, and the ranges that it contains."""

    item: PlanItem
    ranges: list[RequestedRange]


def break_even_bytes(stores: Iterable[Store]) -> int:
    """Return the gap in bytes that takes as long to read, on one connection, as the next response takes to start.

    Args:
        stores: The stores to read from, which have measured both; the narrowest gap counts.

    Cost: a few medians of 512 numbers for each store.
    """
    return min(map(_break_even_bytes, stores))


def _break_even_bytes(store: Store) -> int:
    layer: Any = store
    while layer is not None:
        found = layer.statistics()
        if isinstance(found, StoreStatistics):
            product = found.first_byte_p50_s * found.body_p50_bytes_per_s
            return int(product) if math.isfinite(product) else BREAK_EVEN_BYTES
        layer = getattr(layer, "inner", None)
    return BREAK_EVEN_BYTES


def gap_worth_bytes(gaps: Sequence[int], *, others_count: int, break_even_bytes: int, requests_max: int) -> int:
    """Return the widest gap to read through, in bytes.

    Args:
        gaps: Numbers of bytes between neighbouring ranges of one object.
        others_count: Number of requests that are left if every gap is read through.
        break_even_bytes: The gap at which reading and a second request cost the same, on one connection.
        requests_max: Largest number of requests in flight at once.
    """
    surplus = len(gaps) + others_count - requests_max
    if surplus <= 0:
        return REQUEST_COST_BYTES
    if surplus <= len(gaps):
        break_even_bytes = min(break_even_bytes, sorted(gaps)[surplus - 1])
    return max(REQUEST_COST_BYTES, break_even_bytes)


def merged_reads(
    ranges: Sequence[RequestedRange], stores: Iterable[Store], config: FetchConfig, *, gap_bytes: int | None = None
) -> list[MergedRead]:
    """Return the requests for some ranges; together they read no byte twice.

    Args:
        ranges: The ranges in any order; an object that is read as a whole may occur once only.
        stores: The stores that hold the objects.
        config: Limits for reading the stores.
        gap_bytes: The widest gap to read through; None: as ``gap_worth_bytes`` says.
    """
    whole = [each for each in ranges if each.item.span is None]
    ordered = sorted((each.item.key, each.item.span, each) for each in ranges if each.item.span is not None)
    if gap_bytes is None:
        gaps = [after[1].start - before[1].end for before, after in pairwise(ordered) if before[0] == after[0]]
        is_few = len(ranges) <= config.requests_max  # the usual case, which needs no medians
        gap_bytes = gap_worth_bytes(
            gaps,
            others_count=len(ranges) - len(gaps),
            break_even_bytes=0 if is_few else break_even_bytes(stores),
            requests_max=config.requests_max,
        )
    wanted = [*whole, *(each for _, _, each in ordered)]
    items = [each.item._replace(request_index=index) for index, each in enumerate(wanted)]
    return [
        MergedRead(
            item._replace(cuts=(), request_index=0),
            [wanted[cut.request_index] for cut in item.cuts] or [wanted[item.request_index]],
        )
        for item in coalesce(items, gap_bytes=gap_bytes, length_bytes_max=config.part_bytes)
    ]
