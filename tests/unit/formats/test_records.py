"""RecordIO, JSON lines, MDS and compressed shards."""

from __future__ import annotations

import gzip
import json
import random
import struct
import tracemalloc
from typing import get_args

import numpy as np
import pytest
import zstandard

from loading import shard
from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats import (
    JsonLinesWriter,
    OnCorrupt,
    RecordIOWriter,
    TarWriter,
    TFRecordWriter,
    compression,
    feed_in_pieces,
    parser_of,
)
from penstock.formats.compression import CompressedParser, Unzstd
from penstock.formats.jsonl import LINE_BYTES_MAX, JsonLinesParser
from penstock.formats.mds import DESCRIPTION_BYTES_MAX
from penstock.formats.recordio import MAGIC


def read(name, data, *, on_corrupt="raise", start=0, head=None):
    parser = parser_of(name, shard="s", on_corrupt=on_corrupt, start_offset_bytes=start, head=head)
    return parser, parser.feed(data) + parser.finish()


def plain(samples):
    return [{name: bytes(value) for name, value in sample.fields.items()} for sample in samples]


# ── RecordIO ──


def test_recordio_as_documented():
    """The framing that MXNet documents: magic, length, bytes, zeros to a multiple of four."""
    data = bytes.fromhex("0a23d7ce 05000000 68656c6c6f 000000")
    _, samples = read("recordio", data * 2)
    assert plain(samples) == [{"record": b"hello"}] * 2
    assert [(s.key, s.offset_bytes, s.size_bytes) for s in samples] == [
        ("000000000000", 0, 16),
        ("000000000016", 16, 16),
    ]
    out = bytearray()
    assert RecordIOWriter(out.extend).add({"record": b"hello"}) == (0, 16)
    assert out == data


def test_recordio_parts_are_joined_with_the_magic():
    """A record that holds the magic is stored in parts without it, and comes back with it."""
    word = MAGIC.hex()
    data = bytes.fromhex(f"{word} 04000020 61626364 {word} 00000040 {word} 01000060 65000000")
    _, samples = read("recordio", data)
    assert plain(samples) == [{"record": b"abcd" + MAGIC * 2 + b"e"}]
    out = bytearray()
    RecordIOWriter(out.extend).add({"record": b"abcd" + MAGIC * 2 + b"e"})
    assert out == data
    for cut, text in ((12, "several parts"), (20, "several parts"), (10, "cut off inside a record")):
        with pytest.raises(CorruptShardError, match=text):
            read("recordio", data[:cut])


def test_image_headers_are_read():
    """MXNet's IRHeader: one label in it, or as many as its flag says before the data; raw where the data is no image."""
    image = b"\xff\xd8\xffimage"
    one = struct.pack("<IfQQ", 0, 2.5, 7, 0) + image
    three = struct.pack("<IfQQ", 3, 0.0, 8, 9) + struct.pack("<3f", 1, 2, 3) + image
    out = bytearray()
    writer = RecordIOWriter(out.extend)
    for record in (one, three):
        writer.add({"record": record})
    _, samples = read("recordio", out)
    assert [sample.fields["label"].tolist() for sample in samples] == [[2.5], [1, 2, 3]]
    assert [sample.fields["id"].tolist() for sample in samples] == [[7, 0], [8, 9]]
    assert {bytes(sample.fields["data"]) for sample in samples} == {image}
    assert plain(read("recordio-raw", out)[1]) == [{"record": one}, {"record": three}]
    with pytest.raises(CorruptShardError, match="too short for an IRHeader"):
        read("recordio-mxnet", MAGIC + struct.pack("<I", 0))
    with pytest.raises(CorruptShardError, match="claims 9 labels"):
        read("recordio-mxnet", MAGIC + struct.pack("<I", 24) + struct.pack("<IfQQ", 9, 0, 0, 0))


def test_recordio_goes_on_at_the_next_record():
    """A damaged head loses its record; one more where the magic in it looked like a head."""
    out = bytearray()
    writer = RecordIOWriter(out.extend)
    for index in range(4):
        writer.add({"record": b"%d" % index * 9})
    out[20] ^= 1
    with pytest.raises(CorruptShardError, match="does not begin a record"):
        read("recordio", out)
    parser, samples = read("recordio", out, on_corrupt="skip_sample")
    assert [bytes(sample.fields["record"])[:1] for sample in samples] == [b"0", b"2", b"3"]
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, 20)
    with pytest.raises(ConfigError, match="stores one field"):
        writer.add({"x": b""})


