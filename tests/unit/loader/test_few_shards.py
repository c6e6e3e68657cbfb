"""Few shards, one, and empty ones: no rank, lane or worker waits for what is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError
from resuming import in_step, valid_rows

EMPTY = bytes(10240)
"""A tar of nothing, as ``tar`` writes it."""


def job(rank: int, place: Path, **options: Any) -> dict[str, Any]:
    return {"rank": rank, "world_size": 4, "lanes": 8, "threads": 1, "index_dir": place, **options}


def read(made: Any, **options: Any) -> list[int]:
    with ps.Loader(made, **options) as loader:
        return [
            number
            for batch in loader
            for number, valid in zip(numbers([batch]), batch.get("__valid__", [True] * 99), strict=False)
            if valid
        ]


@pytest.mark.parametrize("sizes", [[40], [0, 23, 0], [7, 9], [2]])
def test_an_index_serves_more_ranks_than_shards(tmp_path: Path, sizes: list[int]) -> None:
    """Four ranks on one to three shards, empty ones among them: each sample once, as many batches on each."""
    total = write_counted(tmp_path / "data", sizes)
    made = pipeline(tmp_path / "data", window=8, batch=3)
    place = index(made, tmp_path / "index")
    found = [read(made, **job(rank, place)) for rank in range(4)]
    assert sorted(number for each in found for number in each) == list(range(total))
    lengths = set()
    for rank in range(4):
        with ps.Loader(made, **job(rank, place)) as loader:
            lengths.add(len(loader))
    assert len(lengths) == 1


@pytest.mark.parametrize("mode", ["stream", "require"])
def test_a_rank_without_a_sample_pads_with_those_of_others(tmp_path: Path, mode: Any) -> None:
    """A rank whose shards are empty, or whose samples are all filtered out, has as many batches, of rows that do not count."""
    write_counted(tmp_path / "data", [5, 0])
    stored = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls"))
    made = stored.filter(lambda sample: sample["cls"] % 2 == 0).batch(2)
    place = index(made, tmp_path / "index")

    def make(**options: Any) -> ps.Loader:
        return ps.Loader(made, threads=1, lanes=2, index=mode, index_dir=place, **options)

    ranks = in_step(make, 2)
    assert sorted(number for batches in ranks for number in valid_rows(batches, "cls")) == [0, 2, 4]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch["cls"]) == len(batch["__valid__"]) for batches in ranks for batch in batches)


def test_a_rank_without_a_shard_is_refused(tmp_path: Path) -> None:
    """Without an index two shards do for two ranks, not for four: an error with both numbers on each of them."""
    write_counted(tmp_path / "data", [7, 9])
    made = pipeline(tmp_path / "data", window=8, batch=3)
    for rank in range(4):
        with pytest.raises(ConfigError, match=r"2 shards are fewer than 4 ranks"):
            read(made, **job(rank, tmp_path / "index", agree=lambda n: n))


@pytest.mark.parametrize("mode", ["stream", "require"])
@pytest.mark.parametrize("empties", ["first", "last", "all but one"])
def test_empty_shards(tmp_path: Path, mode: Any, empties: str) -> None:
    """Shards of no samples add nothing and stop nothing."""
    sizes = {"first": [0, 5, 6], "last": [5, 6, 0], "all but one": [0, 0, 11, 0]}[empties]
    total = write_counted(tmp_path / "data", sizes)
    for number, size in enumerate(sizes):
        if not size:
            (tmp_path / "data" / f"s-{number:03d}.tar").write_bytes(EMPTY)
    made = pipeline(tmp_path / "data", window=8, batch=3)
    place = index(made, tmp_path / "index")
    assert sorted(read(made, index=mode, index_dir=place)) == list(range(total))


@pytest.mark.parametrize("mode", ["stream", "require"])
def test_nothing_but_empty_shards(tmp_path: Path, mode: Any) -> None:
    """No sample at all: an epoch of no batches without an index, an error that says so with one."""
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"s-{number}.tar").write_bytes(EMPTY)
    made = pipeline(tmp_path / "data", window=8, batch=3)
    place = index(made, tmp_path / "index")
    if mode == "stream":
        assert read(made, index=mode, index_dir=place) == []
        return
    with pytest.raises(ConfigError, match="3 shards hold no samples"):
        read(made, index=mode, index_dir=place)
