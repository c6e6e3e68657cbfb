from __future__ import annotations

import base64
import decimal
import io
import json
import math
import random
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptShardError, UnsupportedFormatError
from penstock.formats import ranged_of, samples_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def written(table, **options) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def read(data: bytes, **options):
    reader = ranged_of("parquet", shard="s", size_bytes=len(data), **options)
    samples = [each for some in samples_of(reader, lambda span: data[span.start : span.end]) for each in some]
    return reader, samples


def seconds(text: str) -> decimal.Decimal:
    """Of a duration as it is written: ``-PT1.500S``."""
    sign, _, rest = text.partition("PT")
    return decimal.Decimal(sign + rest.removesuffix("S"))


def moment(text: str, unit: str) -> int:
    """Units since 1970, by numpy."""
    return int(np.datetime64(text.removesuffix("Z"), unit).astype(np.int64))


def of_day(text: str) -> decimal.Decimal:
    """Seconds since midnight."""
    hours, minutes, rest = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + decimal.Decimal(rest)


INT64 = st.integers(-(2**63) + 1, 2**63 - 1)  # the smallest of all is numpy's "not a time"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def whole(bits: int):
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def times() -> dict:
    """type -> (stored whole numbers, what JSON says of a number)."""
    found = {pa.date32(): (whole(32), lambda text: moment(text, "D"))}
    for unit, per_s in UNITS.items():
        if unit != "s":  # which Parquet stores as milliseconds
            for zone in (None, "UTC", "Europe/Berlin"):
                found[pa.timestamp(unit, zone)] = (INT64, lambda text, unit=unit: moment(text, unit))
        day = st.integers(0, 86_400 * per_s - 1)
        kind = pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)
        if unit != "s":
            found[kind] = (day, lambda text, per_s=per_s: of_day(text) * per_s)
        found[pa.duration(unit)] = (INT64, lambda text, per_s=per_s: seconds(text) * per_s)
    return found


TIMES = times()
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view()]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
NUMBERS = {
    **{kind: st.integers(0, 2**bits - 1) for bits, kind in ((8, pa.uint8()), (16, pa.uint16()), (64, pa.uint64()))},
    **{kind: whole(bits) for bits, kind in ((8, pa.int8()), (16, pa.int16()), (32, pa.int32()), (64, pa.int64()))},
    pa.bool_(): st.booleans(),
    pa.float16(): st.floats(width=16, allow_nan=False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
}


@st.composite
def columns(draw, nested: bool = True):
    """(arrow array of some rows, what a field's memoryview stands for: a function, expected values: None for a null)."""
    rows_count = draw(st.integers(1, 6))

    def rows(values):
        return draw(st.lists(st.none() | values, min_size=rows_count, max_size=rows_count))

    which = draw(st.sampled_from(["bytes", "text", "fixed", "number", "numbers", "times", "decimal", "uuid", "json",
                                  "tensor", "dictionary", "list", "map", "objects"]))  # fmt: skip
    if which == "bytes":
        values = rows(st.binary(max_size=9))
        return pa.array(values, draw(st.sampled_from(BYTES))), bytes, values
    if which == "text":
        values = rows(TEXT)
        return pa.array(values, draw(st.sampled_from(TEXTS))), lambda value: bytes(value).decode(), values
    if which == "fixed":
        values = rows(st.binary(min_size=3, max_size=3))
        return pa.array(values, pa.binary(3)), bytes, values
    if which == "number":
        kind = draw(st.sampled_from(list(NUMBERS)))
        values = rows(NUMBERS[kind])
        return number_array(values, kind), lambda value: np.asarray(value).tolist()[0], values
    if which == "numbers":
        kind = draw(st.sampled_from(list(NUMBERS)))
        size, empty = draw(st.integers(1, 3)), False if kind == pa.bool_() else 0
        values = rows(st.lists(NUMBERS[kind], min_size=size, max_size=size))
        outer = draw(st.sampled_from([pa.list_(kind), pa.large_list(kind), pa.list_(kind, size)]))
        flat = number_array([each for value in values for each in value or [empty] * size], kind)
        return nested_array(values, flat, outer), lambda value: np.asarray(value).tolist(), values
    if which == "times":
        kind = draw(st.sampled_from(list(TIMES)))
        values = rows(TIMES[kind][0])
        array = pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
        return array, lambda value: TIMES[kind][1](json.loads(bytes(value))), values
    if which == "decimal":
        values = rows(st.decimals(-(10**5), 10**5, places=3, allow_nan=False))
        kind = draw(
            st.sampled_from([pa.decimal32(9, 3), pa.decimal64(15, 3), pa.decimal128(30, 3), pa.decimal256(60, 3)])
        )
        return pa.array(values, kind), lambda value: decimal.Decimal(json.loads(bytes(value))), values
    if which == "uuid":
        values = rows(st.binary(min_size=16, max_size=16))
        return pa.ExtensionArray.from_storage(pa.uuid(), pa.array(values, pa.binary(16))), bytes, values
    if which == "json":
        values = rows(st.dictionaries(TEXT, st.integers(), max_size=2).map(json.dumps))
        array = pa.ExtensionArray.from_storage(pa.json_(), pa.array(values, pa.string()))
        return array, lambda value: bytes(value).decode(), values
    if which == "tensor":
        tensors = np.arange(rows_count * 6, dtype=draw(st.sampled_from([np.float32, np.uint8, np.int64])))
        array = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors.reshape(rows_count, 2, 3))
        return array, lambda value: np.asarray(value).tolist(), tensors.reshape(rows_count, 2, 3).tolist()
    if which == "dictionary":
        values = rows(st.sampled_from(["a", "b", "ccc"]))
        return pa.array(values, pa.string()).dictionary_encode(), lambda value: bytes(value).decode(), values
    if which == "map":
        values = rows(st.lists(st.tuples(TEXT, st.integers(-9, 9)), max_size=3))
        plain = [None if value is None else [list(pair) for pair in value] for value in values]
        return pa.array(values, pa.map_(pa.string(), pa.int64())), lambda value: json.loads(bytes(value)), plain
    if which == "objects":
        values = rows(
            st.lists(st.fixed_dictionaries({"n": st.none() | st.integers(-9, 9), "b": st.binary(max_size=3)}))
        )
        kind = pa.list_(pa.struct([("n", pa.int64()), ("b", pa.binary())]))
        plain = [value and [{**each, "b": base64.b64encode(each["b"]).decode()} for each in value] for value in values]
        return pa.array(values, kind), lambda value: json.loads(bytes(value)), plain
    values = rows(st.lists(st.none() | st.binary(max_size=5), max_size=3))
    array = pa.array(values, draw(st.sampled_from([pa.list_(pa.binary()), pa.large_list(pa.binary_view())])))
    plain = [
        value and [each if each is None else base64.b64encode(each).decode() for each in value] for value in values
    ]
    return array, lambda value: json.loads(bytes(value)), plain