# ── JSON lines ──


def test_lines_are_samples():
    """Keys of the object's own, else where the line begins; blank lines and a missing last newline are fine."""
    lines = [b'{"__key__": "a", "id": 2}', b"", b'{"id": 7}\r', b'{"key": ""}', b"  ", '{"x": "é"}'.encode()]
    _, samples = read("jsonl", b"\n".join(lines))
    assert [sample.key for sample in samples] == ["a", "7", "000000000038", "000000000053"]
    assert plain(samples) == [{"json": line} for line in lines if line.strip()]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b'{"a": }', b"\xff", b"[" * 100_000, b'{"a": ' * 50_000])
def test_lines_that_are_no_objects(line):
    """Garbage, other values, nesting without end: named, or left out and counted."""
    data = b'{"id": 1}\n' + line + b'\n{"id": 2}\n'
    with pytest.raises(CorruptShardError, match="not JSON lines") as caught:
        read("jsonl", data)
    assert caught.value.offset_bytes == 10
    parser, samples = read("jsonl", data, on_corrupt="skip_sample")
    assert [sample.key for sample in samples] == ["1", "2"]
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, len(line) + 1)


def test_a_line_without_end_is_not_collected(monkeypatch):
    """What has no newline is refused at a bound, and nothing of it is held any longer."""
    monkeypatch.setattr("penstock.formats.jsonl.LINE_BYTES_MAX", 1000)
    assert LINE_BYTES_MAX > 1 << 20
    parser = JsonLinesParser("s", on_corrupt="skip_sample")
    for _ in range(30):
        assert parser.feed(bytes(100)) == []
    assert parser.finish() == []
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, 3000)


def test_json_lines_are_written():
    """An object's text as it is, any other sample as an object; what is no JSON, or several lines, is refused."""
    out = bytearray()
    writer = JsonLinesWriter(out.extend)
    writer.add({"__key__": "k", "__shard__": "s", "json": b'{"a": 1}'})
    assert writer.add({"__key__": "é", "n": [1, 2]}) == (9, len(out))
    assert bytes(out) == '{"a": 1}\n{"__key__":"é","n":[1,2]}\n'.encode()
    for sample in ({"json": b'{"a":\n1}'}, {"json": b"[1]"}, {"json": b"{"}, {"x": b"bytes"}, {"x": float("nan")}):
        with pytest.raises(ConfigError):
            writer.add(sample)
    assert writer.finish() == len(out)


# ── MDS ──


