"""Where samples lie that are asked for by number: objects, indexed shards, or whatever a function of a key reads.

Looked up once, in the process that first asks, and carried to workers: names and versions are kept as blocks of bytes,
so that a million of them cost their bytes and not a million objects, which fork would copy page by page.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import DecodeError
from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.formats.grouping import NO_EXTENSION
from penstock.index import SampleMap, lookup
from penstock.loader.shards import ShardFinder
from penstock.pipeline import Objects, Shards

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.config import FetchConfig
    from penstock.loader.shards import Shard
    from penstock.store import Store

CALLS_MAX = 32  # of a user's reading function, side by side: they wait, most of the time


class Fetched(NamedTuple):
    """A sample as stored, and where it is from."""

    sample: Sample
    url: str


class Places(Protocol):
    """Samples by number. Pickles to worker processes as what was found, without connections."""

    def __len__(self) -> int:
        """Samples."""

    def fetch(self, indices: Sequence[int]) -> Iterator[Fetched]:
        """These samples, in this order, read side by side.

        Raises:
            StoreError, DataError: as the store and the format say.
        """


def look(source: Shards | Objects, *, fetch: FetchConfig | None, index_dir: str | os.PathLike[str] | None) -> Places:
    """Find the samples of `source`.

    Raises:
        ConfigError: shards without an index, or of a format that cannot be entered at a sample.
        ObjectMissingError: there is none.

    Cost: objects: a listing. Shards: a listing, and a read of the data set's index.
    """
    if isinstance(source, Shards):
        return _ShardPlaces(source, fetch=fetch, index_dir=index_dir)
    if source.read is not None:
        return _FunctionPlaces(source)
    return _ObjectPlaces(source, fetch=fetch)


class _Names:
    """Strings, kept as one block. Cost: their bytes as UTF-8, and 8 for each."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._block = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._block[start : int(self._ends[index])].decode("utf-8", "surrogateescape")


class _ObjectPlaces:
    """Objects, or groups of them with one stem, in the ``Loader``'s stored order; of the versions that were listed."""

    def __init__(self, source: Objects, *, fetch: FetchConfig | None) -> None:
        self._group_by = source.group_by
        self._stores: list[Store] = []
        found: list[Shard] = []
        first, store_of = [0], []
        for store, run in groupby(ShardFinder(source, fetch=fetch).find(), key=attrgetter("store")):
            self._stores.append(store)
            by_key = {each.key: each for each in run}
            for group in group_objects(by_key, group_by=source.group_by):
                found += [by_key[key] for key in group.members.values()]
                first.append(len(found))
                store_of.append(len(self._stores) - 1)
        self._first = np.array(first, dtype=np.int64)
        self._store_of = np.array(store_of, dtype=np.uint32)
        self._names = _Names(each.key for each in found)
        self._etags = _Names(each.etag or "" for each in found)
        self._sizes = np.array([-1 if each.size_bytes is None else each.size_bytes for each in found], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._store_of)

    def fetch(self, indices: Sequence[int]) -> Iterator[Fetched]:
        for number, run in groupby(indices, key=lambda index: int(self._store_of[index])):
            store, wanted = self._stores[number], list(run)
            blobs = store.read_many([self._item(row) for index in wanted for row in self._rows(index)])
            for index in wanted:
                names = [self._names[row] for row in self._rows(index)]
                group = group_objects(names, group_by=self._group_by)[0]
                members = {field: next(blobs).data for field in group.members}
                yield Fetched(Sample(group.key, members, 0), store.describe(names[0]))

    def _rows(self, index: int) -> range:
        return range(int(self._first[index]), int(self._first[index + 1]))

    def _item(self, row: int) -> PlanItem:
        size_bytes = int(self._sizes[row])
        return PlanItem(
            self._names[row], etag=self._etags[row] or None, size_bytes=size_bytes if size_bytes >= 0 else None
        )


class _ShardPlaces:
    """Samples inside shards, by their index."""

    def __init__(self, source: Shards, *, fetch: FetchConfig | None, index_dir: str | os.PathLike[str] | None) -> None:
        self._known = lookup(ShardFinder(source, fetch=fetch).find(), index_dir=index_dir)
        self._map = SampleMap(self._known)

    def __getstate__(self) -> Any:
        return self._known

    def __setstate__(self, known: Any) -> None:
        self._known = known
        self._map = SampleMap(known)  # shards' own indexes are read again, those that are needed

    def __len__(self) -> int:
        return len(self._map)

    def fetch(self, indices: Sequence[int]) -> Iterator[Fetched]:
        spans = self._map.spans(indices)
        shards = [found.shard for found in self._known.found]
        for number in {number for number, _ in spans}:
            head = self._map.head_span(number)
            if head is not None:
                self._map.set_head(number, shards[number].store.read(shards[number].key, head).data)
        places = zip(indices, spans, strict=True)
        for _, group in groupby(places, key=lambda place: id(shards[place[1][0]].store)):
            members = list(group)
            store = shards[members[0][1][0]].store
            blobs = store.read_many([(shards[number].key, span) for _, (number, span) in members])
            for (index, (number, _)), blob in zip(members, blobs, strict=True):
                yield Fetched(self._map.parse(index, blob.data), shards[number].url)


class _FunctionPlaces:
    """Keys that a user's function reads."""

    def __init__(self, source: Objects) -> None:
        assert source.read is not None
        self._read = source.read
        self._names = _Names(source.urls)

    def __len__(self) -> int:
        return len(self._names)

    def fetch(self, indices: Sequence[int]) -> Iterator[Fetched]:
        keys = [self._names[index] for index in indices]
        with ThreadPoolExecutor(max(1, min(CALLS_MAX, len(keys)))) as pool:
            for key, members in zip(keys, pool.map(self._called, keys), strict=True):
                yield Fetched(Sample(key, {name: memoryview(value) for name, value in members.items()}, 0), key)

    def _called(self, key: str) -> Mapping[str, bytes]:
        try:
            found = self._read(key)
        except Exception as error:
            name = getattr(self._read, "__qualname__", repr(self._read))
            text = f"read={name} failed: {type(error).__name__}: {error}"
            raise DecodeError(text, stage="read", sample_key=key) from error
        return found if isinstance(found, Mapping) else {NO_EXTENSION: found}
