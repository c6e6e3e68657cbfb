"""Recipes: how the shards of a plan are written, from objects or from the samples of other shards; and listeners for progress.

A recipe pickles, so that threads of this process and workers on other machines follow the same one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.config import MIB
from penstock.errors import DataError, StoreError
from penstock.fetch.plan import PlanItem
from penstock.formats import (
    FORMATS,
    HEAD_BYTES,
    detect,
    feed_in_pieces,
    format_of_name,
    parser_of,
    ranged_of,
    samples_of,
    undecoded,
)
from penstock.formats.compression import CompressedParser
from penstock.formats.mds import MdsParser
from penstock.pack.fields import select_fields
from penstock.pack.plan import check_sample_size
from penstock.pack.shard_file import ShardFile
from penstock.pack.written_formats import (
    FORMATS_WRITTEN,
    base_format,
    convert_mds_sample,
    convert_sample,
    with_key_field,
)
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.formats import OnCorrupt, Parser, Sample
    from penstock.formats.mds import Column
    from penstock.index import ShardRow
    from penstock.pack.entries import PlanEntry, PlanMember
    from penstock.pack.fields import FieldSpec
    from penstock.pack.plan import ShardPlan
    from penstock.pack.shard_file import ShardFolder
    from penstock.store import Store
    from penstock.types import Blob, Buffer, ByteRange

READ_REQUESTS_MAX = 4
READ_PART_BYTES = 2 * MIB
"""A source shard is read in four such parts at a time: 160 MB/s at 30 ms and 90 MB/s per connection, for each shard that
is being written (more shards, by `jobs`, if a store is slower). Larger parts, or more of them, lie in fresh memory until
they are parsed, and clearing that memory took up to a third of the CPU time of a conversion.

