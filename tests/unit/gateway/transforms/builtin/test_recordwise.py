"""``select``, ``redact``, ``jsonl2csv`` and the compressions, compared with tarfile, json, csv, gzip and zstandard."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bounded import run_bounded
from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.formats import TFRecordWriter
from penstock.formats.tfrecord import parse_example
from penstock.gateway.transforms.authoring import declaration_of
from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.builtin.recordwise import jsonl_to_csv
from penstock.gateway.transforms.builtin.selecting import redact, select
from penstock.gateway.transforms.builtin.streams import compressed, decompressed
from penstock.gateway.transforms.builtin.streams import gzip as gzip_transform
from penstock.gateway.transforms.reading import PipedReader
from transformed_sources import members_of, pieces, tar_of


def jsonl_of(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def tfrecord_of(*examples: dict[str, Any]) -> bytes:
    out: list[bytes] = []
    writer = TFRecordWriter(lambda data: out.append(bytes(data)))
    for example in examples:
        writer.add(example)
    return b"".join(out)


def examples_in(data: bytes) -> list[dict[str, Any]]:
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        fields = parse_example(memoryview(data[at + 12 : at + 12 + size]))
        found.append({name: bytes(v) if v.format == "B" else v.tolist() for name, v in fields.items()})
        at += 16 + size
    return found


def reader_of(chunks: list[bytes]) -> Any:
    return PipedReader("key", headers={}, size_bytes=None, pieces=iter(chunks))


NO_REQUEST: Any = None


def kept(data: bytes, names: tuple[str, ...], format_name: Any, cuts: list[int] | None = None) -> bytes:
    reader = reader_of(pieces(data, cuts or []))
    body: Any = select(reader, NO_REQUEST, extensions=names, source_format=format_name).body
    return b"".join(body)


def struck(data: bytes, names: tuple[str, ...], format_name: Any, replacement: str | None = None) -> bytes:
    reader = reader_of([data])
    body: Any = redact(reader, NO_REQUEST, fields=names, replacement=replacement, source_format=format_name).body
    return b"".join(body)


# ── select ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_select_of_a_tar() -> None:
    """Members with the extensions remain, also as the end of a longer one; samples without any disappear."""
    data = tar_of({"./a.jpg": b"1", "./a.seg.png": b"2", "./a.cls": b"3", "./b.txt": b"4", "./c.PNG": b"5"})
    assert members_of(kept(data, ("png", ".cls"), "tar")) == {"a.seg.png": b"2", "a.cls": b"3", "c.png": b"5"}


def test_select_of_tfrecords_keeps_the_bytes_of_features() -> None:
    """Features that remain keep their values of any kind, several bytes included."""
    data = tfrecord_of({"a": [b"x", b"y"], "b": [1, -2], "c": 0.5, "d": b""}, {"a": b"z", "b": 7})
    assert examples_in(kept(data, ("a", "b"), "tfrecord")) == [
        {"a.0": b"x", "a.1": b"y", "b": [1, -2]},
        {"a": b"z", "b": [7]},
    ]


def test_select_of_json_lines() -> None:
    """Names that remain keep their place, and dots name values in objects."""
    data = jsonl_of({"id": 1, "user": {"name": "ä", "email": "e"}, "x": None}, {"user": 3, "id": 2})
    lines = kept(data, ("user.name", "id"), "jsonl").decode().splitlines()
    assert [json.loads(line) for line in lines] == [{"id": 1, "user": {"name": "ä"}}, {"id": 2}]


def test_select_of_csv() -> None:
    """Columns that remain keep their order, their quoting where it is needed, and the line ends."""
    data = b'id,text,n\r\n1,"a, ""b""\r\nc",2\r\n3,,4\r\n'
    assert kept(data, ("n", "text"), "csv") == b'text,n\r\n"a, ""b""\r\nc",2\r\n,4\r\n'


@pytest.mark.parametrize(
    ("data", "format_name"),
    [(jsonl_of({"a": 1}), "jsonl"), (tfrecord_of({"a": 1}), "tfrecord"), (b"a\n1\n", "csv")],
    ids=["jsonl", "tfrecord", "csv"],
)
def test_a_name_that_nothing_has_is_an_error(data: bytes, format_name: str) -> None:
    """A misspelt name is an error and not an output without values."""
    with pytest.raises(DataError, match=r"none of|no column") as raised:
        kept(data, ("aa",), format_name)
    assert raised.value.shard == "key"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 1 << 16), max_size=6), st.sampled_from(["jsonl", "csv", "tfrecord", "tar"]))
def test_cuts_change_nothing(cuts: list[int], format_name: str) -> None:
    """The output does not depend on where the source is cut, even inside a character."""
    data = _SOURCES[format_name]
    assert kept(data, ("a", "ü"), format_name, cuts) == kept(data, ("a", "ü"), format_name)


_SOURCES = {
    "jsonl": jsonl_of(*({"a": "ä€😀" * index, "ü": index, "c": 1} for index in range(40))),
    "csv": b"\xef\xbb\xbf" + "a,b,ü\n".encode() + "".join(f'"ä\n{index}",2,😀\n' for index in range(200)).encode(),
    "tfrecord": tfrecord_of(*({"a": b"x" * index, "ü": index, "c": 1.5} for index in range(40))),
    "tar": tar_of({f"{index:03d}.{name}": b"%d" % index for index in range(99) for name in ("a", "b", "ü")}),
}


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_compressed_source_stays_compressed(compression: str) -> None:
    """The result of a compressed source is compressed in the same way."""
    source = b"".join(compressed([_SOURCES["jsonl"]], compression))
    out = kept(source, ("a",), "jsonl")
    plain = (
        gzip.decompress(out) if compression == "gz" else zstandard.ZstdDecompressor().decompressobj().decompress(out)
    )
    assert plain == kept(_SOURCES["jsonl"], ("a",), "jsonl")


# ── redact ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_redact_of_json_lines() -> None:
    """Names disappear at every place that the dots reach: in objects, in lists of them, and literally."""
    data = jsonl_of({"id": 1, "u": [{"email": "x", "n": 1}, [{"email": "y"}]], "u.email": "z", "email": "kept"})
    assert json.loads(struck(data, ("u.email",), "jsonl")) == {"id": 1, "u": [{"n": 1}, [{}]], "email": "kept"}
    assert json.loads(struck(data, ("u", "u.email"), "jsonl", "***")) == {
        "id": 1, "u": "***", "u.email": "***", "email": "kept",
    }  # fmt: skip


def test_a_repeated_name_hides_nothing() -> None:
    """If a name occurs twice in one object, no value of it reaches the output."""
    data = b'{"u":{"email":"secret"},"u":{"id":1}}\n{"email":"secret","a":1,"email":null}\n'
    assert b"secret" not in struck(data, ("u.email", "email"), "jsonl")


def test_redact_of_csv() -> None:
    """Columns disappear, or their values are replaced while the header stays; a missing column is an error."""
    data = b"id,mail\n1,a@b\n2,\n"
    assert struck(data, ("mail",), "csv") == b"id\n1\n2\n"
    assert struck(data, ("mail",), "csv", "x,y") == b'id,mail\n1,"x,y"\n2,"x,y"\n'
    with pytest.raises(DataError, match="no column 'email'"):
        struck(data, ("email",), "csv")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,b\n1\n", "1 fields, and the header 2"),
        (b'a,b\n1,"2\n', "not CSV"),
        (b"a,b\n1,\xff\n", "not UTF-8"),
        (b"a,a\n1,2\n", "twice"),
        (b"", "no header"),
    ],
    ids=["short-row", "open-quote", "not-utf8", "twice", "empty"],
)
def test_malformed_csv(data: bytes, message: str) -> None:
    """A row whose fields cannot be told apart with certainty is an error, because a value could slip through."""
    with pytest.raises(CorruptShardError, match=message) as raised:
        struck(data, ("a",), "csv")
    assert (raised.value.shard, raised.value.offset_bytes is not None) == ("key", True)


def test_redact_of_tfrecords() -> None:
    """Features disappear or become the replacement as bytes; the others keep their bytes."""
    data = tfrecord_of({"a": b"secret", "b": 1}, {"b": 2})
    assert examples_in(struck(data, ("a",), "tfrecord")) == [{"b": [1]}, {"b": [2]}]
    assert examples_in(struck(data, ("a",), "tfrecord", "no")) == [{"a": b"no", "b": [1]}, {"b": [2]}]


def test_records_that_are_not_examples() -> None:
    """A record that is not an Example is an error and never passed on as it is."""
    with pytest.raises(DataError, match="not a") as raised:
        struck(tfrecord_of({"record": b"\x0asecret"}), ("a",), "tfrecord")
    assert raised.value.offset_bytes == 0


# ── jsonl2csv ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_lines_as_csv() -> None:
    """Every value is found in the column of its name, whatever it contains."""
    data = jsonl_of(
        {"id": 1, "t": 'a,"b"\nc', "u": {"x": True, "y": None}, "l": [1, {"k": "ä"}]},
        {"t": "", "id": 12345678901234567890, "u": {"x": 0.5}},
    )
    rows = list(csv.DictReader(io.StringIO(b"".join(jsonl_to_csv([data], source="s")).decode(), newline="")))
    assert rows == [
        {"id": "1", "t": 'a,"b"\nc', "u.x": "true", "u.y": "", "l": '[1,{"k":"ä"}]'},
        {"id": "12345678901234567890", "t": "", "u.x": "0.5", "u.y": "", "l": ""},
    ]


def test_columns_that_are_named() -> None:
    """Named columns have their order, and other names are left out."""
    out = b"".join(jsonl_to_csv([jsonl_of({"a": 1, "b": 2}, {"c": 3})], source="s", columns=("b", "x"), header=False))
    assert out == b"2,\n,\n"


def test_a_name_that_comes_later() -> None:
    """Without named columns, a name that the first object lacks is an error, not a value that disappears."""
    with pytest.raises(DataError, match=r"names \['b'\]") as raised:
        b"".join(jsonl_to_csv([jsonl_of({"a": 1}, {"b": 2})], source="s"))
    assert raised.value.offset_bytes == 9


# ── compression ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=1 << 12), st.integers(1, 300), st.lists(st.integers(0, 1 << 20), max_size=5))
def test_compression_there_and_back(data: bytes, times: int, cuts: list[int]) -> None:
    """Compressed output depends on the bytes alone, standard modules read it, and decompressing gives the bytes again."""
    data *= times
    for compression in ("gz", "zst"):
        out = b"".join(compressed(pieces(data, cuts), compression))
        assert out == b"".join(compressed([data], compression))
        assert b"".join(decompressed(pieces(out, cuts), compression, source="s")) == data
        plain = (
            gzip.decompress(out)
            if compression == "gz"
            else zstandard.ZstdDecompressor().decompressobj().decompress(out)
        )
        assert plain == data


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "none", "trailing"])
def test_damaged_compression(compression: str, damage: str) -> None:
    """A compressed object that is damaged, cut off or empty is an error with its offset, never a short output."""
    good = b"".join(compressed([bytes(range(256)) * 4000], compression))
    flipped = bytes([*good[:-2], good[-2] ^ 1, good[-1]])
    bad = {"cut": good[:-3], "flipped": flipped, "none": b"", "trailing": good + b"garbage"}[damage]
    with pytest.raises(CorruptShardError) as raised:
        b"".join(decompressed([bad], compression, source="s"))
    assert raised.value.shard == "s"
    assert raised.value.offset_bytes is not None


@pytest.mark.server
def test_memory_is_bounded() -> None:
    """60 MB through gunzip, zstd and unzstd, and lines through redact, takes a few megabytes."""
    run_bounded(
        """
        import zlib
        from penstock.gateway.transforms.builtin.selecting import redact
        from penstock.gateway.transforms.builtin.streams import compressed, decompressed
        from penstock.gateway.transforms.reading import PipedReader

        def redacted(chunks, name):
            reader = PipedReader("s", headers={}, size_bytes=None, pieces=iter(chunks))
            return redact(reader, None, fields=(name,), source_format="jsonl").body

        def bomb():
            stream = zlib.compressobj(6, zlib.DEFLATED, 31)
            for _ in range(60):
                if data := stream.compress(bytes(1 << 20)):
                    yield data
            yield stream.flush()

        line = b'{"a":"' + b"x" * 1000 + b'","b":1}' + bytes([10])
        b"".join(compressed([b"x"], "zst")); b"".join(decompressed(compressed([b"x"], "zst"), "zst", source="s"))
        b"".join(redacted([line], "a"))
        begin()
        for piece in decompressed(compressed(decompressed(bomb(), "gz", source="s"), "zst"), "zst", source="s"):
            pass
        for piece in redacted((line * 1000 for _ in range(40)), "b"):
            pass
        """,
        memory_bytes_max=40 << 20,
    )


# ── declarations ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (select, {"extensions": (), "source_format": "auto"}, "at least one"),
        (select, {"extensions": ("a", "a"), "source_format": "auto"}, "twice"),
        (redact, {"fields": ("a",), "source_format": "tar"}, "redact takes"),
        (gzip_transform, {"level": 10}, "from 0 to 9"),
    ],
    ids=["none", "twice", "tar", "level"],
)
def test_arguments_are_checked_at_start(function: Any, arguments: dict[str, Any], message: str) -> None:
    """Arguments that make no sense are refused before anything is read."""
    check = declaration_of(function).check
    assert check is not None
    with pytest.raises((ConfigError, ValueError), match=message):
        check(arguments)


def test_every_builtin_exists() -> None:
    """Each name of the table is a function of that name, with a version."""
    from importlib import import_module

    for name, where in BUILTINS.items():
        module, _, function_name = where.partition(":")
        function = getattr(import_module(module), function_name)
        assert function.__name__ == name
        assert declaration_of(function).version