def mds(rows, names, encodings, sizes, *, description=None) -> bytes:
    described = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    config = json.dumps(described).encode() if description is None else description
    samples = [
        b"".join(struct.pack("<I", len(value)) for value, size in zip(row, sizes, strict=True) if not size)
        + b"".join(row)
        for row in rows
    ]
    offsets = [8 + 4 * len(rows) + len(config)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + config + b"".join(samples)


TYPED = {
    "int": (struct.pack("<q", -3), [-3]),
    "uint8": (b"\x07", [7]),
    "float16": (struct.pack("<e", 1.5), [1.5]),
    "float64": (struct.pack("<d", 0.1), [0.1]),
    "ndarray:int16:2,1": (struct.pack("<2h", 1, -1), [[1], [-1]]),
    "ndarray:float32": (bytes([2 << 2, 1, 2]) + struct.pack("<2f", 1, 2), [[1.0, 2.0]]),
    "ndarray": (bytes([65, 1 << 2 | 1, 2, 0]) + struct.pack("<2q", 5, 6), [5, 6]),
    "ndarray:uint8": (bytes([1 << 2, 0]), []),
}


@pytest.mark.parametrize("encoding", TYPED)
def test_mds_numbers_are_typed(encoding):
    """Each encoding of numbers is a view with its type and shape, over the bytes as MosaicML lays them out."""
    raw, value = TYPED[encoding]
    _, [sample] = read("mds", mds([(raw,)], ["x"], [encoding], [None]))
    assert np.asarray(sample.fields["x"]).tolist() == value


def test_mds_is_entered_inside_with_its_head():
    """With the header at hand, parsing begins at any sample; without it, or between two, it is refused."""
    data = mds([(b"a", b"bb"), (b"", b"c"), (b"d", b"")], ["x", "y"], ["str", "jpeg"], [None, None])
    _, samples = read("mds", data)
    second = samples[1].offset_bytes
    head = data[: samples[0].offset_bytes]
    assert read("mds", data[second:], start=second, head=head)[1] == samples[1:]
    for bad in (None, head[:-1]):
        with pytest.raises(ConfigError, match="needs its header"):
            read("mds", data[second:], start=second, head=bad)
    with pytest.raises(CorruptShardError, match="no sample begins here"):
        read("mds", data[second + 1 :], start=second + 1, head=head)


def test_mds_that_does_not_fit_together():
    """Sizes, offsets, descriptions and names that contradict each other are named."""
    good = mds([(b"a",), (b"b",)], ["x"], ["str"], [None])
    wide = bytearray(good)
    at = read("mds", good)[1][1].offset_bytes
    wide[at] = 9
    parser, samples = read("mds", wide, on_corrupt="skip_sample")
    assert (plain(samples), parser.skipped_samples) == ([{"x": b"a"}], 1)
    bad = {
        "ends 8 bytes after its sample": bytes(wide),
        "1 samples missing": good[:at],
        "cut off": good[: at + 1],
        "data after the last sample": good + b"!",
        "that begin at byte": struct.pack("<II", 5, 8 + 20 + DESCRIPTION_BYTES_MAX + 1),
        "cannot be read": mds([], [], [], [], description=b"{}"),
        "penstock adds itself": mds([(b"",)], ["__key__"], ["str"], [None]),
        "one name": mds([], ["x", "x"], ["str", "str"], [None, None]),
        "has a size of -1": mds([], ["x"], ["str"], [-1]),
        "are not items of": mds([(b"abc",)], ["x"], ["int"], [None]),
        "no head that can be read": mds([(b"\x01",)], ["x"], ["ndarray"], [None]),
    }
    for text, data in bad.items():
        with pytest.raises(CorruptShardError, match=text):
            read("mds", data)


# ── compression ──


def test_a_bomb_comes_out_in_pieces():
    """70 MB of zeros in 70 KB: every call gives a bounded part of it, and memory stays small."""
    line = b'{"x": "' + b"0" * 99_990 + b'"}\n'
    data = gzip.compress(line * 700, compresslevel=1)
    parser = parser_of("jsonl.gz", shard="s")
    tracemalloc.start()
    try:
        count = largest = 0
        samples = parser.feed(data)
        while samples or parser.pending:
            count += len(samples)
            largest = max(largest, len(samples))
            samples = []  # let go of the last ones first
            samples = parser.feed(b"")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 700
    assert parser.finish() == []
    assert largest * len(line) <= 17 * max(len(data), 1 << 20)
    assert peak < 4 * 17 * len(data)


def test_who_ignores_what_is_pending_gets_everything():
    """``finish`` gives what is left, in order."""
    data = gzip.compress(b'{"x": "' + b"0" * 1_000_000 + b'"}\n' + b'{"id": 1}\n' * 1000)
    parser = parser_of("jsonl.gz", shard="s")
    samples = [sample for at in range(0, len(data), 500) for sample in parser.feed(data[at : at + 500])]
    samples += parser.finish()
    assert len(samples) == 1001


def test_gzip_that_is_damaged():
    """Cut off, followed by garbage, or with a wrong checksum: named; zeros behind it are padding."""
    good = gzip.compress(b'{"id": 1}\n')
    assert len(read("jsonl.gz", good + bytes(600))[1]) == 1
    for data, text in (
        (good[:-1], "cut off"),
        (good + b"garbage behind", "the gzip stream is corrupt"),
        (good[:-8] + bytes([good[-8] ^ 1]) + good[-7:], "incorrect data check"),
    ):
        with pytest.raises(CorruptShardError, match=text):
            read("jsonl.gz", data)
        parser, _ = read("jsonl.gz", data, on_corrupt="skip_shard")
        assert parser.skipped_samples == 1
    with pytest.raises(CorruptShardError, match=r"offset in the decompressed bytes"):
        read("jsonl.gz", gzip.compress(b"no json\n"))
    parser, samples = read("jsonl.gz", gzip.compress(b"no json\n{}\n"), on_corrupt="skip_sample")
    assert (len(samples), parser.skipped_samples, parser.skipped_bytes) == (1, 1, 8)


def test_zstd_that_is_damaged():
    """Cut off, no frame, a bad block, a wrong checksum: named."""
    good = zstandard.ZstdCompressor(write_checksum=True).compress(b'{"id": 1}\n' * 50)
    assert len(read("jsonl.zst", good * 3)[1]) == 150
    for data, text in (
        (good[:-1], "cut off"),
        (good + b"garbage behind", "no frame begins"),
        (good[:-1] + bytes([good[-1] ^ 1]), "the zstd stream is corrupt"),
        (b"\x28\xb5\x2f\xfd\x00\x00\x07\x00\x00", "a block of kind 3"),
    ):
        with pytest.raises(CorruptShardError, match=text):
            read("jsonl.zst", data)


def test_a_zstd_bomb_comes_out_in_pieces():
    """Blocks of four bytes that are 128 KiB each: never more than eight of them at a time."""
    pytest.importorskip("zstandard")
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"0"
    frame = b"\x28\xb5\x2f\xfd\x00\x38" + block * 4000 + b"\x01\x00\x00"
    sizes = [len(piece) for piece in Unzstd().pieces(memoryview(frame))]
    assert sum(sizes) == 4000 * (128 << 10)
    assert max(sizes) <= 8 * (128 << 10)


def test_compressed_shards_are_read_from_their_head():
    """There is no other entry, and the error says what to do."""
    with pytest.raises(ConfigError, match="only at 0"):
        CompressedParser("s", inner=JsonLinesParser, compression="zst", start_offset_bytes=5)


# ── tar: going on after a corrupt header ──


def test_a_tar_goes_on_at_the_next_header():
    """A damaged header loses its sample and the one after it, of which it may have been a part; all is counted."""
    out = bytearray()
    writer = TarWriter(out.extend)
    spans = [writer.add({"__key__": f"k{index}", "x": b"1", "y": bytes(700)}) for index in range(6)]
    writer.finish()
    out[spans[2].start + 1024 + 20] ^= 1  # the second member's name
    for step in (len(out), 700, 512, 1):
        parser = parser_of("tar", shard="s", on_corrupt="skip_sample")
        samples = [sample for at in range(0, len(out), step) for sample in parser.feed(out[at : at + step])]
        samples += parser.finish()
        assert [sample.key for sample in samples] == ["k0", "k1", "k4", "k5"]
        assert (parser.skipped_samples, parser.skipped_bytes) == (2, spans[4].start - spans[2].start)
        assert [(s.offset_bytes, s.offset_bytes + s.size_bytes) for s in samples] == [
            tuple(spans[i]) for i in (0, 1, 4, 5)
        ]
    parser, samples = read("tar", out, on_corrupt="skip_shard")
    assert [sample.key for sample in samples] == ["k0", "k1"]
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, len(out) - spans[2].start)


