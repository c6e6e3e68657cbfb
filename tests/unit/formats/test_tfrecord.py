from __future__ import annotations

import base64
import gzip
import struct
from itertools import chain

import pytest

from penstock.errors import ConfigError, CorruptShardError
from penstock.formats import TFRecordWriter, parser_of
from penstock.formats.parsing import RECORD_BYTES_MAX
from penstock.formats.tfrecord import TFRecordParser, integers, masked_crc, parse_example
from penstock.formats.writers import encode_example

GOLDEN = base64.b85decode(
    "p#T5?000000^=kb3Z4N96AA-jZ+H?65()|k0000#005xB3LOd!X>DO=WiMrJV{c?-WD*Pt3JM7S*#7_k0000A7YYSzVPa)$5)K*+3JU-K|NsC0|Ns9"
    "13JMAYZf|a75&{|k3M2{!bZ={AZgUbE8W;)|0Dpi1tO9_5fPjD?`~Uy{|NsC0{{adK3I%m;b7gcA016Tc1$S?9WOEV;3I_@SVG06bV~QKsAeaCE00"
    "0000HEiC^$L{%3KI$gVsCg73=#?o2mk;8KL7xrzX}}+4QXv*XJs#CZewp`Wn>Zz3JMAc|JeTl0RaI43JwYdY++($Y!U?;0}25E3JMAYZf|a75&{|k"
    "3M2{!bZ={AZgUbE8W;)|0Dpi1tO9_5fPjD?`~Uy{|NsC0{{adK3I%m;b7gcA016Tc1$S?9WOEV;3I_@SVG06bV{*0vA^"
)
"""Two Examples by TensorFlow 2.21's TFRecordWriter; their features are in the test that reads them."""


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def read(data, *, name="tfrecord", on_corrupt="raise"):
    parser = parser_of(name, shard="s.tfrecord", on_corrupt=on_corrupt)
    return parser, parser.feed(data) + parser.finish()


@pytest.mark.parametrize(("name", "data"), [("tfrecord", GOLDEN), ("tfrecord.gz", gzip.compress(GOLDEN))])
def test_what_tensorflow_writes_is_read(name, data):
    """Lists of one and of several bytes, int64s of every size, floats, an empty list, a feature that is not set."""
    _, samples = read(data, name=name)
    assert [sample.key for sample in samples] == ["000000000000", "000000000177"]
    for index, sample in enumerate(samples):
        fields = sample.fields
        assert list(fields) == ["box", "image/encoded", "label", "none", "tokens", "unset", "words.0", "words.1"]
        assert fields["box"].tolist() == [0.5, -1.25]
        assert bytes(fields["image/encoded"]) == b"\xff\xd8\xff" + bytes([index]) * 5
        assert fields["label"].tolist() == [index - 1]
        assert fields["none"].tolist() == []
        assert fields["tokens"].tolist() == [0, 127, 128, 300, 1 << 40, -5]
        assert (bytes(fields["unset"]), bytes(fields["words.0"]), bytes(fields["words.1"])) == (b"", b"a", b"bc")
    assert samples[1].size_bytes == len(GOLDEN) - 177


def test_values_are_slices_of_the_chunk():
    """A record that lies in one chunk is not copied."""
    chunk = bytearray(record(encode_example({"x": b"abc"})))
    _, [sample] = read(chunk)
    chunk[chunk.index(b"abc")] = ord("z")
    assert bytes(sample.fields["x"]) == b"zbc"


def test_records_that_are_no_examples_stay_bytes():
    """``auto`` goes by the first record: no Example, no features, or a SequenceExample are bytes."""
    for first in (b"\x01\x02", b"", b"\x0a\x00", encode_example({"x": b"1"}) + b"\x12\x00"):
        _, samples = read(record(first) + record(b"more"))
        assert [bytes(sample.fields["record"]) for sample in samples] == [first, b"more"]
    _, [sample] = read(record(encode_example({"x": b"1"})), name="tfrecord-raw")
    assert set(sample.fields) == {"record"}


def test_a_corrupt_record_is_named_or_skipped():
    """A value that lost a bit: the error says where; skipped, the others are there and the bytes are counted."""
    parts = [record(bytes([index]) * 10) for index in range(3)]
    data = bytearray(b"".join(parts))
    data[len(parts[0]) + 15] ^= 1
    with pytest.raises(CorruptShardError, match="does not have its CRC32C") as caught:
        read(data)
    assert (caught.value.shard, caught.value.offset_bytes) == ("s.tfrecord", len(parts[0]))
    parser, samples = read(data, on_corrupt="skip_sample")
    assert [bytes(sample.fields["record"])[0] for sample in samples] == [0, 2]
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, len(parts[1]))
    parser, samples = read(data, on_corrupt="skip_shard")
    assert len(samples) == 1
    assert (parser.skipped_samples, parser.skipped_bytes) == (1, 2 * len(parts[1]))
    assert "CRC32C" in str(parser.skipped_error)


def test_a_corrupt_length_ends_the_shard():
    """Nobody knows where the next record begins: the rest is passed over, in any policy but ``raise``."""
    parts = [record(bytes(10)) for _ in range(3)]
    data = bytearray(b"".join(parts))
    data[len(parts[0])] ^= 1
    parser, samples = read(data, on_corrupt="skip_sample")
    assert (len(samples), parser.skipped_bytes) == (1, 2 * len(parts[0]))
    with pytest.raises(CorruptShardError, match="the length of a record"):
        read(data)


