"""Where samples lie that are asked for by number: objects, indexed shards, or whatever a function of a key reads.

Looked up once, in the process that first asks, and carried to workers: names are kept as one block of bytes, so that a
million of them cost a million names and not a million objects, which fork would copy page by page.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock import compose
from penstock.errors import ConfigError, ObjectMissingError
from penstock.formats import Sample
from penstock.index import lookup, read_manifest
from penstock.index.sample_map import SampleMap
from penstock.loader.shards import ShardFinder
from penstock.pipeline.source import Objects, Shards, braces_unfolded, has_glob

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.config import FetchConfig
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
    """Objects, or neighbours with one stem; in key order below each URL."""

    def __init__(self, source: Objects, *, fetch: FetchConfig | None) -> None:
        self._stores: list[Store] = []
        roots: dict[str, int] = {}
        found: list[tuple[int, str]] = []
        for root, keys in _found(source):
            number = roots.setdefault(root, len(roots))
            if number == len(self._stores):
                self._stores.append(compose.connect(root, **source.connection.given(), fetch=fetch))
            found += [(number, key) for key in (keys if keys is not None else _listed(self._stores[number]))]
        if not found:
            raise ObjectMissingError(f"{source!r} has no objects", operation="LIST")
        self._names = _Names(key for _, key in found)
        self._store_of = np.array([number for number, _ in found], dtype=np.uint32)
        first = range(len(found))
        if source.group_by == "stem":
            first = [next(group) for _, group in groupby(first, key=lambda at: (found[at][0], _stem(found[at][1])[0]))]  # type: ignore[assignment]
        self._first = np.array([*first, len(found)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._first) - 1

    def fetch(self, indices: Sequence[int]) -> Iterator[Fetched]:
        rows = [row for index in indices for row in range(int(self._first[index]), int(self._first[index + 1]))]
        blobs = self._read(rows)
        for index in indices:
            members: dict[str, memoryview] = {}
            first = int(self._first[index])
            for row in range(first, int(self._first[index + 1])):
                members[_stem(self._names[row])[1]] = next(blobs)
            name = self._names[first]
            yield Fetched(Sample(_stem(name)[0], members, 0), self._stores[int(self._store_of[first])].describe(name))

    def _read(self, rows: list[int]) -> Iterator[memoryview]:
        for number, group in groupby(rows, key=lambda row: int(self._store_of[row])):
            for blob in self._stores[number].read_many([self._names[row] for row in group]):
                yield blob.data


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
            for key, data in zip(keys, pool.map(self._read, keys), strict=True):
                members = {_stem(key)[1]: data} if isinstance(data, bytes) else data
                yield Fetched(Sample(_stem(key)[0], _views(members), 0), key)


def _views(members: Mapping[str, Any]) -> dict[str, memoryview]:
    return {name: memoryview(value) for name, value in members.items()}


def _stem(key: str) -> tuple[str, str]:
    """The sample's key and the member's name: what lies before and behind the first dot of the last segment."""
    folder, slash, name = key.rpartition("/")
    stem, _, member = name.partition(".")
    return folder + slash + stem, member.lower()


def _found(source: Objects) -> Iterator[tuple[str, list[str] | None]]:
    """(URL of a store, keys in it), in order; None: all that the store lists."""
    if source.manifest is not None:
        with compose.open(source.manifest, **source.connection.given()) as file:
            entries = read_manifest(file.read(), url=source.manifest)
        for root, group in groupby((compose.split(entry.url) for entry in entries), key=lambda pair: pair[0]):
            yield root, [key for _, key in group]
        return
    for url in source.urls:
        if source.is_list or not has_glob(url):
            for each in [url] if source.is_list else braces_unfolded(url):
                root, key = compose.split(each)
                is_one = key and not each.endswith("/") and (source.is_list or "." in key.rpartition("/")[2])
                yield (root, [key]) if is_one else (each.rstrip("/") + "/", None)
        else:
            raise ConfigError(f"{url!r} is a pattern", hint="give a prefix that ends with '/', or a list of URLs")


def _listed(store: Store) -> list[str]:
    """All names that can be samples: hidden objects and markers of folders cannot."""
    keys = (info.key for info in store.list() if not info.is_prefix)
    return [key for key in keys if not key.endswith("/") and not key.rpartition("/")[2].startswith(".")]
