"""``IndexedReader``: samples of indexed shards, each read by the range of its own bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from penstock.errors import ConfigError
from penstock.fetch import PlanItem
from penstock.formats import look_into, ranged_of
from penstock.index import SampleMap
from penstock.sources.readers import LocatedSample, StoredReader
from penstock.sources.shards import gap_bytes_of, may_pay, wanted_spans
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.formats import RangedReader
    from penstock.index import Lookup, SampleExtent
    from penstock.sources.readers import NumberedSample
    from penstock.sources.shards import Shard
    from penstock.store import Store


class TableEntry(NamedTuple):
    """A sample that its shard's own table of contents locates: the numbers of the shard, and of the sample in it."""

    shard: int
    sample: int


class IndexedReader(StoredReader):
    """Samples of shards, in the versions that were indexed.

    Args:
        known: The shards in the index of the data set; all of them must be indexed.
        fields: Members to read; None: all.
        gap_bytes: The widest gap that ``read_batch`` reads through; None: as wide as measurements say is worthwhile.
        indexes_max: Number of shard indexes to keep in memory; None: all that were needed.

    Raises:
        ConfigError: A shard is not indexed, or its format cannot be read from any sample.
    """

    def __init__(
        self,
        known: Lookup,
        *,
        fields: frozenset[str] | None,
        gap_bytes: int | None = None,
        indexes_max: int | None = None,
    ) -> None:
        stores: dict[Store, int] = {}
        for each in known.shards:
            stores.setdefault(each.shard.store, len(stores))
        super().__init__(list(stores), gap_bytes=gap_bytes)
        self._keys = [
            each.shard.key if len(stores) == 1 else f"{stores[each.shard.store]}/{each.shard.key}"
            for each in known.shards
        ]
        self._known = known
        self._fields = fields
        self._indexes_max = indexes_max
        self._map = SampleMap(known, fields=fields, indexes_max=indexes_max)
        self._starts = np.array(self._map.starts, np.int64)
        self._has_tables = any(row is not None and not row.has_offsets for row in known.rows)
        self._tables: dict[int, RangedReader] = {}  # by shard, for formats with a table of contents

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_map": None, "_tables": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # reads shard indexes again when needed
        self._map = SampleMap(self._known, fields=self._fields, indexes_max=self._indexes_max)

    def __len__(self) -> int:
        return len(self._map)

    def close(self) -> None:
        """Close the stores of the shards and of the index; idempotent."""
        super().close()
        self._known.place.store.close()

    def iter_keys(self) -> Iterator[str]:
        """Iterate over the keys of all samples, in order. Cost: reads the keys of all shards."""
        return self._map.iter_keys()

    def numbers(self, shards: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of samples, given their shards and their numbers within them; all int64[n]."""
        return self._starts[shards] + samples

    def load_indexes(self, shards: Collection[int]) -> None:
        """Read the indexes of some shards. Cost: one read per index that is not in memory, many at a time."""
        self._map.load(shards)

    def located(self, numbers: Sequence[int]) -> list[LocatedSample]:
        """Return where the bytes of some samples lie."""
        contexts = self._in_tables(numbers) if self._has_tables else self._map.extents(numbers)
        for shard in {context.shard for context in contexts if not isinstance(context, TableEntry)}:
            self._need_head(shard)
        found = self._known.shards
        located = []
        for number, context in zip(numbers, contexts, strict=True):
            shard = context.shard
            _, _, size_bytes, _, if_match = found[shard]
            spans: Sequence[ByteRange]
            if isinstance(context, TableEntry):
                # a sample without a wanted field takes a byte, because every sample is a request
                spans = self._table(shard).units[context.sample].spans or (ByteRange(0, 1),)
            else:
                spans = self._wanted(context) or (context.span,)
            items = [PlanItem(self._keys[shard], span, if_match, size_bytes) for span in spans]
            located.append(LocatedSample(number, items, context))
        return located

    def made(self, located: LocatedSample, data: Sequence[memoryview]) -> NumberedSample:
        """Make a sample from its bytes, or from those of the members that were read."""
        extent: SampleExtent | TableEntry = located.context
        if isinstance(extent, TableEntry):
            table = self._table(extent.shard)
            [sample] = table.read(extent.sample, data[: len(table.units[extent.sample].spans)])
            return located.number, sample, self._known.shards[extent.shard].shard.url
        is_all = self._fields is None or (len(data) == 1 and len(data[0]) == extent.span.length_bytes)
        sample = self._map.parse(extent, data[0]) if is_all else self._map.parse_some(extent, data)
        if sample.size_bytes is None:
            sample.size_bytes = sum(map(len, data))
        return located.number, sample, self._known.shards[extent.shard].shard.url

    def _wanted(self, extent: SampleExtent) -> list[ByteRange] | None:
        """Return the spans to read of a sample if skipping members is worthwhile; None: read all of it."""
        row = self._known.rows[extent.shard]
        shard = cast("Shard", self._known.shards[extent.shard].shard)
        if self._fields is None or row is None or not may_pay(shard, row, self._fields):
            return None
        return wanted_spans(extent.known, extent.sample, 1, fields=self._fields, gap_bytes=gap_bytes_of(shard))

    def _in_tables(self, numbers: Sequence[int]) -> Sequence[SampleExtent | TableEntry]:
        """Return where samples lie if some of them, or all, are located by the tables of contents of their shards."""
        entries = [TableEntry._make(self._map.locate(number)) for number in numbers]
        rows = [self._known.rows[entry.shard] for entry in entries]
        indexed = [number for number, row in zip(numbers, rows, strict=True) if row is not None and row.has_offsets]
        extents = dict(zip(indexed, self._map.extents(indexed), strict=True))
        return [extents.get(number, entry) for number, entry in zip(numbers, entries, strict=True)]

    def _table(self, shard: int) -> RangedReader:
        """Return the table of contents of a shard; it is read once, by one request or two."""
        table = self._tables.get(shard)
        if table is None:
            found, _, size_bytes, _, if_match = self._known.shards[shard]
            row = self._known.rows[shard]
            assert row is not None
            table = ranged_of(row.format, shard=found.url, size_bytes=row.size_bytes, fields=self._fields)
            store, key = found.store, found.key
            look_into(table, lambda span: next(store.read_many([PlanItem(key, span, if_match, size_bytes)])).data)
            self._tables[shard] = table
        return table

    def _need_head(self, shard: int) -> None:
        """Read, once per shard, the bytes that the parser needs for every sample; most formats need none."""
        head = self._map.head_span(shard)
        if head is not None:
            found, _, size_bytes, _, if_match = self._known.shards[shard]
            blobs = found.store.read_many([PlanItem(found.key, head, if_match, size_bytes)])
            self._map.set_head(shard, next(blobs).data)


class PickedReader(IndexedReader):
    """Some samples of shards, in the order in which a pipeline picks them. Its numbers count the picked samples.

    Args:
        known: The shards and their index.
        numbers: Numbers of the samples in all shards together; a number may occur more than once.
        fields: Members to read; None: all.

    Raises:
        ConfigError: A number is out of range, or the format of the shards does not allow reading from the middle.
    """

    def __init__(self, known: Lookup, numbers: Sequence[int], *, fields: frozenset[str] | None) -> None:
        super().__init__(known, fields=fields)
        self._picked = np.array(numbers, np.int64)
        lowest, highest, count = int(self._picked.min()), int(self._picked.max()), super().__len__()
        if lowest < 0 or highest >= count:
            raise ConfigError(f"pick() names samples {lowest} to {highest} of {count}")

    def __len__(self) -> int:
        return len(self._picked)

    def located(self, numbers: Sequence[int]) -> list[LocatedSample]:
        """Return where the bytes of some of the samples that were picked lie."""
        return super().located(self._picked[list(numbers)].tolist())

    def iter_keys(self) -> Iterator[str]:
        """Iterate over what identifies the samples: the versions of their shards, and their numbers."""
        yield from (f"{each.shard.url}\n{each.if_match}" for each in self._known.shards)
        yield from map(str, self._picked.tolist())

    def find(self, key: str) -> int | None:
        """Return None: samples that were picked are not looked up by key."""
        del key
        return None