def test_a_joined_tar_can_be_skipped_into():
    """``cat a.tar b.tar`` is an error; while skipping, the second archive is read but for its first sample."""
    out = bytearray()
    for name in "ab":
        writer = TarWriter(out.extend)
        for index in range(3):
            writer.add({"__key__": f"{name}{index}", "x": b"1"})
        writer.finish()
    with pytest.raises(CorruptShardError, match="end-of-archive"):
        read("tar", out)
    parser, samples = read("tar", out, on_corrupt="skip_sample")
    assert [sample.key for sample in samples] == ["a0", "a1", "a2", "b2"]
    assert parser.skipped_samples == 2


@pytest.mark.parametrize("wrapping", ["gz", "zst"])
@pytest.mark.parametrize("cut", [100, 1 << 20])
def test_samples_before_the_damage_of_a_stream_are_given(wrapping, cut):
    """Of a damaged gzip or zstd stream no whole block before the damage is lost, wherever the chunks are cut."""
    lines = [json.dumps({"id": number, "text": f"{number * 7919 % 65521:x}" * 9}).encode() for number in range(20_000)]
    data = b"\n".join(lines)
    packed = bytearray(gzip.compress(data, mtime=0) if wrapping == "gz" else zstandard.ZstdCompressor().compress(data))
    spot = len(packed) * 9 // 10
    packed[spot : spot + 8] = bytes(8)
    parser = parser_of(f"jsonl.{wrapping}", shard="s", on_corrupt="skip_sample")
    chunks = [packed[start : start + cut] for start in range(0, len(packed), cut)]
    samples = [
        sample for chunk in chunks for some in feed_in_pieces(parser, chunk) for sample in some
    ] + parser.finish()
    assert parser.skipped_error is not None
    good_count = int(
        len(lines) * (0.89 if wrapping == "gz" else 0.8)
    )  # gzip has no blocks, and is damaged from there on
    assert [bytes(sample.fields["json"]) for sample in samples][:good_count] == lines[:good_count]


