"""Building an index: known shards are kept, footers and other tools' indexes are read, and the other shards are parsed.

One ``read_parts`` reads all shards in sequence. Its requests run ahead into the next shards, so many shards are on their way
while one is parsed, and memory stays within the byte budget. The index of each finished shard is written at once, for the
version that was read, so a build that was killed continues where it stopped.

Other tools may have left indexes beside the shards. They say where samples lie, so the shards need not be read.

| file | written by | what it holds |
|---|---|---|
| ``x.tfrecord.idx``, ``x.idx`` | tfrecord2idx, DALI | text: ``offset size`` of each record, framing included |
| ``x.tar.idx`` | Megatron-Energon | uint64, little endian: start of each sample; some have the end of the last sample too |
| ``x.idx`` of a tar | DALI's wds2idx | text: ``v1.1`` or ``v1.2``, a count, and for each sample extensions, offsets and sizes |
| ``x.idx`` of a RecordIO file | MXNet's im2rec | text: ``number<tab>offset`` of each record |

None of them names the version of its shard, so each is compared with the shard: the offsets must ascend and end where the
shard ends, and the file must not be older. These indexes have no checksums and no keys; ``penstock index --again`` reads the
shards.

WebDataset's ``wids`` index is not used: it has counts without offsets, so the shards would have to be read anyway.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.errors import ConfigError, DataError, PenstockError, StoreError
from penstock.fetch import PlanItem
from penstock.formats import (
    FORMATS,
    HEAD_BYTES,
    decided_format,
    detect,
    feed_in_pieces,
    format_of_name,
    look_into,
    parser_of,
    ranged_of,
    without_content,
)
from penstock.index.dataset_index import DatasetIndex
from penstock.index.place import resolve
from penstock.index.recorder import IndexBuilder, ShardRecorder
from penstock.index.shard_index import ShardIndex, ShardRow
from penstock.text.patterns import common_folder
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.formats import OnCorrupt, Parser
    from penstock.index.place import IndexPlace, ShardLike, VersionedShard
    from penstock.index.recorder import IndexedVersion
    from penstock.store import Store
    from penstock.types import Blob, Buffer, Key

FOOTERS_IN_FLIGHT_MAX = 32
"""Shards whose footers are read at the same time; each needs two or three requests, one after the other."""


FOREIGN_SUFFIX = ".idx"

_BLOCK_BYTES = 512  # a tar's block

IndexMethod: TypeAlias = Literal["known", "footer", "idx", "read"]


class BuildListener(Protocol):
    """Receives the progress of a build, in the thread that builds."""

    def planned(self, shards_count: int, size_bytes: int) -> None:
        """This many shards, with this many bytes together, must be indexed."""

    def progressed(self, size_bytes: int) -> None:
        """This many more bytes were read."""

    def indexed(self, row: ShardRow, how: IndexMethod) -> None:
        """A shard is in the index: already, by its footer, by another tool's index, or by reading it."""

    def failed(self, url: str, error: PenstockError) -> None:
        """A shard could not be indexed; the build continues with the others."""


