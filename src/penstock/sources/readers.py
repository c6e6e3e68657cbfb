"""Where samples lie that are asked for by number: objects, indexed shards, or whatever a function of a key reads.

Looked up once, in the process that opens the data set, and carried to workers: names and versions are kept as blocks of
bytes, so that a million of them cost their bytes and not a million objects, which fork would copy page by page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.index import SampleMap
from penstock.sources.merging import Piece, merged
from penstock.sources.packed_strings import Names
from penstock.sources.selecting import gap_bytes_of, may_pay, wanted_spans
from penstock.store.multi import MultiStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.config import FetchConfig
    from penstock.index import Lookup
    from penstock.pipeline import Objects
    from penstock.sources.shards import Shard
    from penstock.store import Store
    from penstock.types import ByteRange

LOCATED_COUNT = 64
"""Numbers of a stream that are looked up at once: their shards' indexes are read side by side."""


class Fetched(NamedTuple):
    """A sample as stored, and where it is from."""

    sample: Sample
    url: str


class Places(Protocol):
    """Samples by number. Pickles to worker processes as what was found, without connections."""

    def __len__(self) -> int:
        """Samples."""

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Fetched]]:
        """Different samples, all of them wanted: (index in `numbers`, sample), in the order that reads best.

        Raises:
            StoreError, DataError: as the store and the format say.
        """

    def stream(self, numbers: Iterable[int]) -> Iterator[tuple[int, Fetched]]:
        """(number, sample) in this order, read ahead of the consumer.

        Raises:
            StoreError, DataError: as the store and the format say.
        """

    def find(self, key: str) -> int | None:
        """Number of the first sample with this key. Cost: all keys are read and kept, the first time."""

    def close(self) -> None:
        """End the use of stores and threads; idempotent."""


class StoredPlaces(ABC):
    """Samples whose bytes lie in stores, each in one piece or several.

    Args:
        stores: That they lie in.
        config: How they read; each was connected with it.
        gap_bytes: The widest gap to read through; None: as the stores are measured.
    """

    def __init__(self, stores: Iterable[Store], config: FetchConfig, *, gap_bytes: int | None) -> None:
        self._stores = MultiStore(list(stores))
        self._config = config
        self._gap_bytes = gap_bytes

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def _located(self, numbers: Sequence[int]) -> list[list[PlanItem]]:
        """Where each sample's pieces lie, by the keys of ``MultiStore``."""

    @abstractmethod
    def _made(self, number: int, data: Sequence[memoryview]) -> Fetched:
        """A sample, of its pieces."""

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Fetched]]:
        """See ``Places``."""
        located = self._located(numbers)
        pieces = [Piece(row, slot, item) for row, items in enumerate(located) for slot, item in enumerate(items)]
        held: dict[int, list[Any]] = {}  # of samples in several pieces, those that are here
        reads = merged(pieces, self._stores.stores, self._config, gap_bytes=self._gap_bytes)
        for blob in self._stores.read_many([read.item for read in reads]):
            item, inside = reads[blob.request_index]
            begin = item.span.start if item.span is not None else 0
            for row, slot, (_, span, *_) in inside:
                data = blob.data if span is None else blob.data[span.start - begin : span.end - begin]
                count = len(located[row])
                if count == 1:
                    yield row, self._made(numbers[row], (data,))
                    continue
                parts = held.setdefault(row, [None] * count)
                parts[slot] = data
                if None not in parts:
                    yield row, self._made(numbers[row], held.pop(row))

    def stream(self, numbers: Iterable[int]) -> Iterator[tuple[int, Fetched]]:
        """See ``Places``. What adjoins, or nearly, is read as one; nothing is sorted."""
        asked: deque[tuple[int, int]] = deque()  # number and pieces of each sample that was pulled
        blobs = self._stores.read_many(self._requests(numbers, asked))
        for blob in blobs:
            number, count = asked.popleft()
            yield number, self._made(number, [blob.data, *(next(blobs).data for _ in range(count - 1))])

    def _requests(self, numbers: Iterable[int], asked: deque[tuple[int, int]]) -> Iterator[PlanItem]:
        for some in _blocks(numbers):
            for number, items in zip(some, self._located(some), strict=True):
                asked.append((number, len(items)))
                yield from items

    @property
    def stores(self) -> Sequence[Store]:
        """All that the samples lie in."""
        return self._stores.stores

    def close(self) -> None:
        """See ``Places``."""
        self._stores.close()


def _blocks(numbers: Iterable[int]) -> Iterator[list[int]]:
    numbers = iter(numbers)
    while some := list(islice(numbers, LOCATED_COUNT)):
        yield some


