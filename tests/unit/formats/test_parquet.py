from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest

from bounded import run_bounded
from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats import detect, parser_of, ranged_of, samples_of
from penstock.formats.parquet import PIECE_ROWS_MAX
from penstock.formats.parquet_headers import read_struct

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def parquet(table, **options) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def read(data, **options):
    asked = []

    def fetch(span):
        asked.append(span)
        return data[span.start : span.end]

    reader = ranged_of("parquet", shard="s.parquet", size_bytes=len(data), **options)
    return reader, [sample for some in samples_of(reader, fetch) for sample in some], asked


ROWS = 50
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS)),
        "text": [f"é{index}" if index % 7 else None for index in range(ROWS)],
        "image": [{"bytes": bytes([index]) * index, "path": f"{index}.jpg"} for index in range(ROWS)],
        "score": pa.array([index / 2 for index in range(ROWS)], pa.float32()),
        "flag": [index % 2 == 0 for index in range(ROWS)],
        "tokens": [list(range(index % 5)) if index % 11 else None for index in range(ROWS)],
        "box": pa.array([[index, 0.5] for index in range(ROWS)], pa.list_(pa.float32(), 2)),
        "nested": [{"a": {"b": index}} for index in range(ROWS)],
        "deep": [[["x"], []] for _ in range(ROWS)],
        "kind": pa.array(["cat", "dog"] * (ROWS // 2)).dictionary_encode(),
    }
)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_every_row_is_a_sample(compression):
    """Bytes, texts, numbers, lists, structs, nulls: each row has the values that went in, in order."""
    data = parquet(TABLE, row_group_size=16, compression=compression)
    assert detect("x", data[:512]) == "parquet"
    reader, samples, _ = read(data)
    assert [unit.samples_count for unit in reader.units] == [16, 16, 16, 2]
    assert [sample.key for sample in samples] == [str(index) for index in range(ROWS)]
    for index, sample in enumerate(samples):
        fields = sample.fields
        assert fields["id"].tolist() == [index]
        assert ("text" in fields) == bool(index % 7)
        assert "text" not in fields or bytes(fields["text"]).decode() == f"é{index}"
        assert bytes(fields["image"]) == bytes([index]) * index
        assert bytes(fields["image.path"]) == f"{index}.jpg".encode()
        assert fields["score"].tolist() == [index / 2]
        assert fields["flag"].tolist() == [index % 2 == 0]
        assert ("tokens" in fields) == bool(index % 11)
        assert "tokens" not in fields or fields["tokens"].tolist() == list(range(index % 5))
        assert fields["box"].tolist() == [index, 0.5]
        assert fields["nested.a.b"].tolist() == [index]
        assert json.loads(bytes(fields["deep"])) == [["x"], []]
        assert bytes(fields["kind"]) == [b"cat", b"dog"][index % 2]


def test_a_row_group_is_decoded_in_pieces():
    """However many rows it has, few are objects at a time; the rows are the same from any of them on."""
    table = pa.table({"n": list(range(10_000)), "text": [f"{n}" for n in range(10_000)]})
    data = parquet(table, row_group_size=6000)
    reader, samples, _ = read(data)
    assert [int(bytes(sample.fields["text"])) for sample in samples] == list(range(10_000))
    views = [data[span.start : span.end] for span in reader.units[0].spans]
    pieces = list(reader.pieces(0, views))
    assert max(len(piece.samples) for piece in pieces) == PIECE_ROWS_MAX
    for first in (1, PIECE_ROWS_MAX, 3000, 5999):
        assert [each for piece in reader.pieces(0, views, first=first) for each in piece.samples] == samples[first:6000]
    long = parquet(pa.table({"n": list(range(50)), "blob": [bytes(1 << 20)] * 50}), use_dictionary=False)
    reader, _, _ = read(long)
    views = [long[span.start : span.end] for span in reader.units[0].spans]
    assert max(piece.size_bytes for piece in reader.pieces(0, views)) <= 5 << 20


def test_what_is_corrupt_behind_good_rows_leaves_them():
    """A damaged page costs its own rows and those behind it; what was decoded before counts, and is given."""
    rows = [f"{n:04d}" * 100 for n in range(5000)]
    data = bytearray(parquet(pa.table({"x": rows}), use_dictionary=False, compression="none", data_page_size=100_000))
    at = data.index(rows[3000].encode())
    at = data.rindex(rows[2900].encode()[:4] * 100, 0, at)
    page = next(place for place in range(at, len(data)) if data[place] == 0x15)  # where the next page's header begins
    data[page : page + 8] = b"\xff" * 8
    reader, samples, _ = read(data, on_corrupt="skip_sample")
    assert 0 < len(samples) < 3400
    assert [bytes(sample.fields["x"]).decode() for sample in samples] == rows[: len(samples)]
    assert len(samples) + reader.skipped_samples == 5000
    with pytest.raises(CorruptShardError, match="row group 0 cannot be read"):
        read(data)


