"""``SampleMap``: a data set's samples by number, for random access."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from penstock.crc import sample_crc
from penstock.errors import ConfigError, CorruptShardError
from penstock.formats import FORMATS, decided_format, narrowed, parser_of
from penstock.index.recorder import Verifier
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from penstock.formats import Sample
    from penstock.index.lookup import Lookup
    from penstock.index.shard_index import ShardIndex, ShardRow
    from penstock.types import Buffer


class SampleExtent(NamedTuple):
    """Where a sample lies.

    Attributes:
        shard: Number of its shard.
        sample: Number of the sample in the shard.
        span: Its bytes.
        known: The index of the shard.
    """

    shard: int
    sample: int
    span: ByteRange
    known: ShardIndex


class SampleMap:
    """Where each sample of a data set lies, by its number over all shards; and how its bytes become a sample.

    Args:
        known: A complete lookup, of formats that can be entered at any sample.
        indexes_max: Number of shards' indexes to keep; one call keeps those that it needs. None: all that were needed.

    Raises:
        ConfigError: a shard is not indexed, or cannot be entered at a sample.

    Cost: O(shards), and 12 bytes for each sample of the shards whose indexes are kept.
    """

    def __init__(self, known: Lookup, *, indexes_max: int | None = None) -> None:
        rows: list[ShardRow] = []
        for found, row in zip(known.found, known.rows, strict=True):
            if row is None:
                raise ConfigError(f"{found.shard.url} is not indexed in this version", hint="run penstock index")
            if not row.has_offsets:
                raise ConfigError(
                    f"{found.shard.url} is {row.format}, which cannot be entered at a sample",
                    hint="unpack it, or read it in order",
                )
            rows.append(row)
        self._known = known
        self._rows = rows
        said = (getattr(found.shard, "format", None) for found in known.found)
        self._formats = [narrowed(each, row.format) for each, row in zip(said, rows, strict=True)]
        # a list: NumPy's search lets go of the interpreter for one number, and gets it back 60 µs later
        self._starts = [0, *accumulate(row.samples_count for row in rows)]
        self._indexes: dict[int, ShardIndex] = {}
        self._indexes_max = indexes_max
        self._heads: dict[int, Buffer] = {}
        self._by_key: dict[str, int] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def starts(self) -> Sequence[int]:
        """The number of the first sample of each shard, and behind them the number of samples."""
        return self._starts

    def extents(self, numbers: Iterable[int]) -> list[SampleExtent]:
        """Where some samples lie; the bytes of neighbours adjoin.

        Args:
            numbers: Numbers of the samples; negative ones count from the end.

        Raises:
            IndexError: there is no such sample.
            DataError: a shard's index is damaged, or of another version.

        Cost: one read for each shard whose index is not kept, many at a time.
        """
        located = [self._locate(number) for number in numbers]
        self.load([shard for shard, _ in located])
        return [self._extent(shard, sample) for shard, sample in located]

    def head_span(self, shard: int) -> ByteRange | None:
        """What of the shard has to be read, once, before its samples can be parsed; None for most formats."""
        form = FORMATS[self._formats[shard]]
        if (not form.head and not form.decide) or shard in self._heads:
            return None
        self.load([shard])
        offsets = self._indexes[shard].offsets
        assert offsets is not None
        return ByteRange(0, int(offsets[0 if form.head else 1]))  # to decide takes the first record

    def set_head(self, shard: int, data: Buffer) -> None:
        """What was read of ``head_span``."""
        if FORMATS[self._formats[shard]].head:
            self._heads[shard] = data
        else:
            self._formats[shard] = decided_format(self._formats[shard], data, is_all=True) or self._formats[shard]

    def parse(self, extent: SampleExtent, data: Buffer) -> Sample:
        """The sample whose bytes were read.

        Args:
            extent: Where it lies.
            data: uint8[n], the bytes of its span; held against its checksum.

        Raises:
            ChecksumError: they are not what was indexed.
            CorruptShardError: they are not one sample.
        """
        shard, number, (start, _), known = extent
        url = self._known.found[shard].shard.url
        if known.crc32c is not None:
            if sample_crc(data) != known.crc32c[number]:
                Verifier(known, first_sample=number, url=url).feed(data)  # says what is wrong
            members = known.members
            if (
                members is not None
                and (sample := members.cut(number, memoryview(data), offset_bytes=start)) is not None
            ):
                return sample
        name = self._formats[shard]
        parser = parser_of(name, shard=url, start_offset_bytes=start, head=self._heads.get(shard))
        samples = parser.feed(data)
        if not FORMATS[name].head:  # whose parsers know how many there should be
            samples += parser.finish()
        if len(samples) != 1:
            raise CorruptShardError(f"its bytes hold {len(samples)} samples, not 1", shard=url, offset_bytes=start)
        return samples[0]

    def parse_some(self, extent: SampleExtent, pieces: Sequence[Buffer]) -> Sample:
        """A sample of a tar of which some members were read; there is no checksum to hold them against.

        Args:
            extent: Where it lies.
            pieces: uint8[n] each, its members in stored order, with their headers.

        Raises:
            CorruptShardError: they are not members of one sample.
        """
        url, start = self._known.found[extent.shard].shard.url, extent.span.start
        parser = parser_of(self._formats[extent.shard], shard=url, start_offset_bytes=start)
        samples = [sample for piece in pieces for sample in parser.feed(piece)] + parser.finish()
        if len(samples) != 1:
            raise CorruptShardError(f"its bytes hold {len(samples)} samples, not 1", shard=url, offset_bytes=start)
        return samples[0]

    def iter_keys(self) -> Iterator[str]:
        """The key of each sample, in order.

        Raises:
            ConfigError: the index has no keys, because another tool made it.

        Cost: reads the keys of all shards.
        """
        for shard, index in enumerate(self._known.place.load_shards(self._rows)):
            if index.keys is None:
                hint = "penstock index --again reads the shards"
                raise ConfigError(f"the index of {self._known.found[shard].shard.url} has no keys", hint=hint)
            yield from index.keys

    def find(self, key: str) -> int | None:
        """Number of the first sample with this key; None: there is none. Cost: all keys are read and kept, once.

        Raises:
            ConfigError: the index has no keys, as those of other tools.
        """
        if self._by_key is None:
            by_key: dict[str, int] = {}
            for number, each in enumerate(self.iter_keys()):
                by_key.setdefault(each, number)
            self._by_key = by_key
        return self._by_key.get(key)

    def load(self, shards: Collection[int]) -> None:
        """Have the indexes of some shards. Cost: one read for each that is not kept, many at a time."""
        indexes = self._indexes
        missing = sorted({shard for shard in shards if shard not in indexes})
        if not missing:
            return
        indexes.update(zip(missing, self._known.place.load_shards(self._rows[shard] for shard in missing), strict=True))
        if self._indexes_max is not None and len(indexes) > self._indexes_max:
            needed = set(shards)
            for shard in [each for each in indexes if each not in needed][: len(indexes) - self._indexes_max]:
                del indexes[shard]

    def _locate(self, number: int) -> tuple[int, int]:
        """Number of the shard, and of the sample in it. Cost: O(log shards)."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        number %= len(self)
        shard = bisect_right(self._starts, number) - 1
        return shard, number - self._starts[shard]

    def _extent(self, shard: int, sample: int) -> SampleExtent:
        index = self._indexes[shard]
        assert index.offsets is not None
        span = ByteRange(int(index.offsets[sample]), int(index.offsets[sample + 1]))
        return SampleExtent(shard, sample, span, index)