def test_an_insane_length_is_refused():
    """A length with a good CRC is still bounded, and nothing of that size is allocated."""
    head = struct.pack("<Q", RECORD_BYTES_MAX + 1)
    with pytest.raises(CorruptShardError, match=f"more than {RECORD_BYTES_MAX}"):
        read(head + struct.pack("<I", masked_crc(head)) + bytes(20))


def test_errors_say_what_it_is_instead():
    """An object of another format, an entry that is none, a cut: each error says so."""
    with pytest.raises(CorruptShardError, match="seems to be gzip"):
        TFRecordParser("s").feed(b"\x1f\x8b" + bytes(30))
    with pytest.raises(CorruptShardError, match="reading began there"):
        TFRecordParser("s", start_offset_bytes=5, content="record").feed(bytes(30))
    with pytest.raises(CorruptShardError, match="cut off inside a record: at least 1 bytes missing"):
        read(record(b"abc")[:-1])


@pytest.mark.parametrize("count", [2, 40], ids=["one by one", "many at once"])
@pytest.mark.parametrize("columns", [False, True], ids=["samples", "columns"])
def test_a_feature_called_key_is_the_key(count: int, columns: bool):
    """It is read back as the sample's key, and is no field; without it the key is where the record begins."""
    data = b"".join(record(encode_example({"__key__": f"ü/{n}", "n": n, "x": b"v%d" % n})) for n in range(count))
    parser = TFRecordParser("s")
    groups = parser.feed_columns(data) if columns else [parser.feed(data)]
    samples = [*chain(*groups), *parser.finish()]
    assert [sample.key for sample in samples] == [f"ü/{n}" for n in range(count)]
    assert [{name: value.tolist() for name, value in sample.fields.items()} for sample in samples] == [
        {"n": [n], "x": list(b"v%d" % n)} for n in range(count)
    ]


@pytest.mark.parametrize("key", [7, b"", b"\xff"], ids=["number", "empty", "no text"])
@pytest.mark.parametrize("count", [1, 40])
def test_a_key_that_is_none(key: object, count: int):
    """A number, nothing, or bytes that are no text are no key: as Examples such records are corrupt, else raw."""
    data = record(encode_example({"__key__": key, "x": b"v"})) * count
    with pytest.raises(CorruptShardError, match=r"__key__|utf-8"):
        TFRecordParser("s", content="example").feed(data)
    parser = TFRecordParser("s", on_corrupt="skip_sample", content="example")
    assert [*chain(*parser.feed_columns(data)), *parser.finish()] == []
    assert [list(sample.fields) for sample in TFRecordParser("s").feed(data)] == [["record"]] * count


def test_features_that_are_refused():
    """Reserved names, twice the same feature, numbers that are cut: no silent choice."""
    twice = encode_example({"x": b"1"})[2:]
    for data, text in (
        (encode_example({"__shard__": b"1"}), "penstock adds itself"),
        (b"\x0a" + bytes([2 * len(twice)]) + twice * 2, "twice"),
        (b"\x12\x00", "field number 2"),
        (b"\x0a\x05abc", "does not fit"),
    ):
        with pytest.raises(ValueError, match=text):
            parse_example(memoryview(data))
    with pytest.raises(ValueError, match="cut off"):
        integers(memoryview(b"\x80" * 20))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        integers(memoryview(b"\x80" * 20 + b"\x01"))


def test_unpacked_numbers_and_unknown_fields_are_read():
    """Protobuf allows both: a number per field, and fields that this version does not know."""
    ints = b"\x1a\x04\x08\x05\x08\x07"  # Int64List { value: 5 value: 7 }, unpacked
    floats = b"\x12\x05\x0d\x00\x00\x80\x3f"  # FloatList { value: 1.0 }, unpacked
    entries = b""
    for name, feature in ((b"i", ints), (b"f", floats)):
        feature += b"\x25\x01\x02\x03\x04"  # field 4, fixed32: unknown
        entry = b"\x0a\x01" + name + b"\x12" + bytes([len(feature)]) + feature
        entries += b"\x0a" + bytes([len(entry)]) + entry
    fields = parse_example(memoryview(b"\x0a" + bytes([len(entries)]) + entries))
    assert {name: value.tolist() for name, value in fields.items()} == {"i": [5, 7], "f": [1.0]}


def test_what_a_writer_refuses():
    """Nothing to store, a value of no type that a feature has, a shard that is finished."""
    writer = TFRecordWriter(bytearray().extend)
    for sample, text in (
        ({"__key__": "k"}, "no field"),
        ({"x": None}, "must be bytes, str or numbers"),
        ({"x": 1 << 70}, "not an int64"),
        ({"x": ["a", 1]}, "must be bytes"),
        ({"\ud800": b""}, "cannot be a feature"),
    ):
        with pytest.raises(ConfigError, match=text):
            writer.add(sample)
    assert writer.add({"x": "é", "y": 1.5}).start == 0
    assert writer.finish() == writer.offset_bytes
    with pytest.raises(ConfigError, match="finished"):
        writer.add({"x": b""})