def test_only_wanted_columns_are_read():
    """A projection asks for fewer bytes, and gives the same values; the key's column comes along."""
    big = TABLE.append_column("big", [[bytes([index]) * 200_000 for index in range(ROWS)]])
    data = parquet(big, row_group_size=25, compression="none", use_dictionary=False)
    _, samples, asked = read(data, fields=["score"])
    assert [(sample.key, list(sample.fields)) for sample in samples[:2]] == [("0", ["score"]), ("1", ["score"])]
    assert sum(span.end - span.start for span in asked) < len(data) / 20
    with pytest.raises(ConfigError, match="none of the columns"):
        read(parquet(pa.table({"x": [1]})), fields=["y"])


def test_keys_without_a_column_are_row_numbers():
    """They do not depend on the row group that is read first."""
    data = parquet(pa.table({"x": list(range(10))}), row_group_size=4)
    reader, samples, _ = read(data)
    assert [sample.key for sample in samples] == [f"{index:012d}" for index in range(10)]
    unit = reader.units[1]
    again = reader.read(1, [data[span.start : span.end] for span in unit.spans])
    assert [sample.key for sample in again] == [sample.key for sample in samples[4:8]]


def test_streamed_it_is_collected_whole():
    """Who only streams gets the same rows, at the end."""
    data = parquet(TABLE)
    parser = parser_of("parquet", shard="s")
    assert [parser.feed(data[at : at + 1000]) for at in range(0, len(data), 1000)] == [[]] * -(-len(data) // 1000)
    assert parser.finish() == read(data)[1]


def test_what_is_corrupt_is_named_or_skipped():
    """A bad footer is the shard's end, a bad row group is one of several: the rest is read, and rows are counted."""
    data = bytearray(
        parquet(pa.table({"x": ["v" * 50 + str(i) for i in range(40)]}), row_group_size=10, use_dictionary=False)
    )
    reader, samples, _ = read(data)
    span = reader.units[1].spans[0]
    for at in range(span.start, span.start + 40):
        data[at] ^= 0xA5
    with pytest.raises(CorruptShardError, match=r"row group 1 cannot be read.*s\.parquet") as caught:
        read(data)
    assert caught.value.offset_bytes == span.start
    reader, left, _ = read(data, on_corrupt="skip_sample")
    assert left == samples[:10] + samples[20:]
    assert (reader.skipped_samples, reader.skipped_bytes) == (10, span.end - span.start)
    reader, left, _ = read(data, on_corrupt="skip_shard")
    assert left == samples[:10]
    for bad in (
        b"",
        b"PAR1",
        bytes(data[:-1]),
        bytes(data[:-8]) + b"\xff\xff\xff\xffPAR1",
        b"PAR1" + bytes(30) + b"\x1e\0\0\0PAR1",
    ):
        with pytest.raises(CorruptShardError, match="not a Parquet"):
            read(bad)
        reader, left, _ = read(bad, on_corrupt="skip_shard")
        assert (left, reader.skipped_samples) == ([], 1)


@pytest.mark.parametrize("on_corrupt", ["raise", "skip_sample", "skip_shard"])
@pytest.mark.parametrize(
    ("table", "text"),
    [
        (pa.table({"__shard__": [1]}), "penstock adds itself"),
        (pa.table({"x": [[1, None]]}), "null inside"),
        (pa.table({"a": [{"b": 1}], "a.b": [2]}), r"2 columns give the field 'a\.b'"),
        (pa.table({"a": [{"bytes": b"", "path": "x"}], "a.path": ["y"]}), r"give the field 'a\.path'"),
        (pa.table([[1], [2]], names=["x", "x"]), "2 columns give the field 'x'"),
    ],
)
def test_what_is_valid_but_cannot_be_given_is_an_error_under_every_policy(table, text, on_corrupt):
    """Names that would hide one another, names that penstock adds, and nulls for which there is no value: never skipped."""
    with pytest.raises(UnsupportedFormatError, match=text) as caught:
        read(parquet(table), on_corrupt=on_corrupt)
    assert caught.value.shard == "s.parquet"


def test_a_null_among_floats_is_nan():
    """In a list of floats a null has a value; and the fields that are not wanted may have twins."""
    _, [sample], _ = read(parquet(pa.table({"x": [[1.0, None]], "__key__": ["k"]})))
    assert (sample.key, list(sample.fields)) == ("k", ["x"])
    assert sample.fields["x"][0] == 1.0
    assert sample.fields["x"][1] != sample.fields["x"][1]
    _, [sample], _ = read(parquet(pa.table({"a": [{"b": 1}], "a.b": [2], "x": [3]})), fields=["x"])
    assert sample.fields["x"].tolist() == [3]


def test_an_encrypted_shard_is_not_corrupt():
    """A footer that is encrypted is refused under every policy."""
    for on_corrupt in ("raise", "skip_shard"):
        with pytest.raises(UnsupportedFormatError, match="encrypted"):
            read(b"PARE" + bytes(50) + b"PARE", on_corrupt=on_corrupt)


def grown(kind: str) -> bytes:
    """A few kilobytes that claim gigabytes, or are a valid file that repeats one long value many times."""

    def repeated(value, count):
        return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))

    made = {
        "a long value in many rows": lambda: repeated(b"v" * (8 << 20), 3000),
        "a long value in one list": lambda: pa.ListArray.from_arrays([0, 1000], repeated("t" * (4 << 20), 1000)),
        "a list of many": lambda: pa.ListArray.from_arrays([0, 20 << 20], pa.array(np.zeros(20 << 20, np.int8))),
        "long constants": lambda: pa.array([b"v" * (4 << 20)] * 72),
    }
    out = io.BytesIO()
    pq.write_table(
        pa.table({"x": made[kind]()}), out, compression="zstd", write_statistics=False,
        use_dictionary=kind != "long constants", dictionary_pagesize_limit=1 << 30,
    )  # fmt: skip
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a long value in many rows", "3000 samples"),
        ("a long value in one list", "CorruptShardError"),
        ("a list of many", "CorruptShardError"),
        ("long constants", "CorruptShardError"),
    ],
)
@pytest.mark.server
def test_few_bytes_take_little_memory(kind, said, tmp_path):
    """What a row group becomes is bounded before it is decoded; a value that many rows share is held once."""
    (tmp_path / "s.parquet").write_bytes(grown(kind))
    assert (tmp_path / "s.parquet").stat().st_size < 200_000
    code = f"""
        from penstock.errors import CorruptShardError
        from penstock.formats import ranged_of, look_into
        data = open({str(tmp_path / "s.parquet")!r}, "rb").read()
        reader = ranged_of("parquet", shard="s", size_bytes=len(data))
        look_into(reader, lambda span: data[span.start : span.end])
        begin()
        try:
            views = [data[span.start : span.end] for span in reader.units[0].spans]
            print(sum(len(piece.samples) for piece in reader.pieces(0, views)), "samples")
        except CorruptShardError as error:
            print(type(error).__name__, error)
    """
    assert run_bounded(code, memory_bytes_max=700 << 20).startswith(said)