class Built(NamedTuple):
    """The result of a build.

    Attributes:
        dataset: Rows of exactly the given shards, without those that failed.
        url: URL of the folder that holds the index.
        failed: URL and error of each shard that could not be indexed.
        skipped: URL of each shard that was indexed without its corrupt samples, and the number of those samples.
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
    listener: BuildListener | None = None,
) -> Built:
    """Index those of `shards` whose present version is not indexed.

    Args:
        shards: Listed shards.
        place: Place of the index.
        again: Whether to read all shards, even those that are indexed.
        foreign_indexes: Whether to take offsets from other tools' indexes beside the shards.
        on_corrupt: ``raise`` does not index corrupt shards; other values, see ``penstock.formats``, index their good samples,
            for jobs that skip corrupt ones too.
        listener: Receives progress; None if there is none.

    Raises:
        StoreError: The index cannot be read or written. A shard that cannot be read is in ``Built.failed`` instead.
        ConfigError: The shards do not lie below the index's base URL.

    Cost: streams every unknown shard in sequence, many requests ahead; a few small requests for each shard that has a
    footer or another tool's index. After an interruption, finished shards are kept.
    """
    versioned = resolve(shards, place.base_url)
    with IndexBuilder(place, index=DatasetIndex(place.base_url) if again else None) as builder:
        work = _Build(builder, listener, on_corrupt)
        todo = work.take_known(versioned, again=again)
        if listener is not None:
            listener.planned(len(todo), sum(each.size_bytes for each in todo))
        todo = work.take_footers(todo)
        if foreign_indexes and not again:
            todo = work.take_foreign(todo)
        work.read(todo)
    rows = [builder.index.row_of(each.key, size_bytes=each.size_bytes, etag=each.etag) for each in versioned]
    dataset = DatasetIndex(place.base_url, (row for row in rows if row is not None))
    return Built(dataset, place.url, tuple(work.failures), tuple(work.skipped))


class _Build:
    """Indexes shards by each way that applies, and collects the failures."""

    def __init__(self, builder: IndexBuilder, listener: BuildListener | None, on_corrupt: OnCorrupt) -> None:
        self._builder = builder
        self._listener = listener
        self._on_corrupt = on_corrupt
        self.skipped: list[tuple[str, int]] = []
        # Shards that have a footer, although their names did not show it.
        self._late: list[tuple[VersionedShard, str]] = []
        self.failures: list[tuple[str, PenstockError]] = []

    def _done(self, index: ShardIndex, how: IndexMethod) -> None:
        self._builder.add(index)
        if self._listener is not None:
            self._listener.indexed(index.row, how)

    def _fail(self, versioned: VersionedShard, error: PenstockError) -> None:
        self.failures.append((versioned.shard.url, error))
        if self._listener is not None:
            self._listener.failed(versioned.shard.url, error)

    def take_known(self, versioned: list[VersionedShard], *, again: bool) -> list[VersionedShard]:
        """Keep the rows of the index, and of indexes of shards that a killed build left; return the other shards."""
        if again:
            return versioned
        builder = self._builder
        todo = [each for each in versioned if not builder.has(each)]
        if todo:
            for row in builder.place.saved_rows({each.key for each in todo}):
                builder.add_row(row)  # of any version, which `has` compares
            todo = [each for each in todo if not builder.has(each)]
        missing = {each.key for each in todo}
        if self._listener is not None:
            for each in versioned:
                if each.key not in missing:
                    self._listener.indexed(builder.index.rows[each.key], "known")
        return todo

    # ── footers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_footers(self, todo: list[VersionedShard]) -> list[VersionedShard]:
        """Index the shards whose names show a format with a footer; return the others."""
        rest, ranged = [], []
        for each in todo:
            name = _given_format(each) or format_of_name(each.shard.url)
            if name is not None and FORMATS[name].ranged is not None and each.size_bytes:
                ranged.append((each, name))
            else:
                rest.append(each)
        self._take_footers(ranged)
        return rest

    def _take_footers(self, ranged: list[tuple[VersionedShard, str]]) -> None:
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

    def take_foreign(self, todo: list[VersionedShard]) -> list[VersionedShard]:
        """Index the shards beside which another tool left an index that fits; return the others."""
        rest: list[VersionedShard] = []
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

    def _foreign(self, store: Store, have: list[tuple[VersionedShard, str]]) -> Iterator[ShardIndex | None]:
        head = ByteRange(0, HEAD_BYTES)
        requests = [request for each, key in have for request in ((key, None), (each.shard.key, head))]
        blobs = store.try_read_many(requests)
        for each, _ in have:
            blob, shard_head = next(blobs), next(blobs)
            if isinstance(blob, StoreError) or isinstance(shard_head, StoreError):
                yield None
                continue
            yield _from_foreign(store, each, blob, shard_head)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, todo: list[VersionedShard]) -> None:
        """Index the shards of `todo` by reading them."""
        for store, group in _by_store(todo):
            done_count = 0
            while done_count < len(group):
                done_count += self._read_some(store, group[done_count:])
        late, self._late = self._late, []
        self._take_footers(late)

    def _read_some(self, store: Store, group: list[VersionedShard]) -> int:
        """Read shards until all are done, or one cannot be read; return the number of shards that are done."""
        plan = [PlanItem(each.shard.key, etag=each.if_match, size_bytes=each.size_bytes) for each in group]
        chunks = store.read_parts(plan)
        done_count = 0
        current: ShardReading | None = None
        try:
            for chunk in chunks:
                versioned = group[chunk.request_index]
                if current is None:
                    current = ShardReading(
                        versioned,
                        url=versioned.shard.url,
                        format_name=_given_format(versioned),
                        on_corrupt=self._on_corrupt,
                    )
                index = current.feed(chunk.data, is_last=chunk.last)
                if self._listener is not None:
                    self._listener.progressed(len(chunk.data))
                if chunk.last:
                    done_count = chunk.request_index + 1
                    if current.ranged is not None:
                        self._late.append((versioned, current.ranged))
                    elif index is not None:
                        self._done(index, "read")
                        if current.skipped_samples:
                            self.skipped.append((versioned.shard.url, current.skipped_samples))
                    elif current.error is not None:
                        self._fail(versioned, current.error)
                    current = None
        except StoreError as error:
            self._fail(group[done_count], error)
            return done_count + 1
        finally:
            chunks.close()  # type: ignore[attr-defined]
        return len(group)


class ShardReading:
    """A shard that is being read from its first byte to its last, and indexed.

    Args:
        shard: Key of the shard in the index, and its version.
        url: URL or key, which may say what its format is if the content does not.
        format_name: Format of the shard, if the job names one.
        on_corrupt: Policy for corrupt samples; see ``penstock.formats``.

    Attributes:
        error: Why it cannot be indexed; the rest of its bytes is ignored.
        ranged: Name of its format if that has a footer, with the offsets of samples; the bytes are ignored then.
    """

    def __init__(
        self, shard: IndexedVersion, *, url: str, format_name: str | None = None, on_corrupt: OnCorrupt = "raise"
    ) -> None:
        self._shard = shard
        self._url = url
        self._given_format = format_name
        self._on_corrupt = on_corrupt
        self._parser: Parser | None = None
        self._recorder: ShardRecorder | None = None
        self.error: PenstockError | None = None
        self.ranged: str | None = None

    @property
    def skipped_samples(self) -> int:
        """Number of corrupt samples left out so far."""
        return 0 if self._parser is None else self._parser.skipped_samples

    def feed(self, data: Buffer, *, is_last: bool) -> ShardIndex | None:
        """Take the next bytes, at first at least ``HEAD_BYTES`` if there are so many; return the index after the last ones."""
        if self.error is not None or self.ranged is not None:
            return None
        try:
            if self._recorder is None:
                # The name decides for an empty shard.
                name = without_content(self._given_format or detect(self._url, bytes(data[:HEAD_BYTES])))
                if FORMATS[name].ranged is not None and len(data):
                    self.ranged = name
                    return None
                raw = f"{name}-raw" if f"{name}-raw" in FORMATS else name  # the fields are not needed here
                self._parser = parser_of(raw, shard=self._url, on_corrupt=self._on_corrupt)
                self._recorder = ShardRecorder(self._shard, name)
            assert self._parser is not None
            for samples in feed_in_pieces(self._parser, data):
                self._recorder.feed(data, samples)
                data = data[:0]  # a compressed chunk gives several pieces, and its bytes count once
            if not is_last:
                return None
            last = self._parser.finish()
            return self._recorder.finish(last, decided=self._parser.decided_format)
        except (DataError, ConfigError) as error:
            self.error = error
            return None


def _given_format(shard: VersionedShard) -> str | None:
    """Return the format that the job names; None if it names none."""
    given: str | None = getattr(shard.shard, "format", None)
    return given


def _by_footer(versioned: VersionedShard, format_name: str) -> ShardIndex:
    """Return the index of a shard from its footer, which has the number of samples. Cost: two or three requests.

    Raises:
        StoreError: The shard cannot be read, or is another version.
        DataError: The shard is not of the format.
    """
    reader = ranged_of(format_name, shard=versioned.shard.url, size_bytes=versioned.size_bytes)

    def read(span: ByteRange) -> Buffer:
        return next(versioned.shard.store.read_many([PlanItem(versioned.shard.key, span, versioned.if_match)])).data

    look_into(reader, read)
    count = sum(unit.samples_count for unit in reader.units)
    return ShardIndex(
        ShardRow(versioned.key, versioned.size_bytes, versioned.etag, count, format_name, has_offsets=False)
    )


def _by_store(todo: list[VersionedShard]) -> Iterator[tuple[Store, list[VersionedShard]]]:
    for _, group in groupby(todo, key=lambda each: id(each.shard.store)):
        members = list(group)
        yield members[0].shard.store, members


def _foreign_keys(store: Store, group: list[VersionedShard]) -> dict[str, str]:
    """Return the keys of indexes that are not older than their shards, by shard. Cost: a listing of the shards' folder."""
    folder = common_folder([each.shard.key for each in group])
    try:
        written_s = {info.key: info.last_modified_s or 0.0 for info in store.list(folder)}
    except PenstockError:  # it cannot be listed
        return {}
    beside = {}
    for each in group:
        key = each.shard.key
        for candidate in foreign_keys(key):
            if candidate in written_s and written_s[candidate] >= written_s.get(key, 0.0):
                beside[key] = candidate
                break
    return beside


