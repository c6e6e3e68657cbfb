"""``SampleMap``: random access to a data set's samples by number."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums.crc32c import sample_crc
from penstock.errors import ConfigError, CorruptShardError
from penstock.formats import FORMATS, decided_format, narrowed, parser_of, with_fields
from penstock.index.recorder import Verifier
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from penstock.formats import Sample
    from penstock.index.place import Lookup
    from penstock.index.shard_index import ShardIndex, ShardRow
    from penstock.types import Buffer


class SampleExtent(NamedTuple):
    """The place of a sample: its shard and its extent.

    Attributes:
        shard: Number of its shard.
        sample: Number of the sample in the shard.
        span: Byte range of the sample in the shard.
        known: Index of the shard.
    """

    shard: int
    sample: int
    span: ByteRange
    known: ShardIndex


class SampleMap:
    """Finds samples by number, counted over all shards in the order of the lookup, and parses them.

    It finds only the numbers of samples in shards that have a table of contents of their own, such as zip.

    Args:
        known: A complete lookup, of shards in formats whose samples can each be read alone.
        indexes_max: Number of shards' indexes to keep; a call that needs more keeps them until the next one. None keeps
            all that were needed.

    Raises:
        ConfigError: A shard is not indexed, or cannot be read from any sample.

    Cost: O(shards), and 12 bytes for each sample of the shards whose indexes are kept.
    """

    def __init__(self, known: Lookup, *, fields: frozenset[str] | None = None, indexes_max: int | None = None) -> None:
        rows: list[ShardRow] = []
        for versioned, row in zip(known.shards, known.rows, strict=True):
            if row is None:
                raise ConfigError(f"this version of {versioned.shard.url} is not indexed", hint="run penstock index")
            form = FORMATS[row.format]
            if not row.has_offsets and (form.ranged is None or form.unit != "sample"):
                how = "only from its beginning" if form.ranged is None else f"one {form.unit} of samples at a time"
                hint = "decompress it, or read it in order" if form.ranged is None else "read it in order"
                raise ConfigError(f"{versioned.shard.url} is {row.format}, which can be read {how}", hint=hint)
            rows.append(row)
        self._known = known
        self._rows = rows
        given = (getattr(each.shard, "format", None) for each in known.shards)
        self._formats = [with_fields(narrowed(each, row.format), fields) for each, row in zip(given, rows, strict=True)]
        # a list: NumPy's search for one number releases the interpreter's lock, and gets it back 60 µs later
        self._starts = [0, *accumulate(row.samples_count for row in rows)]
        self._indexes: dict[int, ShardIndex] = {}
        self._indexes_max = indexes_max
        self._heads: dict[int, Buffer] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def starts(self) -> Sequence[int]:
        """Number of the first sample of each shard, followed by the number of all samples."""
        return self._starts

    def extents(self, numbers: Iterable[int]) -> list[SampleExtent]:
        """Return the places of samples. The ranges of neighbours are adjacent.

        Args:
            numbers: Numbers of the samples; negative ones count from the end.

        Raises:
            IndexError: A number is out of range.
            DataError: A shard's index is damaged, or describes another version.

        Cost: one read for each shard whose index is not kept, many at a time.
        """
        located = [self.locate(number) for number in numbers]
        self.load([shard for shard, _ in located])
        return [self._extent(shard, sample) for shard, sample in located]

    def head_span(self, shard: int) -> ByteRange | None:
        """Return the range that must be read once before the shard's samples can be parsed; None for most formats."""
        form = FORMATS[self._formats[shard]]
        if (not form.head and not form.decide) or shard in self._heads:
            return None
        self.load([shard])
        offsets = self._indexes[shard].offsets
        assert offsets is not None
        return ByteRange(0, int(offsets[0 if form.head else 1]))  # the first record decides the format

    def set_head(self, shard: int, data: Buffer) -> None:
        """Set the bytes of ``head_span``."""
        if FORMATS[self._formats[shard]].head:
            self._heads[shard] = data
        else:
            self._formats[shard] = decided_format(self._formats[shard], data, is_all=True) or self._formats[shard]

    def parse(self, extent: SampleExtent, data: Buffer) -> Sample:
        """Parse a sample.

        Args:
            extent: Position of the sample.
            data: uint8[n], the bytes of its span, which are compared with its checksum.

        Raises:
            ChecksumError: The bytes differ from the index.
            CorruptShardError: The bytes are not one sample.
        """
        shard, number, (start, _), known = extent
        url = self._known.shards[shard].shard.url
        if known.crc32c is not None:
            if sample_crc(data) != known.crc32c[number]:
                Verifier(known, first_sample=number, url=url).feed(data)  # raises the error
            members = known.members
            if (
                members is not None
                and (sample := members.cut(number, memoryview(data), offset_bytes=start)) is not None
            ):
                return sample
        name = self._formats[shard]
        parser = parser_of(name, shard=url, start_offset_bytes=start, head=self._heads.get(shard))
        samples = parser.feed(data)
        if not FORMATS[name].head:  # parsers of formats with a head know the number of samples
            samples += parser.finish()
        return _only(samples, url, start)

    def parse_some(self, extent: SampleExtent, pieces: Sequence[Buffer]) -> Sample:
        """Parse a tar's sample from some of its members, for which there is no checksum.

        Args:
            extent: Position of the sample.
            pieces: uint8[n] each, its members in stored order, with their headers.

        Raises:
            CorruptShardError: The pieces are not the members of one sample.
        """
        url, start = self._known.shards[extent.shard].shard.url, extent.span.start
        parser = parser_of(self._formats[extent.shard], shard=url, start_offset_bytes=start)
        samples = [sample for piece in pieces for sample in parser.feed(piece)] + parser.finish()
        return _only(samples, url, start)

    def iter_keys(self) -> Iterator[str]:
        """Yield the key of each sample, in order.

        Raises:
            ConfigError: The index has no keys, for example because it came from another tool.

        Cost: reads the keys of all shards.
        """
        for shard, index in enumerate(self._known.place.load_shards(self._rows)):
            if index.keys is None:
                hint = "penstock index --again reads the shards"
                raise ConfigError(f"the index of {self._known.shards[shard].shard.url} has no keys", hint=hint)
            yield from index.keys

    def load(self, shards: Collection[int]) -> None:
        """Load the indexes of some shards. Cost: one read for each that is not kept, many at a time."""
        indexes = self._indexes
        missing = sorted({shard for shard in shards if shard not in indexes})
        if not missing:
            return
        indexes.update(zip(missing, self._known.place.load_shards(self._rows[shard] for shard in missing), strict=True))
        if self._indexes_max is not None and len(indexes) > self._indexes_max:
            needed = set(shards)
            for shard in [each for each in indexes if each not in needed][: len(indexes) - self._indexes_max]:
                del indexes[shard]

    def locate(self, number: int) -> tuple[int, int]:
        """Return the number of the shard, and of the sample in it. Cost: O(log shards).

        Raises:
            IndexError: The number is out of range.
        """
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


def _only(samples: list[Sample], url: str, offset_bytes: int) -> Sample:
    if len(samples) != 1:
        raise CorruptShardError(f"its bytes hold {len(samples)} samples, not 1", shard=url, offset_bytes=offset_bytes)
    return samples[0]
