"""``ObjectSampleReader``: samples that are objects of their own, or groups of objects with one stem."""

from __future__ import annotations

from array import array
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from penstock.fetch import PlanItem
from penstock.formats import Sample, group_objects
from penstock.formats.sample import member_of
from penstock.sources.packed_strings import PackedStrings
from penstock.sources.readers import LocatedSample, StoredReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