def _from_foreign(store: Store, each: VersionedShard, blob: Blob, head: Blob) -> ShardIndex | None:
    """Return the index of a shard from another tool's index `blob`; None if that does not fit the shard."""
    try:
        # The content of records is left out, because another job may declare it differently.
        name = without_content(_given_format(each) or detect(each.shard.url, bytes(head.data)))
        bounds = parse_foreign(blob.data, format_name=name, size_bytes=each.size_bytes, name=blob.key)
        offsets = bounds.offsets
        if bounds.last_is_end is None and len(offsets):
            last = int(offsets[-1])
            block = bytes(store.read(each.shard.key, ByteRange(last, last + HEAD_BYTES)).data)
            if block.strip(b"\0"):
                detect(each.shard.url, block)  # raises if no sample begins there, so that the index does not fit
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


# ── the files of other tools ────────────────────────────────────────────────────────────────────────────────────────


class ForeignBounds(NamedTuple):
    """The content of such a file.

    Attributes:
        offsets: int64[n], ascending offsets in bytes.
        last_is_end: Whether the last offset is the end of the last sample; None if only the shard's bytes can tell.
    """

    offsets: NDArray[np.int64]
    last_is_end: bool | None


def foreign_keys(key: Key) -> tuple[Key, ...]:
    """Return the keys of possible indexes of the shard `key`: ``.idx`` after its name, or in place of its suffix."""
    folder, _, name = key.rpartition("/")
    stem = name.rpartition(".")[0]
    with_stem = f"{folder}/{stem}{FOREIGN_SUFFIX}" if folder else f"{stem}{FOREIGN_SUFFIX}"
    return (key + FOREIGN_SUFFIX, with_stem) if stem else (key + FOREIGN_SUFFIX,)


