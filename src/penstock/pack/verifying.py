"""Reading back: every shard against its index, every byte of it, and the data set against what lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import (
    CorruptShardError,
    DataError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    UncheckedError,
)
from penstock.fetch.plan import PlanItem
from penstock.formats import FORMATS, checksummed, feed_in_pieces, parser_of, ranged_of, samples_of
from penstock.index import Found, ShardRecorder
from penstock.pack.keeping import raw
from penstock.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.index import IndexPlace, ShardIndex, ShardLike, ShardRow
    from penstock.index.lookup import Lookup
    from penstock.store import Store


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        url: Of the shard.
        error: What is wrong with it.
    """

    url: str
    error: PenstockError


class Verified(NamedTuple):
    """What a verification found.

    Attributes:
        url: Of the index.
        shards_count: Shards that were read and are what the index says, by their checksums.
        samples_count: Samples in these.
        size_bytes: Bytes of these.
        problems: One error for each of the other shards.
    """

    url: str
    shards_count: int
    samples_count: int
    size_bytes: int
    problems: tuple[Problem, ...]

    @property
    def unchecked(self) -> tuple[Problem, ...]:
        """Of the problems, those of shards of which only lengths were checked: there are no checksums."""
        return tuple(problem for problem in self.problems if isinstance(problem.error, UncheckedError))

    @property
    def failed(self) -> tuple[Problem, ...]:
        """All other problems: something is wrong."""
        return tuple(problem for problem in self.problems if not isinstance(problem.error, UncheckedError))


class _Here(NamedTuple):
    """A shard by its store and key."""

    store: Store
    key: str
    url: str
    etag: str | None
    size_bytes: int | None


def check_shard(
    store: Store,
    place: IndexPlace,
    row: ShardRow,
    *,
    key: str | None = None,
    going_on: Callable[[], None] = lambda: None,
) -> None:
    """Read one shard whole, parse it, and hold every sample's place, key and checksum against its index.

    Args:
        store: That holds it.
        place: Of its index.
        row: Of the data set's index.
        key: Of the shard in `store`, where it is not the row's.
        going_on: Asked at every part; raises to stop.

    Raises:
        CorruptShardError: it is no shard of its format, or not the one that was indexed; says which sample.
        UncheckedError: only the number and lengths of its samples are what was indexed: neither the index nor the
            shard itself has checksums of their contents.
        ObjectChangedError, ObjectMissingError: it is another version, or not there.

    Cost: the shard, read in parts; within the byte budget.
    """
    key = row.key if key is None else key
    stored = place.load_shard(row)
    url = store.describe(key)
    etag = row.etag if row.etag.startswith(('"', "W/")) else None
    here = _Here(store, key, url, etag, row.size_bytes)
    name = raw(row.format)
    if FORMATS[name].ranged is not None:
        count = _count_by_footer(here, name, going_on)
        if count != row.samples_count:
            raise CorruptShardError(f"it has {count} samples, its index says {row.samples_count}", shard=url)
        _refuse_unchecked(here, row, stored)
        return
    recorder = ShardRecorder(Found(here, row.key, row.size_bytes, row.etag, etag), row.format)
    parser = parser_of(name, shard=url)
    if row.size_bytes:
        for chunk in store.read_parts([PlanItem(key, etag=etag, size_bytes=row.size_bytes)]):
            going_on()
            data = chunk.data
            for samples in feed_in_pieces(parser, chunk.data):
                recorder.feed(data, samples)
                data = data[:0]
    else:
        store.stat(key)
    _compare(recorder.finish(parser.finish()), stored, url, has_keys=name == row.format)
    _refuse_unchecked(here, row, stored)


