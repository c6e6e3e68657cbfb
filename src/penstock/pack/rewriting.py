"""Shards written from shards: their samples read in order, made to fit another format, and dealt to new shards."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import MIB
from penstock.errors import DataError
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
)
from penstock.formats.compression import CompressedParser
from penstock.formats.mds import MdsParser
from penstock.pack import keeping
from penstock.pack.fields import take
from penstock.pack.plan import check_sample_size
from penstock.pack.shard_file import FORMATS_WRITTEN, ShardFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.formats import OnCorrupt, Parser, Sample
    from penstock.formats.mds import Column
    from penstock.index import ShardRow
    from penstock.pack.entries import Entry, Member
    from penstock.pack.fields import Spec
    from penstock.pack.running import Desk, Unit
    from penstock.store import Store
    from penstock.types import Buffer, ByteRange

READ_REQUESTS_MAX = 4
READ_PART_BYTES = 2 * MIB
"""A source is read in four such parts at a time: 160 MB/s at 30 ms and 90 MB/s a connection, for each shard at work (more
of them, by `jobs`, where a store is slower). Larger parts, or more, lie in fresh memory until their turn, and clearing
that was up to a third of the CPU of a conversion (docs/development/experiments.md)."""


class _Piece(NamedTuple):
    """Of a source, what goes into one of a unit's shards: samples that begin in these bytes."""

    target: int
    entry: Entry
    start: int
    end: int | None


class _Part(NamedTuple):
    """Samples of a shard, the bytes that were read for them, its format, and of MDS its columns."""

    samples: Sequence[Sample]
    size_bytes: int
    format: str
    columns: tuple[Column, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRecipe:
    """Writes shards from shards.

    Attributes:
        format: That is written.
        source_format: Of the sources, where it was said.
        on_corrupt: Of the sources.
        specs: Fields that are taken; None: all.
        key_field: Name of the field that takes the keys.
        bytes_max: Of a sample too, where shards are cut anew.
        allow_loss: Whether a TFRecord's own key may be lost.
    """

    format: str
    source_format: str | None
    on_corrupt: OnCorrupt
    specs: tuple[Spec, ...] | None
    key_field: str | None
    bytes_max: int | None
    allow_loss: bool = False

    def write(self, desk: Desk, unit: Unit) -> Iterator[ShardRow]:
        """See ``Recipe``."""
        with ExitStack() as stack:
            file: ShardFile | None = None
            target = -1
            for number, sample in self._samples(desk, unit):
                while target < number:
                    if file is not None:
                        yield file.close()
                    target += 1
                    file = stack.enter_context(
                        ShardFile(desk.shelf, unit[target].name, format_name=self.format, key_field=self.key_field)
                    )
                assert file is not None
                if sample is not None:
                    file.add(sample)
            assert file is not None
            yield file.close()

    def _samples(self, desk: Desk, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(which of the unit's shards, sample) in order; None begins a shard."""
        pieces = [
            _Piece(target, entry, entry.values.get("from", 0), entry.values.get("to"))
            for target, shard in enumerate(unit)
            for entry in shard.entries
        ]
        for _, group in groupby(pieces, key=lambda piece: piece.entry.members):
            yield from self._of_source(desk, list(group))
        yield len(unit) - 1, None

    def _of_source(self, desk: Desk, pieces: list[_Piece]) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """What one source gives to some shards, read once and no further than they need."""
        (member,) = pieces[0].entry.members
        waiting = iter(pieces)
        piece = next(waiting)
        yield piece.target, None
        for samples, size_bytes, name, columns in self._read(desk.stores[member.root], member, pieces[0].entry.key):
            desk.going_on()
            is_whole = FORMATS[name].unit == "shard"
            for sample in samples:
                at = 0 if is_whole else sample.offset_bytes
                while piece.end is not None and at >= piece.end:
                    following = next(waiting, None)
                    if following is None:
                        return
                    piece = following
                if at >= piece.start:
                    yield piece.target, self._made(sample, keeping.plain(name), columns)
            desk.progressed(len(samples), size_bytes)

    def _made(self, sample: Sample, source: str, columns: tuple[Column, ...]) -> dict[str, Any]:
        if self.bytes_max is not None and sample.size_bytes is not None:
            check_sample_size(sample.key, sample.size_bytes, self.bytes_max)
        if source == "tfrecord":  # nothing else tells beforehand whether its records have keys
            self._refuse_lost_key(sample)
        if self.specs is not None:
            taken = take(sample.fields, self.specs, sample.key)
            sample = type(sample)(sample.key, {}, sample.offset_bytes)
            sample.fields = taken
            if any(not isinstance(value, memoryview) for value in taken.values()):
                made: dict[str, object] = {"__key__": sample.key, **taken}
                return made if self.key_field is None else {self.key_field: sample.key, **made}
        target = keeping.plain(self.format)
        if source == target == "mds" and self.specs is None:
            return keeping.encoded(sample, columns, key_field=self.key_field)
        return keeping.converted(sample, source, target, key_field=self.key_field)

    def _refuse_lost_key(self, sample: Sample) -> None:
        is_own = sample.key != f"{sample.offset_bytes:012d}"
        if is_own and self.key_field is None and not self.allow_loss and not FORMATS_WRITTEN[self.format].holds_keys:
            raise DataError(
                f"{self.format} would lose its key",
                hint="--key-field stores it, --allow-loss (allow_loss=True) does without",
                sample_key=sample.key,
            )

    def _read(self, store: Store, member: Member, url: str) -> Iterator[_Part]:
        """A shard's samples, a part at a time."""
        said = self.source_format or format_of_name(url)
        if said is not None and FORMATS[said].ranged is not None:
            yield from self._read_ranged(store, member, url, said)
            return
        if not member.size_bytes:
            yield _Part([], 0, said or "tar")
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
                    yield _Part(samples, size_bytes, name, _columns_of(parser))
                    size_bytes = 0
            assert parser is not None
            yield _Part(parser.finish(), 0, name, _columns_of(parser))
        finally:
            chunks.close()  # type: ignore[attr-defined]

    def _parsed_as(self, name: str) -> str:
        """Records that go into records are not looked into."""
        records = ("tfrecord", "recordio")
        is_record = keeping.plain(self.format) in records and self.specs is None and self.key_field is None
        return keeping.raw(name) if is_record and keeping.plain(name) in records else name

    def _read_ranged(self, store: Store, member: Member, url: str, name: str) -> Iterator[_Part]:
        reader = ranged_of(name, shard=url, size_bytes=member.size_bytes, on_corrupt=self.on_corrupt)
        read_bytes = 0

        def read(span: ByteRange) -> Buffer:
            nonlocal read_bytes
            read_bytes += span.end - span.start
            return next(iter(store.read_many([PlanItem(member.key, span, member.etag)]))).data

        for samples in samples_of(reader, read):
            yield _Part(samples, read_bytes, name)
            read_bytes = 0


def _columns_of(parser: Parser) -> tuple[Column, ...]:
    """Of MDS, how its values are encoded."""
    found = parser.inner if isinstance(parser, CompressedParser) else parser
    return found.columns if isinstance(found, MdsParser) else ()
