"""``SampleMap``: a data set's samples by number, for random access."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.crc import sample_crc
from penstock.errors import ConfigError, CorruptShardError
from penstock.formats import FORMATS, decided_format, narrowed, parser_of
from penstock.index.recorder import Verifier
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.formats import Sample
    from penstock.index.lookup import Lookup
    from penstock.index.shard_index import ShardIndex, ShardRow
    from penstock.types import Buffer


class SampleMap:
    """Where sample number i lies, over all shards in the order of the lookup; and the sample, of its bytes.

    Args:
        known: A complete lookup, of formats that can be entered at any sample.

    Raises:
        ConfigError: a shard is not indexed, or cannot be entered at a sample.

    Cost: O(shards), and 12 bytes for each sample of the shards that were asked for, whose indexes are kept.
    """

    def __init__(self, known: Lookup) -> None:
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
        self._heads: dict[int, Buffer] = {}
        self._by_key: dict[str, int] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Number of the shard, and of the sample in it. Cost: O(log shards).

        Raises:
            IndexError: there is no such sample; negative ones count from the end.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def spans(self, indices: Iterable[int]) -> list[tuple[int, ByteRange]]:
        """For each sample, number of the shard and the bytes to read of it; neighbours' bytes adjoin.

        Raises:
            IndexError: there is no such sample.
            DataError: a shard's index is damaged, or of another version.

        Cost: one read for each shard that was not asked for before, many at a time.
        """
        places = [self.locate(index) for index in indices]
        self._load([shard for shard, _ in places])
        return [(shard, self._span(shard, sample)) for shard, sample in places]

    def head_span(self, shard: int) -> ByteRange | None:
        """What of the shard has to be read, once, before its samples can be parsed; None for most formats."""
        form = FORMATS[self._formats[shard]]
        if (not form.head and not form.decide) or shard in self._heads:
            return None
        self._load([shard])
        offsets = self._indexes[shard].offsets
        assert offsets is not None
        return ByteRange(0, int(offsets[0 if form.head else 1]))  # to decide takes the first record

    def set_head(self, shard: int, data: Buffer) -> None:
        """What was read of ``head_span``."""
        if FORMATS[self._formats[shard]].head:
            self._heads[shard] = data
        else:
            self._formats[shard] = decided_format(self._formats[shard], data, is_all=True) or self._formats[shard]

    def parse(self, index: int, data: Buffer) -> Sample:
        """The sample whose bytes were read.

        Args:
            index: Number of the sample.
            data: uint8[n], its span; held against its checksum.

        Raises:
            ChecksumError: they are not what was indexed.
            CorruptShardError: they are not one sample.
        """
        shard, number = self.locate(index)
        self._load([shard])
        known, url, start = self._indexes[shard], self._known.found[shard].shard.url, self._span(shard, number).start
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

    def parse_some(self, index: int, pieces: Sequence[Buffer]) -> Sample:
        """A sample of which some members were read, of a tar; there is no checksum to hold them against.

        Args:
            index: Number of the sample.
            pieces: uint8[n] each, its members in stored order, with their headers.

        Raises:
            CorruptShardError: they are not members of one sample.
        """
        shard, number = self.locate(index)
        url, start = self._known.found[shard].shard.url, self._span(shard, number).start
        parser = parser_of(self._formats[shard], shard=url, start_offset_bytes=start)
        samples = [sample for piece in pieces for sample in parser.feed(piece)] + parser.finish()
        if len(samples) != 1:
            raise CorruptShardError(f"its bytes hold {len(samples)} samples, not 1", shard=url, offset_bytes=start)
        return samples[0]

    def index_of(self, shard: int) -> ShardIndex:
        """Where a shard's samples lie. Cost: one read, where it was not asked for before."""
        self._load([shard])
        return self._indexes[shard]

    def find(self, key: str) -> int | None:
        """Number of the first sample with this key; None: there is none. Cost: all keys are read and kept, once.

        Raises:
            ConfigError: the index has no keys, as those of other tools.
        """
        if self._by_key is None:
            self._by_key = self._read_keys()
        return self._by_key.get(key)

    def _read_keys(self) -> dict[str, int]:
        by_key: dict[str, int] = {}
        for shard, index in enumerate(self._known.place.load_shards(self._rows)):
            keys: Sequence[str] | None = index.keys
            if keys is None:
                hint = "penstock index --again reads the shards"
                raise ConfigError(f"the index of {self._known.found[shard].shard.url} has no keys", hint=hint)
            start = self._starts[shard]
            for number, each in enumerate(keys):
                by_key.setdefault(each, start + number)
        return by_key

    def _load(self, shards: Iterable[int]) -> None:
        missing = sorted({shard for shard in shards if shard not in self._indexes})
        if missing:
            indexes = self._known.place.load_shards(self._rows[shard] for shard in missing)
            self._indexes.update(zip(missing, indexes, strict=True))

    def _span(self, shard: int, sample: int) -> ByteRange:
        offsets = self._indexes[shard].offsets
        assert offsets is not None
        return ByteRange(int(offsets[sample]), int(offsets[sample + 1]))
