"""Stages that change how many samples there are: what they refuse, how they fail, and what they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError, DecodeError


def repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A sample n mod 3 times, each with a number of its own."""
    return [{"cls": sample["cls"], "again": again, "noise": rng.random()} for again in range(sample["cls"] % 3)]


def decoded(folder: Path, window: int | None) -> Any:
    made = ps.shards(f"{folder}/")
    return (made if window is None else made.shuffle(window=window)).decode(ps.Integer("cls"))


def test_several_ranks_must_agree(tmp_path: Path) -> None:
    """Where ranks may have different numbers of batches and cannot ask each other, it is refused, also with an index."""
    write_counted(tmp_path / "data", (9, 9))
    made = pipeline(tmp_path / "data", window=None)
    place = index(made, tmp_path / "index")
    made = decoded(tmp_path / "data", None).flat_map(repeated).batch(4)
    with ps.Loader(made, rank=0, world_size=2, index_dir=place) as loader:
        with pytest.raises(ConfigError, match="agree"):
            next(iter(loader))


def test_the_world_may_change_between_epochs_only(tmp_path: Path) -> None:
    """A carry belongs to its rank: inside an epoch another world size is refused, at its beginning taken."""
    write_counted(tmp_path / "data", (9, 9))
    made = decoded(tmp_path / "data", None)
    place = index(made, tmp_path / "index")
    made = made.flat_map(repeated).batch(4)
    with ps.Loader(made, index_dir=place, lanes=2) as loader:
        next(iter(loader))
        inside = loader.state_dict()
        list(loader)
        between = loader.state_dict()
    with ps.Loader(made, index_dir=place, lanes=2, rank=0, world_size=2, agree=int) as loader:
        loader.load_state_dict(inside)
        with pytest.raises(ConfigError, match="world_size"):
            next(iter(loader))
        loader.load_state_dict(between)
        next(iter(loader))


def test_errors_come_in_order(tmp_path: Path) -> None:
    """What fails does so behind the batches before it; too large a sample names its stage and key."""
    write_counted(tmp_path, (30,))

    def fails(sample: dict[str, Any]) -> list[dict[str, Any]]:
        if sample["cls"] == 17:
            raise ValueError("seventeen")
        return [sample]

    with ps.Loader(decoded(tmp_path, None).flat_map(fails).batch(5)) as loader:
        seen: list[int] = []
        with pytest.raises(DecodeError, match="seventeen"):
            seen.extend(number for batch in loader for number in numbers([batch]))
        assert seen == list(range(15))
    made = decoded(tmp_path, None).batch_by_size(10, size=lambda sample: sample["cls"])
    with ps.Loader(made) as loader, pytest.raises(DecodeError, match="s00011") as caught:
        list(loader)
    assert caught.value.stage == "batch_by_size"
    made = decoded(tmp_path, None).batch_by_size(10, size=lambda sample: sample["cls"], oversize="drop")
    with ps.Loader(made) as loader:
        assert sorted(numbers(loader)) == list(range(11))
        assert loader.statistics().oversize_count == 19


def test_collate_and_pad(tmp_path: Path) -> None:
    """Arrays of different lengths are padded or put end to end; a collate function makes the batch."""
    write_counted(tmp_path, (7,))

    def grows(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": sample["cls"], "x": np.arange(sample["cls"])}

    made = decoded(tmp_path, None).map(grows)
    with ps.Loader(made.batch(4, pad={"x": -1})) as loader:
        first, last = loader
    assert first["x"].shape == (4, 3)
    assert first["__x_length__"].tolist() == [0, 1, 2, 3]
    assert last["x"][0].tolist() == [0, 1, 2, 3, -1, -1]
    with ps.Loader(made.batch(4, ragged=["x"])) as loader:
        assert next(iter(loader))["x"].offsets.tolist() == [0, 0, 1, 3, 6]
    made = decoded(tmp_path, None)
    with ps.Loader(made.batch(4, collate=lambda samples: [each["cls"] for each in samples])) as loader:
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    with ps.Loader(ps.shards(f"{tmp_path}/").batch(4, collate=len)) as loader:
        assert list(loader) == [4, 3]


def test_dropped_samples_are_counted_once(tmp_path: Path) -> None:
    """max_errors bounds and counts what is dropped; samples tried to find the first layout are not counted twice."""
    write_counted(tmp_path, (20,))

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] < 9:
            raise ValueError
        return sample

    with ps.Loader(decoded(tmp_path, None).map(fails, max_errors=9).batch(4)) as loader:
        assert numbers(loader) == list(range(9, 20))
        assert loader.statistics().dropped == {"map[0]": 9}
        assert loader.statistics().samples == 11
    with ps.Loader(decoded(tmp_path, None).map(fails, max_errors=8).batch(4)) as loader, pytest.raises(DecodeError):
        list(loader)
