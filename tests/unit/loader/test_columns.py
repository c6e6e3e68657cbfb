from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import DecodeError
from penstock.loader.columns import Layout


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
