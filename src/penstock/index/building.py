"""Building an index: what is known already is kept, footers and other tools' indexes are read, the rest is parsed.

Shards are read one behind the other by one ``read_parts``: requests run ahead over their ends, so many shards are on
their way while one is parsed, and memory stays within the byte budget. Each finished shard is written at once, under
the version it had: a build that is killed goes on where it was.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.errors import ConfigError, DataError, ObjectChangedError, PenstockError, StoreError
from penstock.fetch import PlanItem
from penstock.formats import (
    FORMATS,
    HEAD_BYTES,
    decided_format,
    detect,
    feed_in_pieces,
    format_of_name,
    parser_of,
    ranged_of,
    without_content,
)
from penstock.index import foreign
from penstock.index.dataset_index import DatasetIndex
from penstock.index.place import resolve
from penstock.index.recorder import IndexBuilder, ShardRecorder
from penstock.index.shard_index import ShardIndex, ShardRow
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.fetch import Chunk
    from penstock.formats import OnCorrupt, Parser
    from penstock.index.place import Found, IndexPlace, ShardLike
    from penstock.store import Store
    from penstock.types import Blob

FOOTERS_IN_FLIGHT_MAX = 32
"""Shards whose footers are read at the same time: each needs two or three requests, one after the other."""


How: TypeAlias = Literal["known", "footer", "idx", "read"]


class Listener(Protocol):
    """Hears how a build goes; from the thread that builds."""

    def planned(self, shards_count: int, size_bytes: int) -> None:
        """So many shards, of so many bytes, are to be read or asked."""

    def progressed(self, size_bytes: int) -> None:
        """So many bytes more were read."""

    def indexed(self, row: ShardRow, how: How) -> None:
        """A shard is in the index: it was there, its footer said, another tool's index said, or it was read."""

    def failed(self, url: str, error: PenstockError) -> None:
        """A shard could not be indexed; the others go on."""


class Built(NamedTuple):
    """What a build made.

    Attributes:
        dataset: The rows of exactly the shards that were given, those that failed left out.
        url: Of the folder that holds the index.
        failed: URL and error of each shard that could not be indexed.
        skipped: URL of each shard that was indexed without its corrupt samples, and how many those are.
    """

    dataset: DatasetIndex
    url: str
    failed: tuple[tuple[str, PenstockError], ...]
    skipped: tuple[tuple[str, int], ...]


def build(
    shards: Iterable[ShardLike],
    place: IndexPlace,
    *,
    again: bool = False,
    foreign_indexes: bool = True,
    on_corrupt: OnCorrupt = "raise",
    listener: Listener | None = None,
) -> Built:
    """Index what of `shards` is not indexed in this version.

    Args:
        shards: As a listing gave them.
        place: Where the index is kept.
        again: Read everything, whatever is known.
        foreign_indexes: Take the extents from other tools' indexes beside the shards, where they are.
        on_corrupt: ``raise``: a corrupt shard is not indexed; else its good samples are, as in ``penstock.formats``: for
            jobs that skip what is corrupt too.
        listener: Told how it goes.

    Raises:
        StoreError: the index cannot be read or written; a shard that cannot be read is in ``Built.failed``.
        ConfigError: the shards do not lie below the index's base URL.

    Cost: streams every shard that nothing is known of, one after the other, many requests ahead; a few small requests
    for each that has a footer or another tool's index. Interrupted, what is finished is kept.
    """
    found = resolve(shards, place.base_url)
    with IndexBuilder(place, index=DatasetIndex(place.base_url) if again else None) as builder:
        work = _Build(builder, listener, on_corrupt)
        todo = work.take_known(found, again=again)
        work.plan(todo)
        todo = work.take_footers(todo)
        if foreign_indexes and not again:
            todo = work.take_foreign(todo)
        work.read(todo)
    rows = [builder.index.row_of(each.key, size_bytes=each.size_bytes, etag=each.etag) for each in found]
    dataset = DatasetIndex(place.base_url, (row for row in rows if row is not None))
    return Built(dataset, place.url, tuple(work.failures), tuple(work.skipped))


