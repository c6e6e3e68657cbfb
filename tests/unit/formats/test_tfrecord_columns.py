"""Examples that are framed many at once, compared with the writer of single ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.formats import TFRecordWriter
from penstock.formats.tfrecord_columns import ExampleFramer

_NAMES = ("image", "label", "a/very/long/name" * 9, "ü")
_INT64 = st.integers(-(2**63), 2**63 - 1)
_VALUES = st.one_of(
    st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    st.lists(_INT64, min_size=1, max_size=6),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=6),
)


def _one_by_one(columns: dict[str, list[object]]) -> bytes:
    out: list[bytes] = []
    writer = TFRecordWriter(lambda data: out.append(bytes(data)))
    for row in zip(*columns.values(), strict=True):
        writer.add(dict(zip(columns, row, strict=True)))
    return b"".join(out)


@given(st.data())
def test_it_equals_the_writer_of_single_samples(data: st.DataObject) -> None:
    """Framing columns gives the bytes that writing each sample gives, also when headers are known from before."""
    names = data.draw(st.lists(st.sampled_from(_NAMES), min_size=1, unique=True))
    framer = ExampleFramer(names)
    for _ in range(2):
        count = data.draw(st.integers(1, 5))
        columns = {name: (data.draw(_VALUES) * 5)[:count] for name in names}
        assert framer.frame(columns) == _one_by_one(columns)


def test_values_of_many_lengths() -> None:
    """Values of any length, also those whose lengths take more bytes, are framed as by the writer."""
    rng = np.random.default_rng(0)
    values = [rng.bytes(size) for size in (0, 1, 127, 128, 16383, 16384, 70_000, 3 << 20, 1, 1)]
    columns = {"x": values, "y": list(range(len(values))), "z": [b""] * len(values), "zz": [-0.0, 0.0] * 5}
    framer = ExampleFramer(tuple(columns))
    assert framer.frame(columns) == framer.frame(columns) == _one_by_one(columns)


def test_a_value_that_no_example_holds() -> None:
    """A number beyond 64 bits is refused by name, as by the writer."""
    with pytest.raises(ConfigError, match="'x' cannot be a feature"):
        ExampleFramer(("x",)).frame({"x": [1, 2**63]})


@pytest.mark.parametrize("labels", [[7, 7, 7], [1, -1, 2]], ids=["alike", "of_several_lengths"])
def test_rows_of_an_array(labels: list[int]) -> None:
    """The rows of an array are framed as values of bytes, whether or not the records have one length."""
    rows = np.random.default_rng(0).integers(0, 256, (3, 200), np.uint8)
    framed = ExampleFramer(("image", "label")).frame({"image": rows, "label": labels})
    assert framed == _one_by_one({"image": list(map(bytes, rows)), "label": labels})
