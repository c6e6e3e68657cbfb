from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from loading import pipeline, write_counted


def test_a_batch_is_a_line_for_each_field(tmp_path: Path) -> None:
    """Dtype and shape of arrays, length and kind of lists; what the loader adds comes last."""
    write_counted(tmp_path, (8,))
    with ps.Loader(pipeline(tmp_path, window=None)) as loader:
        said = ps.describe(next(iter(loader))).splitlines()
    assert said[0] == "cls           int64[8]"
    assert said[1] == "txt           list of 8 str, first 'sample 0' (8)"
    assert [line.split()[0] for line in said] == ["cls", "txt", "__key__", "__shard__", "__position__"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((2, 1024, 1024), np.uint8), "uint8[2, 1024, 1024], 2 MiB"),
        (np.float32(1.5), "float32 1.5"),
        (np.int64(7), "int64 7"),
        (b"x" * 50, "b'" + "x" * 40 + "'... (50)"),
        (memoryview(b"abc"), "b'abc' (3)"),
        ([], "list of 0"),
        ([1, "a"], "list of 2 int or str, first 1"),
        ({"a": None}, "a  None"),
        (ps.FetchConfig(), "FetchConfig FetchConfig("),
    ],
)
def test_values_of_every_kind(value: object, said: str) -> None:
    """Samples, single values, and what collate= makes."""
    assert ps.describe(value).startswith(said)


def test_a_tensor_is_described_as_an_array() -> None:
    """Dtype and shape, without its framework's name."""
    torch = pytest.importorskip("torch")
    assert ps.describe({"x": torch.zeros(2, 3)}) == "x  float32[2, 3]"
    assert ps.describe({"x": torch.zeros(2, device="meta")}) == "x  float32[2] on meta"