def _refuse_unchecked(here: _Here, row: ShardRow, stored: ShardIndex) -> None:
    """Refuse to call a shard right where nothing would have told that its contents are not.

    Raises:
        UncheckedError: neither its index nor the shard itself has checksums.
    """
    if stored.crc32c is not None or not row.samples_count:
        return
    head = here.store.read(here.key, ByteRange(0, min(row.size_bytes, checksummed.HEAD_BYTES))).data
    if not checksummed.has_checksums(row.format, head):
        raise UncheckedError(
            "only the number and lengths of its samples were checked: its index has no checksums",
            hint="penstock index --again --ignore-idx keeps checksums of what lies there now, for later verifications",
            shard=here.url,
        )


def _count_by_footer(here: _Here, name: str, going_on: Callable[[], None]) -> int:
    assert here.size_bytes is not None
    reader = ranged_of(name, shard=here.url, size_bytes=here.size_bytes)
    count = 0
    for samples in samples_of(reader, lambda span: here.store.read(here.key, span).data):
        going_on()
        count += len(samples)
    return count


def _compare(read: ShardIndex, stored: ShardIndex, url: str, *, has_keys: bool) -> None:
    """Refuse what differs. Records that were not looked into (not `has_keys`) have their keys among their bytes.

    Raises:
        CorruptShardError: naming the first sample that does.
    """
    if len(read) != len(stored):
        raise CorruptShardError(f"it has {len(read)} samples, its index says {len(stored)}", shard=url)
    for what, found, expected in (
        ("bounds", read.offsets, stored.offsets),
        ("checksum", read.crc32c, stored.crc32c),
    ):
        if found is None or expected is None:
            continue
        differing = np.flatnonzero(found != expected)
        if len(differing):
            number = min(int(differing[0]), len(stored) - 1)
            offset = None if stored.offsets is None else int(stored.offsets[number])
            raise CorruptShardError(
                f"sample {number} has not the {what} that its index says ({len(differing)} differ)",
                shard=url,
                offset_bytes=offset,
                sample_key=None if stored.keys is None else stored.keys[number],
            )
    if has_keys and stored.keys is not None and stored.keys != read.keys:
        raise CorruptShardError("its samples have not the keys that its index says", shard=url)


@boundary
def verify_shards(
    shards: Sequence[ShardLike],
    known: Lookup,
    *,
    on_shard: Callable[[str, ShardRow | None, PenstockError | None], None],
) -> Verified:
    """Hold shards that were listed against what an index knows of them, and the index against the listing.

    Args:
        shards: As listed.
        known: What ``penstock.index.lookup`` found of them.
        on_shard: Told of each: its URL, its row, and what is wrong.
    """
    problems: list[Problem] = []
    count = samples = size = 0

    def note(url: str, row: ShardRow | None, error: PenstockError | None) -> None:
        if error is not None:
            problems.append(Problem(url, error))
        on_shard(url, row, error)

    for shard, found, row in zip(shards, known.found, known.rows, strict=True):
        if row is None:
            older = known.place.load().rows.get(found.key)
            error: PenstockError = (
                DataError("no index knows it", hint="penstock index", shard=shard.url)
                if older is None
                else ObjectChangedError(
                    f"it has {found.size_bytes} bytes, ETag {found.etag}; its index says {older.size_bytes}, {older.etag}",
                    hint="it was replaced after it was indexed; if that was intended, run `penstock index` again",
                    url=shard.url,
                )
            )
            note(shard.url, None, error)
            continue
        try:
            check_shard(shard.store, known.place, row, key=shard.key)
        except PenstockError as caught:
            note(shard.url, row, caught)
            continue
        count, samples, size = count + 1, samples + row.samples_count, size + row.size_bytes
        note(shard.url, row, None)
    return Verified(known.place.url, count, samples, size, tuple(problems))


def missing_shards(known: Lookup, *, below: str) -> list[Problem]:
    """Shards that the index names and no listing showed."""
    listed = {found.key for found in known.found}
    return [
        Problem(
            known.place.base_url + row.key,
            ObjectMissingError("its index knows it, and it is not there", url=known.place.base_url + row.key),
        )
        for key, row in sorted(known.place.load().rows.items())
        if key not in listed and (known.place.base_url + key).startswith(below)
    ]
