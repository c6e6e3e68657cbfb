from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import pytest

from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.formats import FORMATS, HEAD_BYTES, TarParser, TarWriter, detect, format_of_name, parser_of

TFRECORD = struct.pack("<Q", 0) + bytes.fromhex("29039807 d8ea82a2")  # an empty record; both CRCs are known ones


def tar() -> bytes:
    out = bytearray()
    writer = TarWriter(out.extend)
    writer.add({"__key__": "k", "x": b"1"})
    writer.finish()
    return bytes(out)


def test_the_content_decides():
    """A tar is one whatever it is called, also an empty one; without content the name decides."""
    assert detect("s3://b/shard-0", tar()[:HEAD_BYTES]) == "tar"
    assert detect("empty.tar", bytes(HEAD_BYTES)) == "tar"
    assert detect("x", memoryview(bytearray(tar()))) == "tar"
    assert detect("a/B.TAR") == "tar"


@pytest.mark.parametrize(
    ("head", "seems"),
    [
        (b"BZh9", "bzip2"),
        (b"\x89HDF\r\n", "HDF5"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b'\n{"a": 1}', "text"),
    ],
)
def test_what_is_not_supported_is_named(head, seems):
    """The error says what the object seems to be, what is supported, and which object it is."""
    with pytest.raises(DataError, match=rf"seems to be {seems}.*s\.tar.*supported: tar, "):
        detect("s.tar", head)


def test_what_nobody_knows_is_refused():
    """Neither name nor content known: the error still says what is supported."""
    for name, head in (("notes.bin", b""), ("s.tar", b"\x01\x02\x03"), ("s.tar", tar()[: HEAD_BYTES - 1])):
        with pytest.raises(DataError, match=r"not known.*supported: tar"):
            detect(name, head)


def test_names_alone():
    """A listing can be sifted without reading: what is no shard by its name has no format."""
    assert [format_of_name(name) for name in ("index.json", "tar", "", "a.tar.idx", "a.gz", "README.md")] == [None] * 6
    names = {
        "a.tar": "tar",
        "a.TGZ": "tar.gz",
        "a.tar.zst": "tar.zst",
        "c4-train.00000-of-01024.json.gz": "jsonl.gz",
        "x.jsonl.zst": "jsonl.zst",
        "x.ndjson": "jsonl",
        "x.rec": "recordio",
        "shard.00000.mds.zstd": "mds.zst",
        "train.tfrecord-00003-of-00100": "tfrecord",
        "train-00003-of-00100.tfrecord.gz": "tfrecord.gz",
    }
    assert {name: format_of_name(name) for name in names} == names


@pytest.mark.parametrize("inner", ["tar", "jsonl", "tfrecord", "recordio"])
def test_what_is_inside_of_gzip_is_found(inner):
    """gzip says nothing of what it holds, its first bytes do; where they are too few, the name does."""
    data = {
        "tar": tar(),
        "jsonl": b'{"a": 1}\n',
        "tfrecord": TFRECORD,
        "recordio": b"\x0a\x23\xd7\xce\0\0\0\0",
    }[inner]
    assert detect("x", gzip.compress(data)[:HEAD_BYTES]) == f"{inner}.gz"
    assert detect("x.tgz", b"\x1f\x8b\x08\0") == "tar.gz"
    assert detect("x.tar.zst", b"\x28\xb5\x2f\xfd") == "tar.zst"
    for head in (b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(DataError, match="neither its name nor its first bytes"):
            detect("x.tar", head)


def test_content_is_found_whatever_the_name_is():
    """Each format has first bytes that no other takes for its own."""
    mds = struct.pack("<3I", 1, 14, 14) + b"{}"
    heads = {"tfrecord": TFRECORD, "jsonl": b'{"a"', "mds": mds, "tar": tar(), "zip": b"PK\x03\x04", "parquet": b"PAR1"}
    assert {name: detect("x.bin", head[:HEAD_BYTES]) for name, head in heads.items()} == {name: name for name in heads}
    assert detect("x", bytes(512)) == "tar"


def test_every_format_has_a_parser():
    """Each row makes a parser that answers the protocol; an unknown name is refused with the known ones."""
    for name, row in FORMATS.items():
        start = 512 if row.unit == "sample" and not (row.head or row.decide or row.ranged) else 0
        parser = parser_of(name, shard="s", start_offset_bytes=start)
        assert (parser.offset_bytes, parser.pending, parser.skipped_samples) == (start, False, 0)
        if row.decide:
            with pytest.raises(ConfigError, match="only the shard's first record decides"):
                parser_of(name, shard="s", start_offset_bytes=512)
        if name.endswith((".gz", ".zst")):
            with pytest.raises(ConfigError, match="compressed"):
                parser_of(name, shard="s", start_offset_bytes=512)
        if start or (name.partition("-")[0] in {"tfrecord", "recordio", "jsonl"} and "." not in name):
            assert parser.finish() == []
        else:  # even a shard without samples has a head, a footer or a frame
            with pytest.raises(CorruptShardError, match="0 bytes, too few"):
                parser.finish()
        with pytest.raises(ConfigError, match="on_corrupt='ignore' is not one of raise"):
            parser_of(name, shard="s", on_corrupt="ignore")
    assert isinstance(parser_of("tar", shard="s"), TarParser)
    with pytest.raises(ConfigError, match=r"'parket' does not exist\. Hint: did you mean 'parquet'"):
        parser_of("parket", shard="s")
    with pytest.raises(ConfigError, match=r"'xyz' does not exist\. Hint: supported: tar, "):
        parser_of("xyz", shard="s")


def test_the_reference_names_every_format():
    """Names and suffixes stand in docs/reference/formats.md, and no name there is unknown."""
    page = (Path(__file__).parents[3] / "docs/reference/formats.md").read_text()
    words = set(re.findall(r"`([^`]+)`", page))
    plain = {name: row for name, row in FORMATS.items() if "-" not in name}
    assert set(plain) <= words
    assert {name for name in FORMATS if "-" in name and "." not in name} <= words
    missing = [suffix for row in plain.values() for suffix in row.suffixes if suffix not in words]
    derived = [suffix for suffix in missing if not suffix.endswith((".gz", ".zst", ".zstd"))]
    assert derived == []
    assert {word for word in words if re.fullmatch(r"(tar|tfrecord|recordio|jsonl|mds)[-.]\w+(\.\w+)?", word)} <= set(
        FORMATS
    )
