"""Verification: reads every byte of every shard and compares it with the index, and the index with the listing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import (
    ConfigError,
    CorruptShardError,
    DataError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    UncheckedError,
)
from penstock.fetch.plan import PlanItem
from penstock.formats import FORMATS, feed_in_pieces, parser_of, ranged_of, samples_of, undecoded
from penstock.formats.registry import CHECKSUM_HEAD_BYTES, has_checksums
from penstock.index import ShardRecorder, lookup
from penstock.pipeline import Shards, shards
from penstock.sources.shards import ShardFinder
from penstock.system.tracebacks import boundary
from penstock.text.patterns import is_pattern
from penstock.types import ByteRange

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Unpack

    from penstock.index import IndexPlace, ShardIndex, ShardRow, VersionedShard
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.sources.shards import Shard
    from penstock.store import Store


class ShardProblem(NamedTuple):
    """A shard that failed verification, or could not be verified.

    Attributes:
        url: URL of the shard.
        error: Description of the problem.
    """

    url: str
    error: PenstockError


class Verified(NamedTuple):
    """The result of a verification.

    Attributes:
        url: URL of the index.
        shards_count: Number of shards that were read and agree with the index, by their checksums.
        samples_count: Number of samples in these shards.
        size_bytes: Size of these shards in bytes.
        problems: One problem for each other shard.
    """

    url: str
    shards_count: int
    samples_count: int
    size_bytes: int
    problems: tuple[ShardProblem, ...]

    @property
    def unchecked(self) -> tuple[ShardProblem, ...]:
        """Problems of shards without checksums, whose samples were only counted and measured."""
        return tuple(problem for problem in self.problems if isinstance(problem.error, UncheckedError))

    @property
    def failed(self) -> tuple[ShardProblem, ...]:
        """All other problems."""
        return tuple(problem for problem in self.problems if not isinstance(problem.error, UncheckedError))


def check_shard(
    store: Store,
    place: IndexPlace,
    row: ShardRow,
    *,
    key: str | None = None,
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> None:
    """Read and parse a whole shard, and compare the offset, key and checksum of every sample with its index.

    Args:
        store: Store of the shard.
        place: Place of its index.
        row: Row of the shard in the data set's index.
        key: Key of the shard in `store`; None takes the row's key.
        raise_if_stopped: Called at every part; raises if the work must stop.

    Raises:
        CorruptShardError: The shard does not follow its format, or is not the one that was indexed; the error names the sample.
        UncheckedError: Only the number and lengths of its samples could be compared, because neither the index nor the
            shard itself has checksums.
        ObjectChangedError, ObjectMissingError: The shard was replaced, or does not exist.

    Cost: reads the shard in parts, within the byte budget.
    """
    key = row.key if key is None else key
    stored = place.load_shard(row)
    url = store.describe(key)
    etag = row.etag if row.etag.startswith(('"', "W/")) else None
    name = undecoded(row.format)
    if FORMATS[name].ranged is not None:
        reader, count = ranged_of(name, shard=url, size_bytes=row.size_bytes), 0
        for samples in samples_of(reader, lambda span: store.read(key, span).data):
            raise_if_stopped()
            count += len(samples)
        if count != row.samples_count:
            raise CorruptShardError(f"it has {count} samples, its index says {row.samples_count}", shard=url)
        _refuse_unchecked(store, key, row, stored)
        return
    recorder = ShardRecorder(row, row.format)
    parser = parser_of(name, shard=url)
    if row.size_bytes:
        for chunk in store.read_parts([PlanItem(key, etag=etag, size_bytes=row.size_bytes)]):
            raise_if_stopped()
            data = chunk.data
            for samples in feed_in_pieces(parser, chunk.data):
                recorder.feed(data, samples)
                data = data[:0]
    else:
        store.stat(key)
    _compare(recorder.finish(parser.finish()), stored, url, has_keys=name == row.format)
    _refuse_unchecked(store, key, row, stored)


def _refuse_unchecked(store: Store, key: str, row: ShardRow, stored: ShardIndex) -> None:
    """Refuse to call a shard verified if damage to its contents would not have been noticed.

    Raises:
        UncheckedError: Neither its index nor the shard itself has checksums.
    """
    if stored.crc32c is not None or not row.samples_count:
        return
    head = store.read(key, ByteRange(0, min(row.size_bytes, CHECKSUM_HEAD_BYTES))).data
    if not has_checksums(row.format, head):
        raise UncheckedError(
            "only the number and lengths of its samples were checked, because its index has no checksums",
            hint="penstock index --again --ignore-idx stores checksums of the present contents, for later verifications",
            shard=store.describe(key),
        )


def _compare(read: ShardIndex, stored: ShardIndex, url: str, *, has_keys: bool) -> None:
    """Refuse a shard that differs from its index.

    Args:
        read: Index of the bytes that were read.
        stored: Index that was stored.
        url: URL of the shard, for errors.
        has_keys: Whether keys were parsed; undecoded records have their keys among their bytes, under the checksum.

    Raises:
        CorruptShardError: The shard differs; the error names the first sample that does.
    """
    if len(read) != len(stored):
        raise CorruptShardError(f"it has {len(read)} samples, its index says {len(stored)}", shard=url)
    for what, found, expected in (
        ("position", read.offsets, stored.offsets),
        ("checksum", read.crc32c, stored.crc32c),
    ):
        if found is None or expected is None:
            continue
        differing = np.flatnonzero(found != expected)
        if len(differing):
            number = min(int(differing[0]), len(stored) - 1)
            offset = None if stored.offsets is None else int(stored.offsets[number])
            raise CorruptShardError(
                f"the {what} of sample {number} differs from the index ({len(differing)} samples differ)",
                shard=url,
                offset_bytes=offset,
                sample_key=None if stored.keys is None else stored.keys[number],
            )
    if has_keys and stored.keys is not None and stored.keys != read.keys:
        raise CorruptShardError("the keys of its samples differ from the index", shard=url)


@boundary
def verify(
    url: str,
    *,
    index_dir: str | os.PathLike[str] | None = None,
    on_shard: Callable[[str, ShardRow | None, PenstockError | None], None] = lambda *_: None,
    **connection: Unpack[ConnectionOptions],
) -> Verified:
    """Read every shard at `url`, and compare the offset, key and checksum of each sample with the index.

    Args:
        url: Shards, as in ``penstock.shards``.
        index_dir: Folder of the index; None looks beside the shards and in the user's cache.
        on_shard: Called for each shard with its URL, its row in the index (None if it has none), and its error (None if
            nothing is wrong).
        **connection: Connection options, as in ``penstock.connect``.

    Returns:
        The result, with the problems: shards that fail, that are not in the index, that are in the index but do
        not exist, and shards whose samples could only be counted and measured (``UncheckedError``; an index that an epoch
        wrote has no checksums). If `url` is a pattern, missing shards are not reported.

    Raises:
        ObjectMissingError: `url` names no shards.
        ConfigError: No index knows any of the shards.
        StoreError: The shards cannot be listed.

    Cost: reads everything once.
    """
    source = shards(url, **connection).source
    assert isinstance(source, Shards)
    finder = ShardFinder(source, fetch=None)
    problems: list[ShardProblem] = []
    count = samples = size = 0
    try:
        listed = finder.find()
        known = lookup(listed, index_dir=index_dir)
        place, indexed = known.place, known.place.load().rows
        if known.rows.count(None) == len(known.rows) and not indexed:
            raise ConfigError(f"no index has the shards at {url}", hint="penstock index")
        for shard, found, row in zip(listed, known.shards, known.rows, strict=True):
            if row is None:
                error: PenstockError | None = _unindexed(found, indexed.get(found.key))
            else:
                error = _checked(shard, place, row)
            if error is not None:
                problems.append(ShardProblem(shard.url, error))
            elif row is not None:
                count, samples, size = count + 1, samples + row.samples_count, size + row.size_bytes
            on_shard(shard.url, row, error)
        present = {found.key for found in known.shards}
        for key in sorted(indexed.keys() - present) if not is_pattern(url) else ():
            missing = ObjectMissingError("it is in the index, but it does not exist", url=place.base_url + key)
            problems.append(ShardProblem(place.base_url + key, missing))
            on_shard(place.base_url + key, None, missing)
        return Verified(place.url, count, samples, size, tuple(problems))
    finally:
        finder.close()


def _checked(shard: Shard, place: IndexPlace, row: ShardRow) -> PenstockError | None:
    try:
        check_shard(shard.store, place, row, key=shard.key)
    except PenstockError as error:
        return error
    return None


def _unindexed(found: VersionedShard, older: ShardRow | None) -> PenstockError:
    """Return the problem of a shard whose version no index knows."""
    url = found.shard.url
    if older is None:
        return DataError("it is in no index", hint="penstock index", shard=url)
    return ObjectChangedError(
        f"it has {found.size_bytes} bytes, ETag {found.etag}; but its index says {older.size_bytes}, {older.etag}",
        hint="it was replaced after it was indexed; if that was intended, run `penstock index` again",
        url=url,
    )