class _Build:
    """One build."""

    def __init__(self, builder: IndexBuilder, listener: Listener | None, on_corrupt: OnCorrupt) -> None:
        self._builder = builder
        self._listener = listener
        self._on_corrupt = on_corrupt
        self.skipped: list[tuple[str, int]] = []
        self._late: list[tuple[Found, str]] = []  # whose names did not say that they have a footer
        self.failures: list[tuple[str, PenstockError]] = []

    def _done(self, index: ShardIndex, how: How) -> None:
        self._builder.add(index)
        if self._listener is not None:
            self._listener.indexed(index.row, how)

    def _fail(self, found: Found, error: PenstockError) -> None:
        self.failures.append((found.shard.url, error))
        if self._listener is not None:
            self._listener.failed(found.shard.url, error)

    def plan(self, todo: list[Found]) -> None:
        """Say what is to be done."""
        if self._listener is not None:
            self._listener.planned(len(todo), sum(each.size_bytes for each in todo))

    def take_known(self, found: list[Found], *, again: bool) -> list[Found]:
        """Keep what is in the index, or in a shard's own that a killed build left; give the rest."""
        if again:
            return found
        builder = self._builder
        todo = [each for each in found if not builder.has(each)]
        if todo:
            for row in builder.place.saved_rows({each.key for each in todo}):
                builder.add_row(row)  # of whatever version: `has` compares it
            todo = [each for each in todo if not builder.has(each)]
        missing = {each.key for each in todo}
        if self._listener is not None:
            for each in found:
                if each.key not in missing:
                    self._listener.indexed(builder.index.rows[each.key], "known")
        return todo

    # ── footers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_footers(self, todo: list[Found]) -> list[Found]:
        """Index the shards whose format has a footer, by their names; give the others."""
        rest, ranged = [], []
        for each in todo:
            name = _said(each) or format_of_name(each.shard.url)
            if name is not None and FORMATS[name].ranged is not None and each.size_bytes:
                ranged.append((each, name))
            else:
                rest.append(each)
        self._take_footers(ranged)
        return rest

    def _take_footers(self, ranged: list[tuple[Found, str]]) -> None:
        if not ranged:
            return
        pool = ThreadPoolExecutor(FOOTERS_IN_FLIGHT_MAX, thread_name_prefix="penstock-footers")
        try:
            futures = [pool.submit(_by_footer, each, name) for each, name in ranged]
            for (each, _), future in zip(ranged, futures, strict=True):
                try:
                    index = future.result()
                except (StoreError, DataError, ConfigError) as error:
                    self._fail(each, error)
                else:
                    self._done(index, "footer")
        finally:
            pool.shutdown(cancel_futures=True)

    # ── other tools' indexes ───────────────────────────────────────────────────────────────────────────────────────

    def take_foreign(self, todo: list[Found]) -> list[Found]:
        """Index the shards beside which another tool left an index that fits; give the others."""
        rest: list[Found] = []
        for store, group in _by_store(todo):
            beside = _foreign_keys(store, group)
            have = [(each, beside[each.shard.key]) for each in group if each.shard.key in beside]
            rest += [each for each in group if each.shard.key not in beside]
            for (each, _), index in zip(have, self._foreign(store, have), strict=True):
                if index is None:
                    rest.append(each)
                else:
                    self._done(index, "idx")
        return rest

    def _foreign(self, store: Store, have: list[tuple[Found, str]]) -> Iterator[ShardIndex | None]:
        head = ByteRange(0, HEAD_BYTES)
        requests = [request for each, key in have for request in ((key, None), (each.shard.key, head))]
        blobs = store.try_read_many(requests)
        for each, _ in have:
            said, shard_head = next(blobs), next(blobs)
            if isinstance(said, StoreError) or isinstance(shard_head, StoreError):
                yield None
                continue
            yield _from_foreign(store, each, said, shard_head)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, todo: list[Found]) -> None:
        """Index `todo` by reading it."""
        for store, group in _by_store(todo):
            settled = 0
            while settled < len(group):
                settled += self._read_some(store, group[settled:])
        late, self._late = self._late, []
        self._take_footers(late)

    def _read_some(self, store: Store, group: list[Found]) -> int:
        """Read shards until all are done, or one cannot be read; how many of them are settled."""
        plan = [PlanItem(each.shard.key, etag=each.if_match, size_bytes=each.size_bytes) for each in group]
        chunks = store.read_parts(plan)
        settled = 0
        current: _Reading | None = None
        try:
            for chunk in chunks:
                found = group[chunk.request_index]
                if current is None:
                    current = _Reading(found, self._on_corrupt)
                index = current.feed(chunk)
                if self._listener is not None:
                    self._listener.progressed(len(chunk.data))
                if chunk.last:
                    settled = chunk.request_index + 1
                    if current.ranged is not None:
                        self._late.append((found, current.ranged))
                    elif index is not None:
                        self._done(index, "read")
                        if current.skipped_samples:
                            self.skipped.append((found.shard.url, current.skipped_samples))
                    elif current.error is not None:
                        self._fail(found, current.error)
                    current = None
        except StoreError as error:
            self._fail(group[settled], error)
            return settled + 1
        finally:
            chunks.close()  # type: ignore[attr-defined]
        return len(group)


