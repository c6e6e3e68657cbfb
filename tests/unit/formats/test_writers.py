from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from penstock.errors import ConfigError
from penstock.formats import TarParser, TarWriter
from penstock.formats.tar_header import headers, pax_records, read_header

SAMPLES = [
    {"__key__": "d/0", "jpg": b"\xff\xd8" * 300, "cls": "7"},
    {"__key__": "d/1", "txt": "zwölf", "a.b": bytearray(b"xyz"), "empty": b"", "view": memoryview(bytes(512))},
    {"__key__": "ü/" + "long" * 60, "jpg": b"1", "__shard__": "ignored", "__position__": 3},
]


def written(samples) -> tuple[bytes, list]:
    out = bytearray()
    writer = TarWriter(out.extend)
    spans = [writer.add(sample) for sample in samples]
    assert writer.finish() == writer.offset_bytes == len(out)
    return bytes(out), spans


def stored(sample) -> dict[str, bytes]:
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    return {name: v.encode() if isinstance(v, str) else bytes(v) for name, v in sorted(fields.items())}


def test_samples_come_back():
    """What is written is read: keys, fields in sorted order, values."""
    data, spans = written(SAMPLES)
    parser = TarParser("s.tar")
    back = parser.feed(data) + parser.finish()
    assert [(sample.key, {n: bytes(v) for n, v in sample.fields.items()}) for sample in back] == [
        (sample["__key__"], stored(sample)) for sample in SAMPLES
    ]
    assert [sample.offset_bytes for sample in back] == [span.start for span in spans]


def test_the_standard_library_reads_it():
    """tarfile finds the same members, nobody's, at no time, and a proper end."""
    data, _ = written(SAMPLES)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {member.name: (member, tar.extractfile(member).read()) for member in tar}
    assert {name: value for name, (_, value) in members.items()} == {
        f"{sample['__key__']}.{name}": value for sample in SAMPLES for name, value in stored(sample).items()
    }
    for member, _ in members.values():
        assert (member.mode, member.uid, member.gid, member.mtime, member.uname) == (0o644, 0, 0, 0, "")
    assert data.endswith(bytes(1024))


def test_spans_are_whole_samples():
    """Every span, alone, is that sample: an index over them needs nothing else."""
    data, spans = written(SAMPLES)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    for span, sample in zip(spans, SAMPLES, strict=True):
        parser = TarParser("s.tar", start_offset_bytes=span.start)
        (back,) = parser.feed(data[span.start : span.end]) + parser.finish()
        assert (back.key, back.offset_bytes) == (sample["__key__"], span.start)


def test_the_bytes_are_pinned():
    """The same samples give the same shard, on every machine, at every time."""
    data, _ = written(SAMPLES)
    assert hashlib.sha256(data).hexdigest() == "d03b85be4e3680638ee61ee3e84ce09aed818ab456eab02abf35f1d7ea4b1722"
    assert written([dict(reversed(sample.items())) for sample in SAMPLES])[0] == data


def test_sizes_beyond_8_gib_go_into_a_pax_header():
    """11 octal digits end at 8 GiB - 1; from there the PAX record says it."""
    assert len(headers("a.x", 8**11 - 1)) == 512
    data = headers("a.x", 8**11)
    assert len(data) == 3 * 512
    assert read_header(data[:512]).kind == b"x"
    assert pax_records(data[512:1024]) == {b"size": b"8589934592"}
    assert tarfile.TarInfo.frombuf(data[1024:], "utf-8", "strict").size == 0


@pytest.mark.parametrize("length", [89, 90, 91, 98, 99, 100, 101, 980, 990, 1000])
def test_pax_records_count_their_own_digits(length):
    """Around lengths where the count gains a digit, tarfile still reads the name."""
    data, _ = written([{"__key__": "n" * length, "x": b"1"}])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["n" * length + ".x"]


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        ({"x": b""}, "__key__ must be str, not NoneType"),
        ({"__key__": b"k", "x": b""}, "__key__ must be str, not bytes"),
        ({"__key__": "", "x": b""}, "empty path component"),
        ({"__key__": "/k", "x": b""}, "empty path component"),
        ({"__key__": "d/", "x": b""}, "empty path component"),
        ({"__key__": "d//k", "x": b""}, "empty path component"),
        ({"__key__": "../k", "x": b""}, r"component '\.\.'"),
        ({"__key__": "./k", "x": b""}, r"component '\.'"),
        ({"__key__": "d.d/k.k", "x": b""}, "has a dot in its last component"),
        ({"__key__": "__meta__/k", "x": b""}, "metadata"),
        ({"__key__": "a\0b", "x": b""}, "control character"),
        ({"__key__": "a\nb", "x": b""}, "control character"),
        ({"__key__": "\ud800", "x": b""}, "UTF-8"),
        ({"__key__": "k"}, "no field"),
        ({"__key__": "k", "__shard__": "s"}, "no field"),
        ({"__key__": "k", "": b""}, "without a slash"),
        ({"__key__": "k", "a/b": b""}, "without a slash"),
        ({"__key__": "k", "JPG": b""}, "lower case.*'jpg'"),
        ({"__key__": "k", "__other__": b""}, "leading underscores"),
        ({"__key__": "k", "a\x7f": b""}, "control character"),
        ({"__key__": "k", "x": 7}, "field 'x' must be bytes.*not int"),
        ({"__key__": "k", "x": None}, "not NoneType"),
        ({"__key__": "k", "x": memoryview(b"abcd")[::2]}, "contiguous"),
    ],
)
def test_what_would_not_come_back_is_refused(sample, match):
    """A refused sample leaves no byte in the shard, and the next good one goes in."""
    out = bytearray()
    writer = TarWriter(out.extend)
    with pytest.raises(ConfigError, match=match):
        writer.add({"a": b"1", **sample} if "no field" not in match else sample)
    assert (out, writer.offset_bytes) == (b"", 0)
    writer.add({"__key__": "good", "x": b"1"})


def test_neighbours_with_one_key_are_refused():
    """They would be read as one sample; apart, the same key may come again."""
    writer = TarWriter(lambda _: None)
    writer.add({"__key__": "k", "x": b"1"})
    with pytest.raises(ConfigError, match="twice in a row"):
        writer.add({"__key__": "k", "y": b"1"})
    writer.add({"__key__": "l", "x": b"1"})
    writer.add({"__key__": "k", "x": b"1"})


def test_a_finished_shard_takes_nothing_more():
    """finish is idempotent, and add after it is refused."""
    out = bytearray()
    writer = TarWriter(out.extend)
    assert writer.finish() == writer.finish() == len(out) == 1024
    with pytest.raises(ConfigError, match="finished"):
        writer.add({"__key__": "k", "x": b"1"})
