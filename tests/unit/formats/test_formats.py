from __future__ import annotations

import pytest

from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, HEAD_BYTES, TarParser, TarWriter, detect, format_of_name, parser_of


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
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b'\n{"a": 1}', "text"),
    ],
)
def test_what_is_not_supported_is_named(head, seems):
    """The error says what the object seems to be, what is supported, and which object it is."""
    with pytest.raises(DataError, match=rf"seems to be {seems}.*s\.tar.*supported: tar \(\.tar\)"):
        detect("s.tar", head)


def test_what_nobody_knows_is_refused():
    """Neither name nor content known: the error still says what is supported."""
    for name, head in (("notes.bin", b""), ("s.tar", b"\x01\x02\x03"), ("s.tar", tar()[: HEAD_BYTES - 1])):
        with pytest.raises(DataError, match=r"not known.*supported: tar"):
            detect(name, head)


def test_names_alone():
    """A listing can be sifted without reading: what is no shard by its name has no format."""
    assert [format_of_name(name) for name in ("a.tar", "a.tar.gz", "index.json", "tar", "")] == ["tar", *[None] * 4]


def test_every_format_has_a_parser():
    """Each row makes a parser that answers the protocol; an unknown name is refused with the known ones."""
    for name in FORMATS:
        parser = parser_of(name, shard="s", start_offset_bytes=512)
        assert parser.offset_bytes == 512
        assert parser.finish() == []
    assert isinstance(parser_of("tar", shard="s"), TarParser)
    with pytest.raises(ConfigError, match="'rar' is not one of tar"):
        parser_of("rar", shard="s")