def parse_foreign(data: Buffer, *, format_name: str, size_bytes: int, name: str) -> ForeignBounds:
    """Return the bounds in a shard's index.

    Args:
        data: uint8[n], the index.
        format_name: Format of the shard.
        size_bytes: Size of the shard in bytes.
        name: Name of the index, for errors.

    Raises:
        DataError: The index is not of a kind that this module describes, or does not fit the shard.
    """
    raw = bytes(data)
    reader = _READERS.get(format_name)
    if reader is None:
        raise DataError(f"penstock knows no foreign index for shards of format {format_name}", shard=name)
    try:
        bounds = reader(raw, size_bytes)
    except (ValueError, IndexError) as error:
        raise DataError(f"it is not an index of a {format_name} shard ({error})", shard=name) from error
    offsets = bounds.offsets
    if len(offsets) and (int(offsets[0]) < 0 or int(offsets[-1]) > size_bytes or bool((np.diff(offsets) <= 0).any())):
        raise DataError(f"its offsets do not ascend within the {size_bytes} bytes of the shard", shard=name)
    return bounds


def _tfrecord(raw: bytes, size_bytes: int) -> ForeignBounds:
    table = _table(raw, 2)
    starts, sizes = table[:, 0], table[:, 1]
    if len(starts) and (starts[0] != 0 or bool((starts[1:] != (starts + sizes)[:-1]).any())):
        raise ValueError("its records are not contiguous")
    end = int(starts[-1] + sizes[-1]) if len(starts) else 0
    if end != size_bytes:
        raise ValueError(f"its records end at byte {end} of {size_bytes}")
    return ForeignBounds(np.append(starts, end), last_is_end=True)


