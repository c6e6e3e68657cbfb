"""Changing what is read: weights at a batch, pipelines between epochs; remembered and resumed exactly."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError
from penstock.pipeline import mix
from resuming import assert_same, in_step, ring

SIZES = ((20, 11, 9), (30, 10))


@pytest.fixture
def parts(tmp_path: Path) -> list[Any]:
    """Two indexed sources."""
    made = []
    for number, sizes in enumerate(SIZES):
        write_counted(tmp_path / f"data{number}", sizes)
        made.append(ps.shards(f"{tmp_path}/data{number}/"))
        index(made[-1], tmp_path / "index")
    return made


def mixed(parts: list[Any], weights: tuple[float, float] = (1, 1)) -> Any:
    made = mix(dict(zip(parts, weights, strict=True))).shuffle(window=16)
    return made.decode(ps.Integer("cls")).batch(4)


def sources(batches: list[Any]) -> list[int]:
    return [int(shard.rpartition("/data")[2][0]) for batch in batches for shard in batch["__shard__"]]


@pytest.mark.parametrize("from_batch", [3, 5, 9])
def test_weights_change_from_a_batch_on(parts: list[Any], tmp_path: Path, from_batch: int) -> None:
    """What lies before the batch stays, prefetched or not; behind it the new weights hold; every sample comes once."""
    options = {"lanes": 4, "index_dir": tmp_path / "index", "prefetch_batches": 8}
    with ps.Loader(mixed(parts), **options) as loader:
        plain = list(loader)
    with ps.Loader(mixed(parts), **options) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(3)]
        loader.set_weights({parts[0]: 0, parts[1]: 1}, from_batch=from_batch)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
        assert loader.epoch == 1
        second = list(loader)
    for left, right in zip(plain[:from_batch], (seen + rest)[:from_batch], strict=True):
        assert_same(left, right)
    assert sorted(numbers(seen + rest)) == sorted([*range(40), *range(40)])
    assert set(sources(rest[from_batch - 3 : from_batch])) == {1}
    assert set(sources(second[:5])) == {1}  # they hold until they are changed again
    with ps.Loader(mixed(parts), **options) as loader:
        loader.load_state_dict(state)
        for left, right in zip(rest, loader, strict=True):
            assert_same(left, right)
        for left, right in zip(second, loader, strict=True):
            assert_same(left, right)


@pytest.mark.parametrize("on_epoch", [None, "equal", "changed"])
@pytest.mark.parametrize(("at", "from_batch"), [(0, 0), (0, 3), (5, 7), (20, 20), (21, 0), (21, 4)])
def test_changed_weights_are_resumed_from_every_position(
    parts: list[Any], tmp_path: Path, at: int, from_batch: int, on_epoch: str | None
) -> None:
    """A change holds in a loader that resumes, whether its state was saved in an epoch, at its end or between two."""

    def chosen(epoch: int, statistics: Any) -> Any:
        if epoch != 1:
            return None
        return mixed(parts, (1, 1) if on_epoch == "equal" else (3, 1))

    options: dict[str, Any] = {"lanes": 4, "index_dir": tmp_path / "index", "on_epoch": chosen if on_epoch else None}
    states: list[tuple[int, Any]] = []
    keys: list[list[str]] = []

    def note(loader: ps.Loader) -> None:
        if len(states) == at:
            loader.set_weights([0, 1], from_batch=from_batch)
        states.append((len(keys), json.loads(json.dumps(loader.state_dict()))))

    with ps.Loader(mixed(parts), **options) as loader:
        for _ in range(2):
            note(loader)
            for batch in loader:
                keys.append(batch["__shard__"])
                note(loader)
        note(loader)
    with ps.Loader(mixed(parts), **options) as loader:
        unchanged = [batch["__shard__"] for _ in loader.epochs(2) for batch in loader]
    assert (keys == unchanged) == (
        at == 20 and on_epoch == "changed"
    )  # weights belong to the pipeline that they were set for
    for position in sorted({at, at + 1, *range(max(at, 19), 23), *range(at, len(states), 11)}):
        count, state = states[position]
        with ps.Loader(mixed(parts), **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert [batch["__shard__"] for _ in loader.epochs(2) for batch in loader] == keys[count:]


@pytest.mark.parametrize("stage", ["refill", "flat_map"])
@pytest.mark.parametrize("at", range(1, 20, 3))
def test_weights_change_where_stages_change_the_number_of_samples(
    parts: list[Any], tmp_path: Path, stage: str, at: int
) -> None:
    """Inside what the stages were given, too, no sample is lost or repeated; the new weights hold, also after a resume."""
    for number, part in enumerate(parts):
        write_counted(tmp_path / f"data{number}", (50, 70, 40))
        index(part, tmp_path / "index")
    made = mix(dict.fromkeys(parts, 1)).shuffle(window=16).decode(ps.Integer("cls"))
    if stage == "refill":
        made = made.filter(lambda sample: sample["cls"] % 3 > 0, refill=True)
    else:
        made = made.flat_map(lambda sample: [sample] * (sample["cls"] % 3))
    options: dict[str, Any] = {"lanes": 4, "index_dir": tmp_path / "index"}
    with ps.Loader(made.batch(4), **options) as loader:
        unchanged = list(loader)
    with ps.Loader(made.batch(4), **options) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(at)]
        loader.set_weights([0, 1], from_batch=at)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
    assert sorted(numbers(seen + rest)) == sorted(numbers(unchanged))
    assert sources(seen + rest) != sources(unchanged)
    with ps.Loader(made.batch(4), **options) as loader:
        loader.load_state_dict(state)
        for left, right in zip(rest, loader, strict=True):
            assert_same(left, right)


def test_weights_of_other_parts_are_not_those_of_the_mix(parts: list[Any], tmp_path: Path) -> None:
    """A state with weights for two parts does not fit a mix of three: the data set changed, and may be accepted."""
    with ps.Loader(mixed(parts), index_dir=tmp_path / "index") as loader:
        loader.set_weights([0, 1], from_batch=0)
        state = loader.state_dict()
    parts.append(ps.shards(f"{tmp_path}/data0/s-000.tar"))
    index(parts[-1], tmp_path / "index")
    made = mix(dict.fromkeys(parts, 1)).shuffle(window=16).decode(ps.Integer("cls")).batch(4)
    with ps.Loader(made, index_dir=tmp_path / "index") as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="data set changed"):
            next(iter(loader))
        loader.load_state_dict(state, accept_changed_data=True)
        assert len(list(loader)) == 25


def test_weights_are_refused_for_batches_gone(parts: list[Any], tmp_path: Path) -> None:
    """Not for a batch that was handed out, not without a mix, not for parts that are none of it."""
    with ps.Loader(mixed(parts), index_dir=tmp_path / "index") as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        with pytest.raises(ConfigError, match="batch 1 was handed out"):
            loader.set_weights([1, 2], from_batch=1)
        for bad in ([1], {parts[0]: 1, ps.shards("/elsewhere/"): 1}, [0, 0]):
            with pytest.raises(ConfigError):
                loader.set_weights(bad, from_batch=2)
        loader.set_weights([1, 2], from_batch=2)
        next(batches)
    with ps.Loader(pipeline(tmp_path / "data0"), index_dir=tmp_path / "index") as loader:
        with pytest.raises(ConfigError, match="needs a mix"):
            loader.set_weights([1], from_batch=0)


def test_the_pipeline_may_change_between_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """on_epoch drops and adds shards by what the statistics say; resumed inside an epoch it decides as it did."""
    write_counted(tmp_path / "data", (8, 8, 8))
    urls = [str(path) for path in sorted((tmp_path / "data").iterdir())]
    asked: list[tuple[int, int]] = []

    def made(count: int) -> Any:
        return ps.shards(urls[:count]).shuffle(window=8).decode(ps.Integer("cls")).batch(4)

    def on_epoch(epoch: int, statistics: Any) -> Any:
        asked.append((epoch, statistics.samples))
        return {0: None, 1: made(3) if statistics.samples >= 8 else None, 2: made(2)}[epoch]

    with caplog.at_level(logging.INFO), ps.Loader(made(1), on_epoch=on_epoch) as loader:
        epochs, states = [], []
        for _ in loader.epochs(3):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch)
                states.append(json.loads(json.dumps(loader.state_dict())))
    assert [sorted(numbers(batches)) for batches in epochs] == [list(range(n)) for n in (8, 24, 16)]
    assert asked == [(0, 0), (1, 8), (2, 32)]
    assert len([line for line in caplog.messages if line.startswith("epoch ")]) == 3
    with ps.Loader(made(1), on_epoch=on_epoch) as loader:
        loader.load_state_dict(states[3])  # two batches into epoch 1
        rest = [batch for _ in loader.epochs(3) for batch in loader]
    for left, right in zip([*epochs[1][2:], *epochs[2]], rest, strict=True):
        assert_same(left, right)


def test_what_on_epoch_changed_stays_changed_after_a_resume(parts: list[Any], tmp_path: Path) -> None:
    """None goes on with what the function gave epochs ago, also in a new process: inside an epoch, and between two."""

    def on_epoch(epoch: int, statistics: Any) -> Any:
        return ps.mix({parts[1]: 1}).shuffle(window=16).decode(ps.Integer("cls")).batch(4) if epoch == 1 else None

    options = {"lanes": 4, "index_dir": tmp_path / "index", "on_epoch": on_epoch}
    with ps.Loader(mixed(parts), **options) as loader:
        states, keys = [], []
        for _ in loader.epochs(4):
            for batch in loader:
                keys.append(batch["__shard__"])
                states.append(json.loads(json.dumps(loader.state_dict())))
    assert set(sources([{"__shard__": shard} for shard in keys[20:]])) == {1}
    for at in (22, 35, 39):  # in epochs 1 and 2, and at the end of one
        with ps.Loader(mixed(parts), **options) as loader:
            loader.load_state_dict(states[at])
            assert [batch["__shard__"] for _ in loader.epochs(4) for batch in loader] == keys[at + 1 :]


@pytest.mark.parametrize(
    ("weights", "from_batch"), [("ab", 3), (None, 3), ([1, "b"], 3), ([1, 1], 3.5), ([1, 1], "x"), ([1, 1], -1)]
)
def test_weights_that_are_none_are_refused(parts: list[Any], tmp_path: Path, weights: Any, from_batch: Any) -> None:
    """No numbers, no list, half a batch: an error that shows it, and the loader goes on as it was."""
    with ps.Loader(mixed(parts), lanes=4, index_dir=tmp_path / "index") as loader:
        with pytest.raises(ConfigError):
            loader.set_weights(weights, from_batch=from_batch)
        assert len(list(loader)) == 20


def test_ranks_that_decide_differently_are_stopped(tmp_path: Path) -> None:
    """Another data set on one rank is an error on all, before a batch is read."""
    write_counted(tmp_path / "data", (8, 8, 8, 8))
    urls = [str(path) for path in sorted((tmp_path / "data").iterdir())]

    def make(*, rank: int, **job: Any) -> ps.Loader:
        made = ps.shards(urls).decode(ps.Integer("cls")).batch(4)
        other = ps.shards(urls[: 4 - rank]).decode(ps.Integer("cls")).batch(4)
        return ps.Loader(made, on_epoch=lambda epoch, statistics: other if epoch else None, rank=rank, **job)

    assert len(in_step(make, 2)) == 2
    with pytest.raises(ConfigError, match="than on another rank"):
        in_step(make, 2, epochs=2)
    agrees, raised = ring(2, threading.Barrier(2, timeout=10)), list[str]()

    def decide(rank: int) -> None:
        try:
            with make(rank=rank, world_size=2, agree=agrees[rank]) as loader:
                loader.restart(epoch=1)
                list(loader)
        except (ConfigError, threading.BrokenBarrierError) as error:
            raised.append(type(error).__name__)

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == ["ConfigError"] * 2  # nobody is left waiting


def test_on_epoch_must_give_a_pipeline(tmp_path: Path) -> None:
    """Anything else is refused by name."""
    write_counted(tmp_path, (8,))
    with ps.Loader(pipeline(tmp_path), on_epoch=lambda epoch, statistics: 7) as loader:  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match="returned 7"):
            next(iter(loader))
