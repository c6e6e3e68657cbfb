"""Shards of streamed formats, damaged in every way: typed errors only, and the same samples wherever chunks are cut."""

from __future__ import annotations

import gzip
import io
import itertools
import tarfile
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import formatted
from penstock.errors import CorruptShardError, UnsupportedFormatError
from penstock.formats import feed_in_columns, feed_in_pieces, parser_of, tar_columns, tfrecord_columns
from penstock.formats.tar_header import byte_sum
from penstock.formats.writers import encode_example

KEYS = ("a", "b", "d/c", "d/c", "__e__/f", "long" * 40, "é")
FIELDS = ("x", "X", "y.json", "__key__", "")
RECORDS = (b"", b"\x01", encode_example({"x": b"1", "n": [1]}), encode_example({"x": b"1"}) + b"\x12\x00")
LINES = (
    b"{}",
    b'{"key": "\\ud800"}',
    b'{"id": 1e999}',
    b"[1]",
    b"\xef\xbb\xbf{}",
    b'{"key": "a"}',
    b"nul",
    b"[" * 3000,
)
SIZES = (
    b"00000000000\0", b"00000000017\0", b"777777777777", b"-0000000001\0", b"      17   \0", b"0o17\0\0\0\0\0\0\0\0",
    b"1_7\0\0\0\0\0\0\0\0\0", b"\x80" + bytes(10) + b"\x11", b"\x80" + b"\x7f" * 11, b"\xff" * 12, bytes(12), b"8" * 12,
)  # fmt: skip
PAX = (
    {"size": "5" * 5000}, {"size": "17"}, {"size": "-1"}, {"size": "9" * 18}, {"path": "p/q.x"}, {"comment": "c" * 700},
    {"mtime": "1.5"}, {"path": ""},
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_columns_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are looked for in the few kilobytes that these tests can afford."""
    monkeypatch.setattr(tar_columns, "REGULAR_BYTES_MIN", 2048)
    monkeypatch.setattr(tfrecord_columns, "RECORDS_MIN", 2)


def resized(data: bytes, number: int, size: bytes) -> bytes:
    """A tar whose header number `number` says another size, under a checksum that fits."""
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    at = starts[number % len(starts)]
    head = data[at : at + 124] + size + data[at + 136 : at + 148] + b" " * 8 + data[at + 156 : at + 512]
    return data[:at] + head[:148] + b"%06o\0 " % byte_sum(head) + head[156:] + data[at + 512 :]


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """By the standard library: plain members, links, PAX records of all kinds, sizes in all encodings, files joined."""
    out = io.BytesIO()
    form = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    members = draw(
        st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(FIELDS), st.integers(0, 1300)), max_size=9)
    )
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for key, field, size in members:
            info = tarfile.TarInfo(f"{key}.{field}"[: 150 if form != tarfile.USTAR_FORMAT else 90])
            info.size = size
            info.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + [tarfile.SYMTYPE, tarfile.DIRTYPE, b"A", b"7"]))
            if form == tarfile.PAX_FORMAT and draw(st.booleans()):
                info.pax_headers = draw(st.sampled_from(PAX))
            tar.addfile(info, io.BytesIO(bytes(size)))
    data = out.getvalue()
    if draw(st.booleans()):
        data = data.rstrip(b"\0")
        data += bytes(-len(data) % 512)
    if members and data and draw(st.booleans()):
        data = resized(data, draw(st.integers(0, 20)), draw(st.sampled_from(SIZES)))
    return data


@st.composite
def shards(draw: st.DrawFn, name: str) -> bytes:
    """A shard of a format, sound but for what the format's own writer would not write."""
    inner, _, compression = name.partition(".")
    if inner == "tar":
        data = draw(tars())
    elif inner.startswith("jsonl"):
        data = b"\n".join(draw(st.lists(st.sampled_from(LINES), max_size=8)))
    elif inner == "mds":
        values = draw(st.lists(st.binary(max_size=40), max_size=6))
        data = formatted("mds", [{"__key__": "k", "n": value, "m": b"1"} for value in values])
    else:
        values = draw(st.lists(st.sampled_from(RECORDS), max_size=8))
        data = b"".join(formatted(inner, [{"n": value, "record": value}][:1]) for value in values)
    if not compression:
        return data
    cut = draw(st.integers(0, len(data)))
    pack: Any = gzip.compress
    if compression == "zst":
        pack = zstandard.ZstdCompressor(write_checksum=draw(st.booleans())).compress
    return pack(data[:cut]) + pack(data[cut:])


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with bytes flipped, cut off, filled with zeros, repeated, moved or behind each other."""
    for kind in draw(
        st.lists(st.sampled_from(["flip", "cut", "zero", "repeat", "drop", "extend", "join"]), max_size=3)
    ):
        unit = draw(st.sampled_from([1, 4, 512]))
        at = draw(st.integers(0, len(data) // unit)) * unit
        end = min(len(data), at + draw(st.integers(1, 4)) * unit)
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "zero":
            data = data[:at] + bytes(end - at) + data[end:]
        elif kind == "repeat":
            data = data[:end] + data[at:]
        elif kind == "drop":
            data = data[:at] + data[end:]
        elif kind == "extend":
            data += draw(st.sampled_from([b"\0", b"\0" * 512, b"junk", data[:100]]))
        else:
            data += data
    return data


def read(name: str, data: bytes, edges: list[int], policy: Any, *, columns: bool = False) -> tuple[Any, ...]:
    """What a parser says: samples and counts, or the error."""
    parser = parser_of(name, shard="s", on_corrupt=policy)
    found = []
    try:
        for start, end in itertools.pairwise(edges):
            for some in (feed_in_columns if columns else feed_in_pieces)(parser, data[start:end]):
                found += list(some)
            assert parser.held_bytes <= len(data) * 1100
        found += parser.finish()
    except UnsupportedFormatError as error:
        return ("unsupported", error.offset_bytes) if "." not in name else ("unsupported",)
    except CorruptShardError as error:
        assert policy == "raise"
        return ("corrupt", error.offset_bytes, error.what) if "." not in name else ("corrupt",)
    told = [
        (one.key, one.offset_bytes, one.size_bytes, [(field, bytes(value)) for field, value in one.fields.items()])
        for one in found
    ]
    skipped_bytes = parser.skipped_bytes if "." not in name else None  # nobody knows how long a broken stream would be
    return told, parser.skipped_samples, skipped_bytes, str(parser.skipped_error) if "." not in name else None


NAMES = [
    "tar",
    "tfrecord",
    "recordio",
    "jsonl",
    "jsonl-columns",
    "mds",
    "tar.gz",
    "tar.zst",
    "jsonl.gz",
    "tfrecord.zst",
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_shards_give_the_same_at_every_cut(name: str, data: st.DataObject) -> None:
    """Whatever the damage and the policy: nothing but typed errors, none that is corrupt while skipping; no cut matters."""
    damaged = data.draw(mutations(data.draw(shards(name))))
    cuts = data.draw(st.lists(st.integers(0, len(damaged)), max_size=6))
    every = data.draw(st.sampled_from([1, 7, 100, 512]))
    for policy in ("raise", "skip_sample", "skip_shard"):
        whole = read(name, damaged, [0, len(damaged)], policy)
        assert read(name, damaged, [0, *sorted(cuts), len(damaged)], policy) == whole
        assert read(name, damaged, [*range(0, len(damaged), every), len(damaged)], policy) == whole
        assert read(name, damaged, [0, *sorted(cuts), len(damaged)], policy, columns=True) == whole


def by_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes of the regular members, by the standard library."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar if member.isreg()]  # type: ignore[union-attr]


@settings(max_examples=100, deadline=None)
@given(drawn=st.data())
def test_sound_tars_are_read_as_tarfile_reads_them(drawn: st.DataObject) -> None:
    """Where both give an answer it is the same, members that belong to no sample left out."""
    data = drawn.draw(tars())
    said = read("tar", data, [0, len(data)], "raise")
    if isinstance(said[0], str) or not data.strip(b"\0"):
        return
    try:
        members = by_tarfile(data)
    except (tarfile.TarError, ValueError):
        return
    if "" in dict(members):  # an empty path in a PAX header: to POSIX as if it were not there, to tarfile the name
        return
    ours = {(f"{key}.{field}".lower(), value) for key, _, _, fields in said[0] for field, value in fields}
    theirs = {(name.lower(), value) for name, value in members if "." in name and not name.startswith("__e__")}
    assert ours == {(name, value) for name, value in theirs if name.rpartition("/")[2].find(".") > 0}