def number_array(values, kind):
    if kind == pa.float16():
        values = [None if value is None else np.float16(value) for value in values]
    return pa.array(values, kind)


def nested_array(values, flat, kind):
    """A list array whose rows are `values`, from its items."""
    there = pa.array([value is None for value in values])
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=there)
    size = len(flat) // len(values)
    offsets = pa.array(range(0, len(flat) + 1, size), pa.int64() if pa.types.is_large_list(kind) else pa.int32())
    form = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return form.from_arrays(offsets, flat, type=kind, mask=there)


@settings(max_examples=200, deadline=None)
@given(columns(), st.sampled_from(["none", "zstd"]), st.booleans(), st.integers(1, 4))
def test_every_type_comes_back(column, compression, use_dictionary, rows_per_group) -> None:
    """Any type that Parquet holds: the values that went in, whole, and a null is a field that is not there."""
    array, meant, expected = column
    if "view" in str(array.type):
        rows_per_group = len(array)  # pyarrow does not write slices of these
    data = written(
        pa.table({"x": array, "child": pa.StructArray.from_arrays([array], ["c"])}),
        compression=compression, use_dictionary=use_dictionary, row_group_size=rows_per_group,
    )  # fmt: skip
    _, samples = read(data)
    assert len(samples) == len(expected)
    for sample, value in zip(samples, expected, strict=True):
        for field in ("x", "child.c"):
            assert (field in sample.fields) == (value is not None)
            if value is not None:
                assert meant(sample.fields[field]) == value