class _Reading:
    """One shard being read and parsed."""

    def __init__(self, found: Found, on_corrupt: OnCorrupt) -> None:
        self._found = found
        self._on_corrupt = on_corrupt
        self._parser: Parser | None = None
        self._recorder: ShardRecorder | None = None
        self.error: PenstockError | None = None
        self.ranged: str | None = None  # the format, where its footer says it all

    @property
    def skipped_samples(self) -> int:
        """Left out so far."""
        return 0 if self._parser is None else self._parser.skipped_samples

    def feed(self, chunk: Chunk) -> ShardIndex | None:
        """Take the next bytes; the shard's index when they were the last. A shard that is corrupt is passed over."""
        if self.error is not None or self.ranged is not None:
            return None
        try:
            if self._recorder is None:
                name = _format_of(self._found, bytes(chunk.data[:HEAD_BYTES]))
                if FORMATS[name].ranged is not None and chunk.data:
                    self.ranged = name
                    return None
                name_of_parser, url = _cheapest(name), self._found.shard.url
                self._parser = parser_of(name_of_parser, shard=url, on_corrupt=self._on_corrupt)
                self._recorder = ShardRecorder(self._found, name)
            assert self._parser is not None
            data = chunk.data
            for samples in feed_in_pieces(self._parser, chunk.data):
                self._recorder.feed(data, samples)
                data = data[:0]  # a compressed chunk grows in pieces, none of which is kept
            if not chunk.last:
                return None
            last = self._parser.finish()
            return self._recorder.finish(last, decided=self._parser.decided_format)
        except (DataError, ConfigError) as error:
            self.error = error
            return None


def _said(found: Found) -> str | None:
    """The format, where the job said it."""
    said: str | None = getattr(found.shard, "format", None)
    return said


def _format_of(found: Found, head: bytes) -> str:
    """Without what a job may say about the content of records: the next job may say otherwise."""
    return without_content(_said(found) or detect(found.shard.url, head))  # an empty shard goes by its name


def _by_footer(found: Found, format_name: str) -> ShardIndex:
    """The index of a shard, by its footer: how many samples. Cost: two or three requests.

    Raises:
        StoreError: it cannot be read, or is another version.
        DataError: it is not of the format.
    """
    reader = ranged_of(format_name, shard=found.shard.url, size_bytes=found.size_bytes)
    looking = reader.look()
    span = next(looking, None)
    while span is not None:
        blob = found.shard.store.read(found.shard.key, span)
        if found.if_match is not None and blob.etag != found.if_match:
            raise ObjectChangedError(f"the shard is now {blob.etag}, not {found.if_match}", url=found.shard.url)
        try:
            span = looking.send(blob.data)
        except StopIteration:
            break
    counts = [unit.samples_count for unit in reader.units]
    if None in counts:
        raise DataError("its footer does not say how many samples it has", shard=found.shard.url)
    count = sum(count for count in counts if count is not None)
    return ShardIndex(ShardRow(found.key, found.size_bytes, found.etag, count, format_name, has_offsets=False))


def _cheapest(format_name: str) -> str:
    """The format that gives the same samples with the least work: nobody looks at their fields here."""
    return f"{format_name}-raw" if f"{format_name}-raw" in FORMATS else format_name


def _by_store(todo: list[Found]) -> Iterator[tuple[Store, list[Found]]]:
    for _, group in groupby(todo, key=lambda each: id(each.shard.store)):
        members = list(group)
        yield members[0].shard.store, members


def _foreign_keys(store: Store, group: list[Found]) -> dict[str, str]:
    """Of each shard that has one no older than itself, the key of its index. Cost: a listing of the shards' folder."""
    folder = _common_folder([each.shard.key for each in group])
    try:
        written_s = {info.key: info.last_modified_s or 0.0 for info in store.list(folder)}
    except PenstockError:  # it cannot be listed
        return {}
    beside = {}
    for each in group:
        key = each.shard.key
        for candidate in foreign.candidates(key):
            if candidate in written_s and written_s[candidate] >= written_s.get(key, 0.0):
                beside[key] = candidate
                break
    return beside


def _common_folder(keys: list[str]) -> str:
    low, high = min(keys), max(keys)
    equal = 0
    while equal < min(len(low), len(high)) and low[equal] == high[equal]:
        equal += 1
    return low[: low.rfind("/", 0, equal) + 1]


def _from_foreign(store: Store, each: Found, said: Blob, head: Blob) -> ShardIndex | None:
    """The index of a shard by what another tool's `said`; None where that does not fit it."""
    try:
        name = _format_of(each, bytes(head.data))
        bounds = foreign.parse(said.data, format_name=name, size_bytes=each.size_bytes, name=said.key)
        offsets = bounds.offsets
        if bounds.last_is_end is None and len(offsets):
            last = int(offsets[-1])
            block = bytes(store.read(each.shard.key, ByteRange(last, last + HEAD_BYTES)).data)
            if block.strip(b"\0"):
                detect(each.shard.url, block)  # a sample begins there, or the index is of another shard
                offsets = np.append(offsets, each.size_bytes)
        count = max(0, len(offsets) - 1)
        offsets = offsets if len(offsets) else np.zeros(1, np.int64)
        if FORMATS[name].decide is not None and count:
            first = store.read(each.shard.key, ByteRange(0, int(offsets[1]))).data
            name = decided_format(name, first) or name
        row = ShardRow(each.key, each.size_bytes, each.etag, count, name, has_offsets=True)
        return ShardIndex(row, offsets=offsets)
    except (DataError, StoreError):
        return None