Source: docs/development/measurements.md."""

SAMPLES_PER_REPORT = 64
"""Samples between two reports of progress: a call under a lock for each sample would cost as much as a tar header."""

BYTES_PER_REPORT = 8 * 10**6
"""Bytes between two reports of progress, for large samples."""

ShardGroup: TypeAlias = "tuple[ShardPlan, ...]"
"""Shards that one thread or task writes one after the other."""


class PackListener(Protocol):
    """Receives the progress of a packing. Calls come from several threads, but never two at a time."""

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """This much is left to do. All three are 0 for an iterable, whose size is unknown."""

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """This many more samples, read from this many bytes, were taken."""

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """A shard and its index are stored; if `known`, an earlier run wrote them."""

    def verified(self, row: ShardRow) -> None:
        """A shard was read back and equals the bytes that were written."""


class NullListener:
    """A listener that does nothing."""

    def planned(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    progressed = finished = verified = planned


class Packed(NamedTuple):
    """The result of a packing.

    Attributes:
        url: URL of the folder that holds the shards.
        rows: Rows of the index, one per shard, in the order of the plan.
        shards_written: Number of shards that this run wrote; an earlier run wrote the others.
        passed_over: Number of files of the source that belong to no sample.
        classes: Labels as words, in the order of their numbers; None if labels are numbers or there are none.
    """

    url: str
    rows: tuple[ShardRow, ...]
    shards_written: int
    passed_over: int
    classes: tuple[str, ...] | None = None

    @property
    def samples_count(self) -> int:
        """Number of samples in all shards."""
        return sum(row.samples_count for row in self.rows)

    @property
    def size_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(row.size_bytes for row in self.rows)


class WriteContext(NamedTuple):
    """Where one machine reads and writes, and whom it tells.

    Attributes:
        folder: Folder of the shards.
        stores: Stores of the plan's roots, in their order.
        raise_if_stopped: Called before every sample; raises if the work must stop.
        report_progress: Called with the number of samples taken, and the bytes read for them, since the last call.
    """

    folder: ShardFolder
    stores: Sequence[Store]
    raise_if_stopped: Callable[[], None]
    report_progress: Callable[[int, int], None]


class Recipe(Protocol):
    """The way in which shards are written. It pickles."""

    @property
    def format(self) -> str:
        """Name of the format that is written."""

    def write(self, context: WriteContext, group: ShardGroup) -> Iterator[ShardRow]:
        """Write the shards of `group` one after the other; yield the row of each one when it is finished."""


# ── shards from objects ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesRecipe:
    """Writes shards whose samples are made of objects.

    Attributes:
        format: Name of the format that is written.
        transform: Function applied to each sample; None if there is none.
        key_field: Name of the field that takes the samples' keys; None if there is none.
    """

    format: str
    transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None
    key_field: str | None = None

    def write(self, context: WriteContext, group: ShardGroup) -> Iterator[ShardRow]:
        """Write the shards, whose samples are read ahead and in order; see ``Recipe.write``."""
        for shard in group:
            with ExitStack() as stack:
                readers = _readers(context, shard, stack)
                file = stack.enter_context(
                    ShardFile(context.folder, shard.name, format_name=self.format, key_field=self.key_field)
                )
                reported_count, unreported_bytes = 0, 0
                for count, entry in enumerate(shard.entries, 1):
                    context.raise_if_stopped()
                    file.add(self._sample(context, entry, readers))
                    unreported_bytes += entry.size_bytes
                    if count - reported_count == SAMPLES_PER_REPORT or unreported_bytes >= BYTES_PER_REPORT:
                        context.report_progress(count - reported_count, unreported_bytes)
                        reported_count, unreported_bytes = count, 0
                context.report_progress(len(shard.entries) - reported_count, unreported_bytes)
                row = file.close()
            yield row

    def _sample(self, context: WriteContext, entry: PlanEntry, readers: dict[int, Iterator[Blob]]) -> Mapping[str, Any]:
        sample: dict[str, Any] = {"__key__": entry.key}
        for member in entry.members:
            blob = next(readers[member.root])
            if len(blob.data) != member.size_bytes:
                url = context.stores[member.root].describe(member.key)
                raise StoreError(
                    f"it has {len(blob.data)} bytes, but the plan says {member.size_bytes}",
                    hint="the source changed since it was listed; --overwrite makes a new plan",
                    url=url,
                )
            sample[member.field] = blob.data
        sample.update(entry.values)
        result = sample if self.transform is None else apply_transform(self.transform, sample)
        return with_key_field(result, self.key_field)


def _readers(context: WriteContext, shard: ShardPlan, stack: ExitStack) -> dict[int, Iterator[Blob]]:
    """For each store, return an iterator over its objects of this shard, in the order in which they are needed."""
    requests: dict[int, list[PlanItem]] = {}
    for entry in shard.entries:
        for member in entry.members:
            item = PlanItem(member.key, etag=member.etag, size_bytes=member.size_bytes)
            requests.setdefault(member.root, []).append(item)
    readers = {}
    for root, items in requests.items():
        reader = context.stores[root].read_many(items)
        stack.callback(reader.close)  # type: ignore[attr-defined]
        readers[root] = reader
    return readers


def apply_transform(
    transform: Callable[[dict[str, Any]], Mapping[str, Any]], sample: dict[str, Any]
) -> Mapping[str, Any]:
    """Return `transform(sample)`, with the sample's key unless the result has another one.

    Raises:
        DataError: The transform failed, or its result is not a sample. It may not drop samples, because the number of
            samples of each shard is planned.
    """
    key = sample["__key__"]
    try:
        copied = {name: bytes(value) if isinstance(value, memoryview) else value for name, value in sample.items()}
        result = transform(copied)
    except Exception as error:
        raise failed(transform, error, kind=DataError, sample_key=key, stage="transform") from error
    if not hasattr(result, "items"):
        raise DataError(
            f"the transform returned {type(result).__name__}, not a sample",
            hint="leave samples out of the source instead: the number of samples in each shard is planned",
            sample_key=key,
            stage="transform",
        )
    return {"__key__": key, **result}


# ── shards from shards ──────────────────────────────────────────────────────────────────────────────────────────────


class _SourcePiece(NamedTuple):
    """The samples of one source that go into one shard of a group: those that begin in these bytes.

    Attributes:
        target: Number of the shard in its group.
        entry: The source.
        start: First byte of the piece.
        end: Byte after the piece; None for the end of the source.
    """

    target: int
    entry: PlanEntry
    start: int
    end: int | None


class _ParsedPart(NamedTuple):
    """Samples of a source shard.

    Attributes:
        samples: The samples.
        size_bytes: Bytes that were read for them.
        format: Name of the source's format.
        columns: Columns of an MDS source; otherwise empty.
    """

    samples: Sequence[Sample]
    size_bytes: int
    format: str
    columns: tuple[Column, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRecipe:
    """Writes shards from the samples of other shards.

    Attributes:
        format: Name of the format that is written.
        source_format: Name of the sources' format; None if their names and first bytes decide it.
        on_corrupt: Policy for corrupt samples of the sources.
        specs: Fields that are taken; None takes all.
        key_field: Name of the field that takes the samples' keys; None if there is none.
        bytes_max: Size limit of a new shard in bytes, and so of a sample; None if each source becomes one shard.
        allow_loss: Whether keys that TFRecord sources store may be lost.
    """

    format: str
    source_format: str | None
    on_corrupt: OnCorrupt
    specs: tuple[FieldSpec, ...] | None
    key_field: str | None
    bytes_max: int | None
    allow_loss: bool = False

    def write(self, context: WriteContext, group: ShardGroup) -> Iterator[ShardRow]:
        """Write the shards; see ``Recipe.write``."""
        with ExitStack() as stack:
            file: ShardFile | None = None
            target = -1
            for number, sample in self._samples(context, group):
                while target < number:
                    if file is not None:
                        yield file.close()
                    target += 1
                    file = stack.enter_context(
                        ShardFile(context.folder, group[target].name, format_name=self.format, key_field=self.key_field)
                    )
                assert file is not None
                if sample is not None:
                    file.add(sample)
            assert file is not None
            yield file.close()

    def _samples(self, context: WriteContext, group: ShardGroup) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield pairs of a shard's number in the group and a sample, in order; a sample None begins a shard."""
        pieces = [
            _SourcePiece(target, entry, entry.values.get("from", 0), entry.values.get("to"))
            for target, shard in enumerate(group)
            for entry in shard.entries
        ]
        for _, of_source in groupby(pieces, key=lambda piece: piece.entry.members):
            yield from self._samples_of_source(context, list(of_source))
        yield len(group) - 1, None

    def _samples_of_source(
        self, context: WriteContext, pieces: list[_SourcePiece]
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield the samples of one source for the shards, reading it once and no further than they need."""
        (member,) = pieces[0].entry.members
        waiting = iter(pieces)
        piece = next(waiting)
        yield piece.target, None
        for samples, size_bytes, name, columns in self._read(context.stores[member.root], member, pieces[0].entry.key):
            context.raise_if_stopped()
            is_whole = FORMATS[name].unit == "shard"
            for sample in samples:
                at = 0 if is_whole else sample.offset_bytes
                while piece.end is not None and at >= piece.end:
                    following = next(waiting, None)
                    if following is None:
                        return
                    piece = following
                if at >= piece.start:
                    yield piece.target, self._converted(sample, base_format(name), columns)
            context.report_progress(len(samples), size_bytes)

    def _converted(self, sample: Sample, source: str, columns: tuple[Column, ...]) -> dict[str, Any]:
        if self.bytes_max is not None and sample.size_bytes is not None:
            check_sample_size(sample.key, sample.size_bytes, self.bytes_max)
        if source == "tfrecord":  # only its records show whether they have keys
            self._refuse_lost_key(sample)
        if self.specs is not None:
            taken = select_fields(sample.fields, self.specs, sample.key)
            sample = type(sample)(sample.key, {}, sample.offset_bytes)
            sample.fields = taken
            if any(not isinstance(value, memoryview) for value in taken.values()):
                fields: dict[str, object] = {"__key__": sample.key, **taken}
                return fields if self.key_field is None else {self.key_field: sample.key, **fields}
        target = base_format(self.format)
        if source == target == "mds" and self.specs is None:
            return convert_mds_sample(sample, columns, key_field=self.key_field)
        return convert_sample(sample, source, target, key_field=self.key_field)

    def _refuse_lost_key(self, sample: Sample) -> None:
        is_stored = sample.key != f"{sample.offset_bytes:012d}"
        if (
            is_stored
            and self.key_field is None
            and not self.allow_loss
            and not FORMATS_WRITTEN[self.format].features.keys
        ):
            raise DataError(
                f"{self.format} would lose its key",
                hint="--key-field stores it, --allow-loss (allow_loss=True) does without",
                sample_key=sample.key,
            )

    def _read(self, store: Store, member: PlanMember, url: str) -> Iterator[_ParsedPart]:
        """Yield the samples of a source shard, a part at a time."""
        known = self.source_format or format_of_name(url)
        if known is not None and FORMATS[known].ranged is not None:
            yield from self._read_ranged(store, member, url, known)
            return
        if not member.size_bytes:
            yield _ParsedPart([], 0, known or "tar")
            return
        parser, name = None, ""
        item = PlanItem(member.key, etag=member.etag, size_bytes=member.size_bytes)
        chunks = store.read_parts([item], part_bytes=READ_PART_BYTES, requests_max=READ_REQUESTS_MAX)
        try:
            for chunk in chunks:
                if parser is None:
                    name = self._parsed_as(self.source_format or detect(url, bytes(chunk.data[:HEAD_BYTES])))
                    parser = parser_of(name, shard=url, on_corrupt=self.on_corrupt)
                size_bytes = len(chunk.data)
                for samples in feed_in_pieces(parser, chunk.data):
                    yield _ParsedPart(samples, size_bytes, name, _mds_columns(parser))
                    size_bytes = 0
            assert parser is not None
            yield _ParsedPart(parser.finish(), 0, name, _mds_columns(parser))
        finally:
            chunks.close()  # type: ignore[attr-defined]

    def _parsed_as(self, name: str) -> str:
        """Return the format to parse with: records that become records are not decoded."""
        records = ("tfrecord", "recordio")
        is_record = base_format(self.format) in records and self.specs is None and self.key_field is None
        return undecoded(name) if is_record and base_format(name) in records else name

    def _read_ranged(self, store: Store, member: PlanMember, url: str, name: str) -> Iterator[_ParsedPart]:
        reader = ranged_of(name, shard=url, size_bytes=member.size_bytes, on_corrupt=self.on_corrupt)
        read_bytes = 0

        def read(span: ByteRange) -> Buffer:
            nonlocal read_bytes
            read_bytes += span.end - span.start
            return next(iter(store.read_many([PlanItem(member.key, span, member.etag)]))).data

        for samples in samples_of(reader, read):
            yield _ParsedPart(samples, read_bytes, name)
            read_bytes = 0


def _mds_columns(parser: Parser) -> tuple[Column, ...]:
    """Return how an MDS shard encodes its values; () for other formats."""
    inner = parser.inner if isinstance(parser, CompressedParser) else parser
    return inner.columns if isinstance(inner, MdsParser) else ()