class ObjectPlaces(StoredPlaces):
    """Objects, or groups of them with one stem, in the ``Loader``'s stored order; of the versions that were listed.

    Args:
        source: As described.
        shards: The objects, as listed.
        config: See ``StoredPlaces``.
    """

    def __init__(self, source: Objects, shards: Iterable[Shard], config: FetchConfig) -> None:
        self._group_by = source.group_by
        stores: list[Store] = []
        found: list[Shard] = []
        first, store_of = [0], []
        for store, run in groupby(shards, key=attrgetter("store")):
            stores.append(store)
            by_key = {each.key: each for each in run}
            for group in group_objects(by_key, group_by=source.group_by):
                found += [by_key[key] for key in group.members.values()]
                first.append(len(found))
                store_of.append(len(stores) - 1)
        super().__init__(stores, config, gap_bytes=0)
        self._first = np.array(first, dtype=np.int64)
        self._store_of = np.array(store_of, dtype=np.uint32)
        self._names = Names(each.key for each in found)
        self._etags = Names(each.etag or "" for each in found)
        self._sizes = np.array([-1 if each.size_bytes is None else each.size_bytes for each in found], dtype=np.int64)
        self._by_key: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._store_of)

    def find(self, key: str) -> int | None:
        """See ``Places``."""
        if self._by_key is None:
            by_key: dict[str, int] = {}
            for number in range(len(self)):
                by_key.setdefault(self._group(number)[0], number)
            self._by_key = by_key
        return self._by_key.get(key)

    def _located(self, numbers: Sequence[int]) -> list[list[PlanItem]]:
        return [[self._item(row, self._store_of[number]) for row in self._rows(number)] for number in numbers]

    def _made(self, number: int, data: Sequence[memoryview]) -> Fetched:
        key, fields, name = self._group(number)
        url = self._stores.describe(f"{self._store_of[number]}/{name}")
        return Fetched(Sample(key, dict(zip(fields, data, strict=True)), 0), url)

    def _group(self, number: int) -> tuple[str, Iterable[str], str]:
        """A sample's key, its fields, and its first object."""
        names = [self._names[row] for row in self._rows(number)]
        group = group_objects(names, group_by=self._group_by)[0]
        return group.key, group.members, names[0]

    def _rows(self, number: int) -> range:
        return range(int(self._first[number]), int(self._first[number + 1]))

    def _item(self, row: int, store: int) -> PlanItem:
        size_bytes = int(self._sizes[row])
        etag = self._etags[row] or None
        return PlanItem(f"{store}/{self._names[row]}", etag=etag, size_bytes=size_bytes if size_bytes >= 0 else None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_key": None}


class ShardPlaces(StoredPlaces):
    """Samples inside shards, by their index; of the versions that were indexed.

    Args:
        known: What the index says; complete.
        fields: Members that are wanted; None: all.
        config: See ``StoredPlaces``.
        gap_bytes: See there.

    Raises:
        ConfigError: a shard is not indexed, or of a format that cannot be entered at a sample.
    """

    def __init__(
        self, known: Lookup, config: FetchConfig, *, fields: frozenset[str] | None, gap_bytes: int | None
    ) -> None:
        numbers: dict[Store, int] = {}
        self._keys = [
            f"{numbers.setdefault(found.shard.store, len(numbers))}/{found.shard.key}" for found in known.found
        ]
        super().__init__(numbers, config, gap_bytes=gap_bytes)
        self._known = known
        self._fields = fields
        self._map = SampleMap(known)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map = SampleMap(self._known)  # shards' own indexes are read again, those that are needed

    def __len__(self) -> int:
        return len(self._map)

    def close(self) -> None:
        """See ``Places``; also of the index."""
        super().close()
        self._known.place.store.close()

    def find(self, key: str) -> int | None:
        """See ``Places``."""
        return self._map.find(key)

    def _located(self, numbers: Sequence[int]) -> list[list[PlanItem]]:
        spans = self._map.spans(numbers)
        for number in {number for number, _ in spans}:
            self._need_head(number)
        located = []
        for index, (number, span) in zip(numbers, spans, strict=True):
            _, _, size_bytes, _, if_match = self._known.found[number]
            wanted = self._wanted(index, number) or [span]
            located.append([PlanItem(self._keys[number], each, if_match, size_bytes) for each in wanted])
        return located

    def _wanted(self, index: int, number: int) -> list[ByteRange] | None:
        """What of a sample to read where leaving members out pays; None: all of it."""
        row = self._known.rows[number]
        shard: Any = self._known.found[number].shard
        if self._fields is None or row is None or not may_pay(shard, row, self._fields):
            return None
        sample = self._map.locate(index)[1]
        known = self._map.index_of(number)
        return wanted_spans(known, sample, 1, fields=self._fields, gap_bytes=gap_bytes_of(shard))

    def _made(self, number: int, data: Sequence[memoryview]) -> Fetched:
        shard, extent = self._map.spans([number])[0]
        is_all = self._fields is None or (len(data) == 1 and len(data[0]) == extent.length_bytes)
        sample = self._map.parse(number, data[0]) if is_all else self._map.parse_some(number, data)
        return Fetched(sample, self._known.found[shard].shard.url)

    def _need_head(self, number: int) -> None:
        """Read what of the shard every sample's parser needs, once; nothing for most formats."""
        head = self._map.head_span(number)
        if head is not None:
            shard, _, size_bytes, _, if_match = self._known.found[number]
            blobs = shard.store.read_many([PlanItem(shard.key, head, if_match, size_bytes)])
            self._map.set_head(number, next(blobs).data)
