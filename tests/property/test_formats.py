from __future__ import annotations

import gzip
import itertools
import json
import struct

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptShardError
from penstock.formats import (
    FORMATS,
    JsonLinesWriter,
    RecordIOWriter,
    TarWriter,
    TFRecordWriter,
    feed_in_pieces,
    parser_of,
)
from penstock.formats.recordio import MAGIC
from penstock.formats.tfrecord import parse_example
from penstock.formats.writers import encode_example

zstandard = pytest.importorskip("zstandard")

payloads = st.lists(
    st.lists(st.one_of(st.binary(max_size=40), st.just(MAGIC), st.just(b"\n{}\n")), max_size=4).map(b"".join),
    max_size=6,
)
cut_points = st.lists(st.integers(0, 1 << 20), max_size=8)


def written(writer_type, samples) -> bytes:
    out = bytearray()
    writer = writer_type(out.extend)
    for sample in samples:
        writer.add(sample)
    assert writer.finish() == len(out)
    return bytes(out)


def mds(rows, columns) -> bytes:
    """As MosaicML's documentation draws it: count, offsets, description, samples."""
    names, encodings, sizes = zip(*columns, strict=True)
    description = json.dumps(
        {"version": 2, "format": "mds", "column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    ).encode()
    samples = [
        b"".join(struct.pack("<I", len(v)) for v, size in zip(row, sizes, strict=True) if size is None) + b"".join(row)
        for row in rows
    ]
    at = 8 + 4 * len(rows) + len(description)
    offsets = list(itertools.accumulate(map(len, samples), initial=at))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + description + b"".join(samples)


def shard(name: str, values: list[bytes]) -> tuple[bytes, list[dict[str, bytes]]]:
    """A shard of the format, and the fields of its samples."""
    if name == "tar":
        samples = [{"__key__": f"k{index}", "x": value, "y": b"1"} for index, value in enumerate(values)]
        return written(TarWriter, samples), [{"x": value, "y": b"1"} for value in values]
    if name == "tfrecord-raw":
        return written(TFRecordWriter, [{"record": value} for value in values]), [{"record": v} for v in values]
    if name == "tfrecord":
        data = written(TFRecordWriter, [{"x": value, "y": [index, -1]} for index, value in enumerate(values)])
        return data, [{"x": value, "y": struct.pack("<2q", index, -1)} for index, value in enumerate(values)]
    if name == "recordio":
        return written(RecordIOWriter, [{"record": value} for value in values]), [{"record": v} for v in values]
    if name == "jsonl":
        lines = [json.dumps({"id": index, "x": value.hex()}).encode() for index, value in enumerate(values)]
        return written(JsonLinesWriter, [{"json": line} for line in lines]), [{"json": line} for line in lines]
    columns = [("x", "bytes", None), ("y", "int", 8)]
    data = mds([(value, struct.pack("<q", index)) for index, value in enumerate(values)], columns)
    return data, [{"x": value, "y": struct.pack("<q", index)} for index, value in enumerate(values)]


def compressed(name: str, data: bytes, cuts: list[int]) -> tuple[str, bytes]:
    """`data` in one or several gzip members or zstd frames, some with checksums, a skippable one between."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts[:2]), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    if name == "gz":
        return ".gz", b"".join(gzip.compress(piece, mtime=0) for piece in pieces)
    frame = zstandard.ZstdCompressor(write_checksum=len(cuts) % 2 == 0, write_content_size=len(data) % 2 == 0)
    return ".zst", b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc".join(frame.compress(piece) for piece in pieces)


def parse(name, data, cuts, *, start=0, on_corrupt="raise"):
    parser = parser_of(name, shard="s", start_offset_bytes=start, on_corrupt=on_corrupt)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    samples = []
    for begin, end in itertools.pairwise(edges):
        for some in feed_in_pieces(parser, data[begin:end]):
            samples += some
    samples += parser.finish()
    assert parser.offset_bytes == start + len(data)
    return parser, samples


def plain(samples) -> list[dict[str, bytes]]:
    return [{name: bytes(value) for name, value in sample.fields.items()} for sample in samples]


def told(samples):
    return [(sample.key, sample.offset_bytes, sample.size_bytes, plain([sample])) for sample in samples]


def outcome(name, data, cuts):
    """The samples; None where the answer is an error, which says where."""
    error = None
    try:
        return told(parse(name, data, cuts)[1])
    except CorruptShardError as caught:
        error = caught
    assert error.shard == "s"
    assert error.offset_bytes is not None
    assert error.offset_bytes >= 0
    return None


STREAMED = ["tar", "tfrecord", "tfrecord-raw", "recordio", "jsonl", "mds"]


@pytest.mark.parametrize("name", STREAMED)
@given(payloads, cut_points)
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_however_it_is_cut(name, values, cuts):
    """Any values, cut anywhere: all samples in order, each with its extent, and parsing just that gives it again."""
    data, want = shard(name, values)
    parser, samples = parse(name, data, cuts)
    assert plain(samples) == want
    decided = parser.decided_format or name  # a shard is entered as what its first record decided
    assert len({sample.key for sample in samples}) == len(samples)
    assert told(parse(name, data, [])[1]) == told(samples)
    for sample in samples[-2:] if FORMATS[name].unit == "sample" and name != "mds" else []:
        extent = data[sample.offset_bytes : sample.offset_bytes + sample.size_bytes]
        assert told(parse(decided, extent, [], start=sample.offset_bytes)[1]) == told([sample])


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("wrapping", ["gz", "zst"])
@given(payloads, cut_points)
@settings(max_examples=20, deadline=None)
def test_compressed_shards_give_the_same_samples(name, wrapping, values, cuts):
    """Members and frames end anywhere, chunks too: the samples are those of the bytes inside."""
    data, _ = shard(name, values)
    suffix, packed = compressed(wrapping, data, cuts)
    assert told(parse(name + suffix, packed, cuts)[1]) == told(parse(name, data, [])[1])


@pytest.mark.parametrize("name", [*STREAMED, "tar.gz", "jsonl.zst"])
@given(payloads, st.integers(0), st.integers(1, 255), st.integers(0, 1 << 20), cut_points)
@settings(max_examples=40, deadline=None)
def test_damage_is_an_answer_or_an_error(name, values, spot, flip, end, cuts):
    """A flipped byte, a lost tail: samples or CorruptShardError; a policy that skips never raises, and counts."""
    data, _ = shard(name.partition(".")[0], values)
    if "." in name:
        data = compressed(name.rpartition(".")[2], data, [])[1]
    assume(data)
    damaged = bytearray(data)
    damaged[spot % len(data)] ^= flip
    damaged = bytes(damaged[: end % (len(data) + 1)] if end % 3 == 0 else damaged)
    assume(not name.endswith("zst") or spot % len(data) > 14)  # the first frame's head may say that it is not supported
    outcomes = []
    for pieces in ([], cuts):
        outcomes.append(outcome(name, damaged, pieces))
    assert outcomes[0] == outcomes[1]
    for policy in ("skip_sample", "skip_shard"):
        parser, samples = parse(name, damaged, cuts, on_corrupt=policy)
        whole, same = parse(name, damaged, [], on_corrupt=policy)
        assert (parser.skipped_samples > 0) == (outcomes[0] is None)
        assert (parser.skipped_error is None) == (outcomes[0] is not None)
        assert told(samples) == told(same)
        assert parser.skipped_samples == whole.skipped_samples
        if "." not in name:  # of a broken stream nobody knows how long it would be
            assert parser.skipped_bytes == whole.skipped_bytes
        if outcomes[0] is not None:
            assert told(samples) == outcomes[0]


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(st.binary(max_size=300), cut_points)
@settings(max_examples=20, deadline=None)
def test_garbage_is_an_answer_or_an_error(name, data, cuts):
    """Bytes that are of no format never give anything but samples or CorruptShardError, however cut."""
    outcome(name, data, cuts)
    parse(name, data, cuts, on_corrupt="skip_sample")


@given(
    st.dictionaries(
        st.text(max_size=140).filter(lambda name: not name.startswith("__")),
        st.one_of(
            st.binary(max_size=200),
            st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20),
            st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
        ),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_examples_come_back(features):
    """Any features survive encoding and parsing: bytes as slices, numbers typed."""
    fields = parse_example(memoryview(encode_example(features)))
    got = {name: bytes(value) if value.format == "B" else value.tolist() for name, value in fields.items()}
    assert got == {name: list(value) if isinstance(value, list) else value for name, value in features.items()}
    assert list(got) == sorted(features)


@given(st.binary(max_size=60), st.integers(0), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_examples_are_no_crash(value, spot, flip):
    """An Example with a flipped byte is fields or ValueError."""
    data = bytearray(encode_example({"x": value, "label": [1, 300], "f": [1.5]}))
    data[spot % len(data)] ^= flip
    try:
        fields = parse_example(memoryview(data))
    except ValueError:
        return
    assert all(isinstance(field, memoryview) for field in fields.values())