def test_a_damaged_footer_is_an_error_not_the_end_of_the_process():
    """Flipped bits in the footer: samples or CorruptShardError. pyarrow's own view of a damaged column ends the process."""
    data = parquet(TABLE, row_group_size=16)
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8
    flips = random.Random(3)
    refused = 0
    for _ in range(120):
        damaged = bytearray(data)
        damaged[-flips.randint(9, footer_bytes)] ^= 1 << flips.randrange(8)
        try:
            read(damaged)
        except CorruptShardError as error:
            refused += 1
            last = error
    assert refused > 10
    assert last.shard == "s.parquet"


@pytest.mark.parametrize(
    ("footer", "text"),
    [
        (b"\x15", "cut off"),
        (b"\x19\xfc\xff\xff\xff\x7f", "does not fit"),
        (b"\x18\x7f", "does not fit"),
        (b"\x1c" * 40, "nested deeper"),
        (b"\x16" + b"\xff" * 11, "more than 64 bits"),
        (b"\x1d\x00", "a value of type 13"),
        (b"\x1b\x7f\x55", "does not fit"),
    ],
)
def test_a_footer_is_read_within_bounds(footer, text):
    """Lengths, depth and numbers that cannot be are refused before anything of that size is made."""
    with pytest.raises(ValueError, match=text):
        read_struct(footer)


def test_a_footer_holds_every_kind_of_value():
    """Numbers of all widths, texts, lists, maps, truth values; numbers of fields as differences or in full."""
    data = bytes.fromhex("1503 11 12 17000000000000f03f 18026869 192504 08 1b0155 0204 1307 0c14 00 00")
    assert read_struct(data) == {
        1: -2, 2: True, 3: False, 4: 1.0, 5: b"hi", 6: [2, 4], 7: None, 8: 7, 10: {},
    }  # fmt: skip