def test_times_outside_of_what_python_knows_lose_nothing() -> None:
    """Years beyond 9999 and before 1, nanoseconds, and durations of centuries are ISO 8601 with all of their digits."""
    table = pa.table(
        {
            "day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
            "ms": pa.array([2**62]).cast(pa.timestamp("ms")),
            "before": pa.array([-(2**62)]).cast(pa.timestamp("us", "Europe/Berlin")),
            "ns": pa.array([1]).cast(pa.timestamp("ns", "UTC")),
            "clock": pa.array([86_399_999_999_999]).cast(pa.time64("ns")),
            "span": pa.array([-(2**63)]).cast(pa.duration("ns")),
            "spans": pa.array([[1]]).cast(pa.list_(pa.duration("s"))),
        }
    )
    _, [sample] = read(written(table))
    assert {name: json.loads(bytes(value)) for name, value in sample.fields.items()} == {
        "day": "5881580-07-11", "ms": "146140482-04-24T15:36:27.904", "before": "-144169-06-28T09:59:32.612096Z",
        "ns": "1970-01-01T00:00:00.000000001Z", "clock": "23:59:59.999999999", "span": "-PT9223372036.854775808S",
        "spans": ["PT1S"],
    }  # fmt: skip


def test_a_tensor_is_turned_as_it_says() -> None:
    """A tensor that is stored with its axes in another order has the order that it declares."""
    stored = np.arange(24, dtype=np.int16).reshape(1, 2, 3, 4)
    kind = pa.fixed_shape_tensor(pa.int16(), [2, 3, 4], permutation=[2, 0, 1])
    array = pa.ExtensionArray.from_storage(kind, pa.array(stored.reshape(1, 24).tolist(), pa.list_(pa.int16(), 24)))
    _, [sample] = read(written(pa.table({"x": array})))
    np.testing.assert_array_equal(np.asarray(sample.fields["x"]), stored[0].transpose(2, 0, 1))


MIXED = pa.table(
    {
        "id": list(range(60)),
        "text": [f"t{index % 5}" if index % 7 else None for index in range(60)],
        "image": [{"bytes": bytes([index]) * index, "path": f"{index}.jpg"} for index in range(60)],
        "tokens": [list(range(index % 5)) for index in range(60)],
        "tags": [["a", None, "b" * index] for index in range(60)],
        "when": pa.array(range(60)).cast(pa.timestamp("ns")),
        "map": pa.array([[("k", 1)]] * 60, pa.map_(pa.string(), pa.int32())),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((60, 2, 2), np.float32)),
        "price": pa.array([decimal.Decimal("1.25")] * 60),
    }
)
SHARDS = [
    written(MIXED, row_group_size=25, compression=compression, **options)
    for compression in ("none", "snappy", "zstd")
    for options in (
        {},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY", "id": "DELTA_BINARY_PACKED"}},
        {"data_page_version": "2.0", "write_page_checksum": True, "data_page_size": 100},
    )
]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(SHARDS), st.randoms(use_true_random=False))
def test_damage_is_rows_or_an_error(data: bytes, chance: random.Random) -> None:
    """Bytes changed anywhere, footer and pages: rows or our own errors; a policy that skips gives no other rows, and counts."""
    bad = bytearray(data)
    spot = chance.randrange(len(bad) - 2500 if chance.random() < 0.5 else 0, len(bad))
    for _ in range(chance.choice([1, 1, 2, 8])):
        bad[min(len(bad) - 1, spot + chance.randrange(4))] ^= 1 << chance.randrange(8)
    counts = []
    for on_corrupt in ("raise", "skip_sample", "skip_shard"):
        try:
            reader, samples = read(bytes(bad), on_corrupt=on_corrupt)
            counts.append(len(samples))
            assert (reader.skipped_samples > 0) == (reader.skipped_error is not None)
        except CorruptShardError:
            assert on_corrupt == "raise"
            counts.append(math.inf)
        except UnsupportedFormatError:
            counts.append(-1)
    assert counts[0] == counts[1] == counts[2] or counts[0] == math.inf


def test_an_unknown_extension_is_what_it_is_stored_as() -> None:
    """A type that a package registers gives the same values whether or not that package was imported."""

    class Label(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.int64(), "tests.label")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type, serialized):
            return cls()

    data = written(pa.table({"x": pa.ExtensionArray.from_storage(Label(), pa.array([4, None]))}))
    plain = read(data)[1]
    pa.register_extension_type(Label())
    try:
        assert read(data)[1] == plain
    finally:
        pa.unregister_extension_type("tests.label")
    assert plain[0].fields["x"].tolist() == [4]
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(range(16))], pa.binary(16)))
    _, [sample] = read(written(pa.table({"x": pa.ListArray.from_arrays([0, 1], ids)})))
    assert json.loads(bytes(sample.fields["x"])) == [str(uuid.UUID(bytes=bytes(range(16))))]