def _recordio(raw: bytes, size_bytes: int) -> ForeignBounds:
    starts = np.sort(_table(raw, 2)[:, 1])
    if len(starts) and starts[0] != 0:
        raise ValueError(f"its first record begins at byte {starts[0]}")
    return ForeignBounds(np.append(starts, size_bytes), last_is_end=True)


def _tar(raw: bytes, size_bytes: int) -> ForeignBounds:
    if raw[:2] == b"v1":
        return _wds2idx(raw)
    if len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes are not a table of uint64")
    offsets = np.frombuffer(raw, "<u8").astype(np.int64)
    if bool((offsets % _BLOCK_BYTES).any()):
        raise ValueError("an offset is not a multiple of 512")
    if len(offsets) and offsets[0] != 0:
        raise ValueError(f"its first sample begins at byte {offsets[0]}")
    return ForeignBounds(offsets, last_is_end=True if len(offsets) and offsets[-1] == size_bytes else None)


def _wds2idx(raw: bytes) -> ForeignBounds:
    """Parse an index of the members' data. A sample's extent ends with the last block of its last member."""
    head, *lines = raw.decode().splitlines()
    version, count = head.split()
    fields = {"v1.1": 3, "v1.2": 4}.get(version)
    if fields is None or len(lines) != int(count):
        raise ValueError(f"{version} with {len(lines)} of {count} samples")
    ends = [0]
    for line in lines:
        words = line.split()
        if not words or len(words) % fields:
            raise ValueError(f"{line[:60]!r} does not have {fields} words per member")
        data_ends = [int(words[at + 1]) + int(words[at + 2]) for at in range(0, len(words), fields)]
        ends.append(-(-max(data_ends) // _BLOCK_BYTES) * _BLOCK_BYTES)
    return ForeignBounds(np.array(ends, np.int64), last_is_end=True)


def _table(raw: bytes, columns: int) -> NDArray[np.int64]:
    words = raw.split()
    if len(words) % columns or len(words) != columns * len(raw.splitlines()):
        raise ValueError(f"{len(words)} words are not lines of {columns} words")
    return np.array([int(word) for word in words], np.int64).reshape(-1, columns)


_READERS: dict[str, Callable[[bytes, int], ForeignBounds]] = {
    "tar": _tar,
    "tfrecord": _tfrecord,
    "tfrecord-raw": _tfrecord,
    "recordio": _recordio,
}
