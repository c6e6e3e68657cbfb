from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, DecodeError
from penstock.pipeline import Batch, Spec
from penstock.samples.columns import Layout, Ragged


class Tensor:
    """Like torch's: an array by protocol only."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.full((2,), 5, np.float32)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (True, np.bool_, ()),
        (7, np.int64, ()),
        (0.5, np.float64, ()),
        (np.float32(0.5), np.float32, ()),
        (np.zeros((2, 3), np.uint8), np.uint8, (2, 3)),
        (Tensor(), np.float32, (2,)),
    ],
)
def test_arrays_and_numbers_become_arrays(value: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """The first sample fixes dtype and shape; nothing is widened."""
    layout = Layout({"x": value})
    batch = layout.allocate(4)
    assert (batch["x"].dtype, batch["x"].shape) == (dtype, (4, *shape))
    layout.put(batch, 2, {"x": value}, key="k", shard="s")
    np.testing.assert_array_equal(batch["x"][2], np.asarray(value))


@pytest.mark.parametrize("value", ["text", b"bytes", [1, 2], {"a": 1}, None, np.array([None])])
def test_everything_else_becomes_a_list(value: Any) -> None:
    """Text, bytes and objects are kept as they are."""
    layout = Layout({"x": value})
    batch = layout.allocate(2)
    layout.put(batch, 1, {"x": value}, key="k", shard="s")
    assert batch["x"][0] is None
    assert batch["x"][1] is value


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (7, 7.5),
        (7, True),
        (7, "7"),
        (7, 2**70),
        (0.5, 1),
        (np.zeros(3, np.uint8), np.zeros(4, np.uint8)),
        (np.zeros(3, np.uint8), np.zeros(3, np.int64)),
        (np.zeros(3, np.uint8), np.zeros((1, 3), np.uint8)),
    ],
)
def test_what_does_not_fit_is_an_error(first: Any, later: Any) -> None:
    """No cast, no broadcast, no overflow: a sample unlike the first one names its field and key."""
    layout = Layout({"x": first})
    with pytest.raises(DecodeError, match="does not fit") as caught:
        layout.put(layout.allocate(1), 0, {"x": later}, key="k7", shard="s.tar")
    assert (caught.value.field, caught.value.sample_key, caught.value.shard) == ("x", "k7", "s.tar")


@pytest.mark.parametrize("later", [{}, {"x": 1, "y": 2}, {"y": 1}])
def test_fields_are_those_of_the_first_sample(later: dict[str, int]) -> None:
    """A sample with fields missing or added is an error that lists both."""
    layout = Layout({"x": 1})
    with pytest.raises(DecodeError, match="the first one had"):
        layout.put(layout.allocate(1), 0, later, key="k", shard="s")


def filled(rows: list[dict[str, Any]], **options: Any) -> Any:
    """Rows put and finished as a loader does."""
    layout = Layout(rows[0], Batch(size=len(rows), **options))
    batch = layout.allocate(len(rows))
    for row, values in enumerate(rows):
        layout.put(batch, row, values, key=f"k{row}", shard="s")
    batch["__key__"] = [f"k{row}" for row in range(len(rows))]
    return layout.finish(batch)


def test_numbers_of_numpy_and_of_python_share_a_column() -> None:
    """An int64 is an int64, whoever made it; nothing else is."""
    for first, later in ((7, np.int64(8)), (np.int64(7), 8), (0.5, np.float64(1))):
        layout = Layout({"x": first})
        batch = layout.allocate(1)
        layout.put(batch, 0, {"x": later}, key="k", shard="s")
        assert batch["x"][0] == later
    with pytest.raises(DecodeError):
        Layout({"x": np.float32(1)}).put({"x": np.empty(1, np.float32)}, 0, {"x": 1.0}, key="k", shard="s")


def test_padding_fills_up_to_the_longest() -> None:
    """Arrays of unequal shape lie in one corner of their row; the rest is the value, and the lengths are told."""
    rows = [{"t": np.arange(n, dtype=np.int32), "m": np.ones((n, 5 - n), np.uint8)} for n in (2, 0, 4)]
    batch = filled(rows, pad=(("t", -1), ("m", 0)))
    np.testing.assert_array_equal(batch["t"], [[0, 1, -1, -1], [-1] * 4, [0, 1, 2, 3]])
    assert (batch["t"].dtype, batch["m"].shape, batch["m"].dtype) == (np.int32, (3, 4, 5), np.uint8)
    assert batch["m"].sum() == 6 + 0 + 4
    assert batch["__t_length__"].tolist() == batch["__m_length__"].tolist() == [2, 0, 4]


def test_ragged_puts_end_to_end() -> None:
    """The i-th array is data[offsets[i]:offsets[i + 1]], empty ones included; lists of numbers are arrays too."""
    batch = filled([{"t": [1, 2]}, {"t": []}, {"t": [3]}], ragged=("t",))
    assert isinstance(batch["t"], Ragged)
    assert (batch["t"].data.tolist(), batch["t"].offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    assert (batch["t"].data.dtype, batch["t"].offsets.dtype) == (np.int64, np.int64)
    wide = filled([{"t": np.zeros((n, 3), np.uint8)} for n in (0, 2)], ragged=("t",))
    assert wide["t"].data.shape == (2, 3)


def test_unequal_arrays_must_be_alike_otherwise() -> None:
    """Another dtype, number of dimensions, or width end to end, is an error; so is what is no array."""
    first = {"t": np.zeros((2, 3), np.uint8)}
    for later in (np.zeros((2, 3), np.int8), np.zeros(2, np.uint8), "text", 3):
        for options in ({"pad": (("t", 0),)}, {"ragged": ("t",)}):
            with pytest.raises(DecodeError, match="does not fit"):
                filled([first, {"t": later}], **options)
    with pytest.raises(DecodeError, match="does not fit"):
        filled([first, {"t": np.zeros((2, 4), np.uint8)}], ragged=("t",))
    with pytest.raises(DecodeError, match="need arrays"):
        filled([{"t": "text"}], ragged=("t",))


def test_padding_must_be_a_value_of_the_dtype() -> None:
    """-1 is no uint8: it is refused, not wrapped round; nan is a float."""
    with pytest.raises(ConfigError, match="cannot hold this value"):
        filled([{"t": np.zeros(2, np.uint8)}], pad=(("t", -1),))
    assert np.isnan(filled([{"t": np.zeros(2)}, {"t": np.zeros(3)}], pad=(("t", float("nan")),))["t"][0, 2])
    with pytest.raises(ConfigError, match="samples have"):
        filled([{"t": np.zeros(2, np.uint8)}], pad=(("u", 0),))


def test_collate_makes_the_batch() -> None:
    """A function of the list of samples gives whatever it likes; it sees their keys, and its errors name it."""
    rows = [{"x": 1, "t": [1]}, {"x": 2, "t": [1, 2]}]

    def together(samples: list[dict[str, Any]]) -> Any:
        return [(sample["__key__"], int(sample["x"]), list(sample["t"])) for sample in samples]

    assert filled(rows, collate=together) == [("k0", 1, [1]), ("k1", 2, [1, 2])]
    with pytest.raises(DecodeError, match=r"lambda.* failed at .*test_columns.py:\d+: KeyError") as caught:
        filled(rows, collate=lambda samples: samples[0]["nothing"])
    assert caught.value.stage == "collate"
    with pytest.raises(DecodeError, match="returned None, not a batch"):  # it would end the epoch
        filled(rows, collate=lambda samples: None)


def test_a_batch_of_equal_columns_is_delivered_as_it_is() -> None:
    """Where nothing was asked for, nothing is copied."""
    layout = Layout({"x": 1})
    batch = layout.allocate(2)
    assert layout.finish(batch) is batch


def test_layouts_of_specs() -> None:
    """What a pipeline says gives the same columns as its first sample would, and says what is written in place."""
    layout = Layout.of_specs({"a": Spec("uint8", (2, 3)), "b": Spec("int64", ()), "c": Spec("object", ())})
    batch = layout.allocate(2)
    assert (batch["a"].shape, batch["b"].dtype, batch["c"]) == ((2, 2, 3), np.int64, [None, None])
    layout.put(batch, 0, {"a": np.ones((2, 3), np.uint8), "b": 5, "c": {}}, key="k", shard="s")
    assert layout.holds("a", Spec("uint8", (2, 3)))
    for name, spec in (("a", Spec("uint8", (3, 2))), ("a", None), ("b", Spec("int64", ())), ("z", Spec("uint8", (1,)))):
        assert not layout.holds(name, spec)


def test_collate_takes_arrays_of_any_shape() -> None:
    """Arrays of unequal shape reach the function as they are."""
    rows = [{"t": np.arange(n)} for n in (1, 3)]
    assert filled(rows, collate=lambda samples: [sample["t"].tolist() for sample in samples]) == [[0], [0, 1, 2]]
