"""Every n-th batch: what the workers of a DataLoader are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, pipeline, write_counted
from penstock.errors import ConfigError
from resuming import assert_resumes_everywhere, assert_same

SIZES = (20, 3, 0, 31, 12, 1, 25)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    index(pipeline(tmp_path / "data"), tmp_path / "index")
    return tmp_path / "data"


@pytest.mark.parametrize("how", ["stream", "require"])
@pytest.mark.parametrize("kind", ["rows", "members", "filtered", "carried"])
def test_the_strides_together_are_the_epoch(folder: Path, how: Any, kind: str) -> None:
    """Batch k is worker (k mod n)'s, whatever makes batches; each resumes behind any of its own."""
    made = ps.shards(f"{folder}/").shuffle(window=30)
    if kind == "members":
        made = made.batch(8)
    elif kind == "filtered":
        made = made.decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] % 3).batch(8)
    elif kind == "carried":
        made = made.decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] % 3, refill=True).batch(8)
    else:
        made = made.decode(ps.Integer("cls")).batch(8)
    options: dict[str, Any] = {"index": how, "index_dir": folder.parent / "index", "lanes": 2, "threads": 1}
    with ps.Loader(made, **options) as loader:
        whole = [list(loader) for _ in range(2)]
    for which in range(3):
        with ps.Loader(made, stride=(which, 3), **options) as loader:
            for batches in whole:
                found = list(loader)
                for left, right in zip(batches[which::3], found, strict=True):
                    assert_same(left, right)
            if how == "require" and kind in ("rows", "members"):
                assert len(loader) == len(whole[0][which::3])
    assert_resumes_everywhere(lambda: ps.Loader(made, stride=(1, 3), **options))


def test_others_batches_are_not_decoded(folder: Path) -> None:
    """A worker runs the user's functions on its own batches only."""
    seen: list[int] = []

    def counts(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(sample["cls"])
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(counts).batch(10)
    with ps.Loader(made, stride=(2, 5), threads=1) as loader:
        list(loader)
    assert sorted(seen) == [*range(20, 30), *range(70, 80)]


def test_bad_strides_are_refused(folder: Path) -> None:
    """(j, n) with 0 <= j < n, without processes, and not where ranks have to agree."""
    for stride in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="stride"):
            ps.Loader(pipeline(folder), stride=stride)
    with pytest.raises(ConfigError, match="processes"):
        ps.Loader(pipeline(folder), stride=(0, 2), processes=1)
    with ps.Loader(pipeline(folder), stride=(0, 2), rank=0, world_size=2, agree=int) as loader:
        with pytest.raises(ConfigError, match="agree"):
            next(iter(loader))