def test_a_bomb_in_one_sample_is_refused(monkeypatch):
    """A sample that takes far more memory than the bytes it comes from is an error under every policy, before it is whole."""
    monkeypatch.setattr(compression, "HELD_BYTES_MAX", 1 << 20)
    bombs = {
        "tar": shard([{"__key__": "k", "x": bytes(16 << 20)}], TarWriter),
        "tfrecord": shard([{"record": bytes(16 << 20)}], TFRecordWriter),
        "jsonl": b'{"x": "' + b"x" * (16 << 20) + b'"}',
    }
    for name, data in bombs.items():
        for wrapping, pack in (("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)):
            packed = pack(data)
            for policy in get_args(OnCorrupt):
                parser = parser_of(f"{name}.{wrapping}", shard="s", on_corrupt=policy)
                chunks = [packed[start : start + (1 << 20)] for start in range(0, len(packed), 1 << 20)]
                with pytest.raises(UnsupportedFormatError, match="a sample takes more than"):
                    held_most(parser, chunks)


def held_most(parser, chunks):
    """Feed all; the most that was held of a sample."""
    return max(parser.inner.held_bytes for chunk in chunks for _ in feed_in_pieces(parser, chunk))


def test_large_samples_that_hardly_shrink_are_read(monkeypatch):
    """The bound on a sample is for what grows a thousand times; a large one of a plain ratio has none."""
    monkeypatch.setattr(compression, "HELD_BYTES_MAX", 1 << 10)
    value = random.Random(1).randbytes(1 << 18)
    for wrapping, pack in (("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)):
        packed = pack(shard([{"record": bytes([index]) + value} for index in range(4)], TFRecordWriter))
        _, samples = read(f"tfrecord.{wrapping}", packed)
        assert [len(sample.fields["record"]) for sample in samples] == [len(value) + 1] * 4


def test_zstd_that_asks_for_more_than_is_given_is_not_supported():
    """A window beyond the bound and a dictionary are no damage: an error under every policy."""
    window = b"\x28\xb5\x2f\xfd\x00" + bytes([(28 - 10) << 3]) + b"\x01\x00\x00"
    trained = zstandard.train_dictionary(2048, [b'{"id": %d, "text": "abc"}' % number for number in range(2000)])
    packed = zstandard.ZstdCompressor(dict_data=trained).compress(b'{"id": 1, "text": "abc"}\n')
    for data, text in ((window, "a window of 268435456 bytes"), (packed, "needs a dictionary")):
        for policy in get_args(OnCorrupt):
            with pytest.raises(UnsupportedFormatError, match=text):
                read("jsonl.zst", data, on_corrupt=policy)


def test_a_key_that_is_no_text_is_none():
    """JSON can say a lone surrogate, which nothing can store as UTF-8: the next name counts, or the place."""
    lines = b'{"key": "\\ud800", "id": 7}\n{"key": "a\\udc80"}\n{"key": "\\ud83d\\ude00"}\n'
    _, samples = read("jsonl", lines)
    assert [sample.key for sample in samples] == ["7", "000000000027", "\U0001f600"]
