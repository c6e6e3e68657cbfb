"""Stages that change how many samples there are, against plain Python over the loader's own order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError, DecodeError
from resuming import assert_resumes_everywhere, in_step, valid_rows

slow = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
windows = st.one_of(st.none(), st.integers(1, 40))


def repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A sample n mod 3 times, each with a number of its own."""
    return [{"cls": sample["cls"], "again": again, "noise": rng.random()} for again in range(sample["cls"] % 3)]


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "later": rng.random()}


def decoded(folder: Path, window: int | None) -> Any:
    made = ps.shards(f"{folder}/")
    return (made if window is None else made.shuffle(window=window)).decode(ps.Integer("cls"))


@slow
@given(
    lengths=sizes,
    window=windows,
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    how=st.sampled_from(["stream", "require"]),
    kind=st.sampled_from(["filter", "refill", "flat_map", "by_size"]),
)
def test_what_comes_out_is_what_plain_python_gives(
    lengths: list[int], window: int | None, batch: int, drop_last: bool, how: Any, kind: str
) -> None:
    """Filtered, refilled, multiplied or batched by size: the sequence is right, and resumes behind every batch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        write_counted(folder, lengths)
        place = index(decoded(folder, window), Path(name) / "index")
        options = {"lanes": 3, "threads": 2, "index": how, "index_dir": place}
        with ps.Loader(decoded(folder, window).batch(1), **options) as loader:
            every = numbers(loader)
        made = decoded(folder, window)
        kept = [number for number in every if number % 3]
        if kind == "filter":
            made = made.filter(lambda sample: sample["cls"] % 3).map(noisy).batch(batch, drop_last=drop_last)
            whole = len(every) // batch * batch if drop_last else len(every)
            groups = [[n for n in every[at : at + batch] if n % 3] for at in range(0, whole, batch)]
            expected = [group for group in groups if group]
        elif kind == "refill":
            made = (
                made.filter(lambda sample: sample["cls"] % 3, refill=True).map(noisy).batch(batch, drop_last=drop_last)
            )
            expected = [kept[at : at + batch] for at in range(0, len(kept), batch)]
        elif kind == "flat_map":
            made = made.flat_map(repeated).map(noisy).batch(batch, drop_last=drop_last)
            out = [number for number in every for _ in range(number % 3)]
            expected = [out[at : at + batch] for at in range(0, len(out), batch)]
        else:
            made = made.batch_by_size(80, size=lambda sample: sample["cls"], oversize="alone", drop_last=drop_last)
            expected = [[]]
            for number in every:
                if expected[-1] and sum(expected[-1]) + number > 80:
                    expected.append([])
                expected[-1].append(number)
        if drop_last and kind in ("refill", "flat_map"):
            expected = [group for group in expected if len(group) == batch]
        if drop_last and kind == "by_size":
            expected = expected[:-1]
        with ps.Loader(made, **options) as loader:
            assert [each["cls"].tolist() for each in loader] == expected
            if kind != "filter":
                with pytest.raises(TypeError):
                    len(loader)
        assert_resumes_everywhere(lambda: ps.Loader(made, **options), every=3)


@slow
@given(
    lengths=st.lists(st.integers(3, 12), min_size=3, max_size=6),  # something comes out on every rank
    kind=st.sampled_from(["refill", "flat_map", "by_size", "filter"]),
    how=st.sampled_from(["stream", "require"]),
)
def test_ranks_end_together(lengths: list[int], kind: str, how: Any) -> None:
    """Whatever the stages leave of each rank's samples, ranks have equally many batches and every sample counts once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        total = write_counted(folder, lengths)
        made = decoded(folder, 20)
        place = index(made, Path(name) / "index")
        expected = [number for number in range(total) if number % 3]
        if kind == "flat_map":
            made = made.flat_map(repeated).batch(4)
            expected = [number for number in range(total) for _ in range(number % 3)]
        elif kind == "by_size":
            made = made.batch_by_size(40, size=lambda sample: sample["cls"], oversize="alone")
            expected = list(range(total))
        else:
            made = made.filter(lambda sample: sample["cls"] % 3, refill=kind == "refill").batch(4)
        options = {"lanes": 6, "threads": 1, "index": how, "index_dir": place}
        ranks = in_step(lambda **job: ps.Loader(made, **options, **job), 3)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(n for batches in ranks for n in valid_rows(batches, "cls")) == expected


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
