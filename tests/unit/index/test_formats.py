"""The index of every streamed format: recorded with any cuts, read from any sample."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
from collections.abc import Callable

import pytest

from penstock.errors import ChecksumError, ConfigError, CorruptShardError
from penstock.formats import (
    FORMATS,
    JsonLinesWriter,
    RecordIOWriter,
    Sample,
    TarWriter,
    TFRecordWriter,
    feed_in_pieces,
    parser_of,
)
from penstock.index import SampleMap, ShardIndex, ShardLike, ShardRecorder, VersionedShard, beside, build, lookup
from penstock.sources.indexed_reader import IndexedReader
from penstock.store.memory import MemoryStore
from penstock.types import ByteRange

COUNT = 40


def written(writer_of: Callable[..., object], samples: list[dict]) -> bytes:
    out = io.BytesIO()
    writer = writer_of(out.write)
    for sample in samples:
        writer.add(sample)  # type: ignore[attr-defined]
    writer.finish()  # type: ignore[attr-defined]
    return out.getvalue()


def mds(values: list[bytes]) -> bytes:
    """Return a shard with one column of bytes."""
    description = json.dumps({"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None]}).encode()
    offsets = [8 + 4 * len(values) + len(description)]
    for value in values:
        offsets.append(offsets[-1] + 4 + len(value))
    head = struct.pack(f"<I{len(offsets)}I", len(values), *offsets)
    return head + description + b"".join(struct.pack("<I", len(value)) + value for value in values)


def shards() -> dict[str, bytes]:
    source = random.Random(7)
    values = [source.randbytes(source.randrange(1, 3000)) for _ in range(COUNT)]
    found = {
        "tar": written(TarWriter, [{"__key__": f"{n:04d}", "x": value} for n, value in enumerate(values)]),
        "tfrecord": written(TFRecordWriter, [{"x": value, "n": n} for n, value in enumerate(values)]),
        "recordio": written(RecordIOWriter, [{"record": value} for value in values]),
        "jsonl": written(JsonLinesWriter, [{"n": n, "x": value.hex()} for n, value in enumerate(values)]),
        "mds": mds(values),
    }
    return found | {"tar.gz": gzip.compress(found["tar"]), "jsonl.gz": gzip.compress(found["jsonl"])}


SHARDS = shards()


def parsed(name: str, data: bytes) -> list[Sample]:
    parser = parser_of(name, shard="x")
    return [sample for piece in feed_in_pieces(parser, data) for sample in piece] + parser.finish()


def record(name: str, data: bytes, cuts: list[int]) -> ShardIndex:
    found = VersionedShard(None, "x", len(data), "e", "e")  # type: ignore[arg-type]
    recorder, parser = ShardRecorder(found, name), parser_of(name, shard="x")
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        piece = data[start:end]
        recorder.feed(piece, [sample for some in feed_in_pieces(parser, piece) for sample in some])
    return recorder.finish(parser.finish())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(SHARDS))
def test_recording_does_not_depend_on_the_cuts(name: str, seed: int) -> None:
    """The index does not depend on chunks, and has what its format allows."""
    data = SHARDS[name]
    whole = record(name, data, [])
    cut = record(name, data, sorted(random.Random(seed).sample(range(1, len(data)), 30)))
    assert cut.encode() == whole.encode()
    assert len(whole) == COUNT
    assert (whole.offsets is not None) == (whole.crc32c is not None) == (FORMATS[name].unit == "sample")


@pytest.mark.parametrize("name", sorted(name for name in SHARDS if FORMATS[name].unit == "sample"))
def test_every_sample_can_be_entered(name: str, memory: MemoryStore, listed: Callable[..., list[ShardLike]]) -> None:
    """The bytes of any sample, by number over several shards, give the same sample as a pass, after a checksum."""
    memory.write(f"0.{name}", SHARDS[name])
    memory.write(f"1.{name}", SHARDS[name])
    found = listed(memory)
    build(found, beside(found))
    samples = SampleMap(lookup(found))
    expected = parsed(name, SHARDS[name]) * 2
    assert len(samples) == len(expected) == 2 * COUNT
    order = [*random.Random(3).sample(range(len(expected)), 30), -1, 0, COUNT - 1, COUNT]
    for index, extent in zip(order, samples.extents(order), strict=True):
        shard, _, span, _ = extent
        if (head := samples.head_span(shard)) is not None:
            samples.set_head(shard, memory.read(found[shard].key, head).data)
        data = bytes(memory.read(found[shard].key, span).data)
        sample = samples.parse(extent, data)
        assert (sample.key, sample.fields) == (expected[index].key, expected[index].fields)
        with pytest.raises(ChecksumError):
            samples.parse(extent, bytes([data[0] ^ 1]) + data[1:])


def test_a_run_of_samples_is_one_range(memory: MemoryStore, listed: Callable[..., list[ShardLike]]) -> None:
    """Ranges of neighbours are adjacent, from the first sample to the end of the last."""
    memory.write("0.tar", SHARDS["tar"])
    found = listed(memory)
    build(found, beside(found))
    spans = [extent.span for extent in SampleMap(lookup(found)).extents(range(COUNT))]
    assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert spans[0].start == 0


def test_samples_are_found_by_key(memory: MemoryStore, listed: Callable[..., list[ShardLike]]) -> None:
    """``find`` returns the first of several samples, or None."""
    memory.write("0.tar", SHARDS["tar"])
    memory.write("1.tar", SHARDS["tar"])
    found = listed(memory)
    build(found, beside(found))
    samples = IndexedReader(lookup(found), fields=None)
    assert [samples.find(key) for key in ("0007", "0039", "nobody")] == [7, 39, None]


def test_what_cannot_be_mapped_is_refused(memory: MemoryStore, listed: Callable[..., list[ShardLike]]) -> None:
    """A shard without an index, a compressed shard and a number out of range are errors that say so."""
    memory.write("0.tar", SHARDS["tar"])
    found = listed(memory)
    with pytest.raises(ConfigError, match="run penstock index"):
        SampleMap(lookup(found, index_dir="/nonexistent"))
    build(found, beside(found))
    samples = SampleMap(lookup(found))
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"sample {index} of {COUNT}"):
            samples.extents([index])
    third, fourth = samples.extents([3, 4])
    samples._indexes[0].crc32c = None
    with pytest.raises(CorruptShardError, match="2 samples"):
        samples.parse(third, memory.read("0.tar", ByteRange(third.span.start, fourth.span.end)).data)
    memory.write("1.tar.gz", SHARDS["tar.gz"])
    found = listed(memory)
    build(found, beside(found))
    with pytest.raises(ConfigError, match=r"tar\.gz, which can be read only from its beginning"):
        SampleMap(lookup(found))
