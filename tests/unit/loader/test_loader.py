from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from forking import start_child
from loading import counted, numbers, pipeline, shard, write_counted
from penstock.errors import (
    ClosedError,
    ConfigError,
    CorruptShardError,
    DecodeError,
    FieldMissingError,
    ObjectChangedError,
    ObjectMissingError,
)

SIZES = (20, 3, 0, 31, 12, 1, 25)


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")} - {"penstock-loop"}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    """Every test here ends with the loaders' threads gone."""
    yield
    gc.collect()
    assert not {name for name in our_threads() if name.startswith(("penstock-read", "penstock-decode"))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path, SIZES)
    return tmp_path


@pytest.mark.parametrize("window", [None, 1, 7, 64, 10_000])
@pytest.mark.parametrize("lanes", [None, 1, 3])
@pytest.mark.parametrize("batch", [1, 8, 1000])
def test_every_sample_exactly_once(folder: Path, window: int | None, lanes: int | None, batch: int) -> None:
    """An epoch brings each sample once, whatever the window, the lanes and the batch size."""
    with ps.Loader(pipeline(folder, window=window, batch=batch), lanes=lanes) as loader:
        for _ in loader.epochs(2):
            assert sorted(numbers(loader)) == list(range(sum(SIZES)))


def test_the_number_of_threads_changes_nothing(folder: Path) -> None:
    """One thread and four give identical batches: values, keys, shards, positions, random numbers."""

    def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, "noise": rng.normal(size=3), "later": rng.integers(1 << 40)}

    def batches(threads: int) -> list[dict[str, Any]]:
        made = ps.shards(f"{folder}/").shuffle(window=50, seed=4).decode(ps.Integer("cls"), ps.Text("txt"))
        with ps.Loader(made.map(noisy).batch(7), threads=threads) as loader:
            return [batch for _ in loader.epochs(2) for batch in loader]

    one, four = batches(1), batches(4)
    assert len(one) == len(four) == 2 * 14
    for left, right in zip(one, four, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    noise = np.concatenate([batch["noise"] for batch in one])
    assert len(np.unique(noise)) == noise.size


def test_seed_and_epoch_decide_the_order(folder: Path) -> None:
    """The same seed gives the same epochs; another seed and another epoch give others."""

    def orders(seed: int) -> list[list[int]]:
        with ps.Loader(pipeline(folder, seed=seed)) as loader:
            return [numbers(loader) for _ in loader.epochs(2)]

    first = orders(0)
    assert first == orders(0)
    assert first[0] != first[1]
    assert orders(1)[0] not in first


def test_golden_order(tmp_path: Path) -> None:
    """The order of version 1 for three shards of 5, 2 and 4: a change here breaks every resumed job."""
    write_counted(tmp_path, (5, 2, 4))
    with ps.Loader(pipeline(tmp_path, window=6, seed=1, batch=11)) as loader:
        assert [numbers([batch]) for _ in loader.epochs(2) for batch in loader] == GOLDEN


def test_without_shuffle_the_stored_order(folder: Path) -> None:
    """Unshuffled, shards come in key order and samples as stored; positions count them."""
    with ps.Loader(pipeline(folder, window=None)) as loader:
        batches = list(loader)
    assert numbers(batches) == list(range(sum(SIZES)))
    assert np.concatenate([batch["__position__"] for batch in batches]).tolist() == list(range(sum(SIZES)))


def test_what_a_batch_holds(folder: Path) -> None:
    """Integers are int64[B], texts a list, and keys, shards and positions say where each sample came from."""
    with ps.Loader(pipeline(folder, batch=8)) as loader:
        batch = next(iter(loader))
    assert batch["cls"].dtype == np.int64
    assert batch["cls"].shape == (8,)
    assert batch["txt"] == [f"sample {number}" for number in batch["cls"]]
    assert batch["__key__"] == [f"s{number:05d}" for number in batch["cls"]]
    assert batch["__position__"].dtype == np.int64
    starts = np.cumsum((0, *SIZES))
    for number, name in zip(batch["cls"], batch["__shard__"], strict=True):
        assert name.endswith(f"/s-{np.searchsorted(starts, number, side='right') - 1:03d}.tar")


def test_the_last_batch_is_shorter_or_dropped(folder: Path) -> None:
    """92 samples by 10: a last batch of 2, or nine batches."""
    with ps.Loader(pipeline(folder, batch=10)) as loader:
        assert [len(batch["cls"]) for batch in loader] == [10] * 9 + [2]
        assert len(loader.restart() or list(loader)) == 10
    with ps.Loader(pipeline(folder, batch=10, drop_last=True)) as loader:
        batches = list(loader)
    assert [len(batch["txt"]) for batch in batches] == [10] * 9
    assert len(set(numbers(batches))) == 90


def test_without_decode_members_are_bytes(folder: Path) -> None:
    """A pipeline that decodes nothing gives every member as stored."""
    with ps.Loader(ps.shards(f"{folder}/").batch(4)) as loader:
        batch = next(iter(loader))
    assert batch["cls"] == [b"0", b"1", b"2", b"3"]
    assert all(type(value) is bytes for value in batch["txt"])


def test_break_goes_on_where_it_stopped(folder: Path) -> None:
    """After break the next iter continues; together they are one epoch."""
    with ps.Loader(pipeline(folder)) as loader:
        seen = []
        for batch in loader:
            seen.append(batch)
            if len(seen) == 3:
                break
        assert loader.epoch == 0
        seen += loader
        assert loader.epoch == 1
    assert sorted(numbers(seen)) == list(range(sum(SIZES)))


def test_epochs_come_again_until_they_are_finished(folder: Path) -> None:
    """epochs(n) names an epoch that was left by break again, and ends when n are finished."""
    with ps.Loader(pipeline(folder, batch=40)) as loader:
        named = []
        for epoch in loader.epochs(2):
            named.append(epoch)
            for _ in loader:
                if len(named) == 1:
                    break
        assert named == [0, 0, 1]
        assert list(loader.epochs(2)) == []


def test_epochs_refuses_a_body_that_takes_nothing(folder: Path) -> None:
    """A loop over epochs that forgets the loader is an error, not an endless loop."""
    with ps.Loader(pipeline(folder)) as loader:
        with pytest.raises(ConfigError, match="did not take a batch"):
            for _ in loader.epochs(2):
                pass
        with pytest.raises(ConfigError):
            loader.epochs(-1)


def test_restart_begins_the_epoch_again(folder: Path) -> None:
    """restart() gives the same epoch from its beginning, and exhausts older iterators."""
    with ps.Loader(pipeline(folder)) as loader:
        old = iter(loader)
        first = next(old)
        loader.restart()
        assert next(old, None) is None
        assert numbers([next(iter(loader))]) == numbers([first])


def test_a_finished_iterator_stays_finished(folder: Path) -> None:
    """An exhausted iterator does not begin the next epoch."""
    with ps.Loader(pipeline(folder)) as loader:
        batches = iter(loader)
        assert len(list(batches)) == 12
        assert list(batches) == []
        assert loader.epoch == 1


def test_batches_belong_to_the_caller(folder: Path) -> None:
    """What was handed out is never written again, also after close."""
    with ps.Loader(pipeline(folder)) as loader:
        batches = list(loader)
        copies = [batch["cls"].copy() for batch in batches]
        list(loader)
    for batch, copy in zip(batches, copies, strict=True):
        np.testing.assert_array_equal(batch["cls"], copy)


def test_dropping_a_loader_ends_its_threads(folder: Path) -> None:
    """Abandoned half-way and without close, a loader's threads go when it goes."""
    loader = ps.Loader(pipeline(folder, batch=1))
    for _ in loader:
        break
    assert "penstock-read" in our_threads()
    del loader
    gc.collect()
    assert "penstock-read" not in our_threads()


def test_an_exception_in_the_loop_leaves_nothing(folder: Path) -> None:
    """An error of the training loop passes through, and the threads end."""

    def trains() -> None:
        with ps.Loader(pipeline(folder, batch=1)) as loader:
            for _ in loader:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trains()
    assert "penstock-read" not in our_threads()


def test_closed_is_closed(folder: Path) -> None:
    """close() may come twice; after it, iterating says so, also for iterators made before."""
    loader = ps.Loader(pipeline(folder))
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    with pytest.raises(ClosedError):
        iter(loader)
    with pytest.raises(ClosedError):
        next(batches)


CHILD_S_MAX = 20.0


def test_a_forked_child_closes_a_loader_that_is_busy(folder: Path) -> None:
    """A lock that a thread of the parent holds at the fork is held for ever in the child, so close() waits for none."""
    with ps.Loader(pipeline(folder), threads=1) as loader:
        batches = iter(loader)
        next(batches)
        is_held, may_go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with loader._session._running.backend.changed:
                is_held.set()
                may_go_on.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        child = start_child(lambda: loader.close() is None)
        may_go_on.set()
        holder.join()
        deadline_s = time.monotonic() + CHILD_S_MAX
        ended, status = 0, -1
        while not ended and time.monotonic() < deadline_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert (ended, status) == (child, 0)
        assert len(list(batches)) > 0  # the parent goes on undisturbed


def test_user_errors_name_stage_sample_and_shard(folder: Path) -> None:
    """What a map raises arrives as DecodeError with the original as cause, after all batches before it."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 42:
            raise KeyError("nothing")
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(lambda s: s).map(fails).batch(10)
    with ps.Loader(made, threads=3) as loader:
        seen: list[int] = []
        with pytest.raises(DecodeError, match=r"fails failed at .*test_loader.py:\d+: KeyError") as caught:
            seen.extend(number for batch in loader for number in numbers([batch]))
        assert seen == list(range(40))
        assert (caught.value.stage, caught.value.sample_key) == ("map[1]", "s00042")
        assert str(caught.value.shard).endswith("s-003.tar")
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(DecodeError):
            next(iter(loader))
        loader.restart()
        assert numbers([next(iter(loader))]) == list(range(10))


def test_the_first_error_in_order_is_raised(folder: Path) -> None:
    """With several bad samples in a batch it is the first in order, whichever thread was first in time."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(sample["__key__"])

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls"))
    good = made.map(lambda sample: fails(sample) if sample["cls"] in (13, 17, 60) else sample)
    for _ in range(5):
        with ps.Loader(good.batch(64), threads=4) as loader, pytest.raises(DecodeError, match="s00013"):
            list(loader)


def test_missing_fields_say_what_is_there(folder: Path) -> None:
    """A member that no sample has is an error that lists those it has."""
    with ps.Loader(ps.shards(f"{folder}/").decode(ps.Image("jpg")).batch(2)) as loader:
        with pytest.raises(FieldMissingError, match="'cls', 'txt'") as caught:
            next(iter(loader))
    assert caught.value.sample_key == "s00000"


def test_a_corrupt_shard_is_named(folder: Path) -> None:
    """A shard that is cut off ends the epoch with its name; the batches before it arrive."""
    data = (folder / "s-003.tar").read_bytes()
    (folder / "s-003.tar").write_bytes(data[: len(data) // 2 + 100])
    with ps.Loader(pipeline(folder, window=None, batch=10)) as loader:
        seen = []
        with pytest.raises(CorruptShardError, match=r"s-003\.tar"):
            seen.extend(numbers([batch]) for batch in loader)
    assert seen[0] == list(range(10))


def test_a_shard_that_changes_is_noticed(folder: Path) -> None:
    """A shard replaced between two epochs is an error, never another data set under the same name."""
    with ps.Loader(pipeline(folder, window=None)) as loader:
        list(loader)
        (folder / "s-000.tar").write_bytes(shard(counted(range(100, 140))))
        with pytest.raises(ObjectChangedError, match=r"s-000\.tar"):
            list(loader)


def test_nothing_there(tmp_path: Path) -> None:
    """An empty prefix is a missing object, with a hint; shards without samples are an empty epoch."""
    (tmp_path / "README.txt").write_text("no shard")
    with ps.Loader(pipeline(tmp_path)) as loader, pytest.raises(ObjectMissingError, match="no shards here"):
        list(loader)
    write_counted(tmp_path, (0, 0))
    (tmp_path / "s-002.tar").write_bytes(bytes(10240))
    with ps.Loader(pipeline(tmp_path)) as loader:
        assert list(loader) == []
        assert loader.epoch == 1


def test_prefetch_is_bounded(folder: Path) -> None:
    """While nobody takes batches, decoding stops after prefetch_batches and the one being filled."""
    decoded: list[int] = []
    settled = threading.Event()

    def counts(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(sample["cls"])
        if len(decoded) == 4 * 5:
            settled.set()
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(counts).batch(5)
    with ps.Loader(made, prefetch_batches=2, threads=1) as loader:
        next(iter(loader))
        assert settled.wait(20)
        assert len(decoded) == 4 * 5  # one handed out, three waiting
    assert len(decoded) == 4 * 5


@pytest.mark.parametrize(("value_bytes", "waiting"), [(100, 16), (400_000, 3)])
def test_small_batches_wait_in_greater_number(tmp_path: Path, value_bytes: int, waiting: int) -> None:
    """By default as many batches wait as have 4 MiB, but no fewer than three, and no more than sixteen."""
    (tmp_path / "data").mkdir()
    samples = [{"__key__": f"{n:04d}", "bin": "x" * value_bytes, "cls": str(n)} for n in range(100)]
    (tmp_path / "data" / "0.tar").write_bytes(shard(samples))
    decoded: list[int] = []
    settled = threading.Event()

    def counts(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(sample["cls"])
        if len(decoded) == 5 * (1 + waiting):
            settled.set()
        return sample

    made = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls")).map(counts).batch(5)
    with ps.Loader(made, threads=1) as loader:
        next(iter(loader))
        assert settled.wait(20)
    assert len(decoded) == 5 * (1 + waiting)


def test_rank_and_world_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from arguments or the environment; several ranks are refused with the reason."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with ps.Loader(pipeline(folder)) as loader:
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with ps.Loader(pipeline(folder)) as loader, pytest.raises(ConfigError, match="world_size=2"):
        next(iter(loader))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with ps.Loader(pipeline(folder)) as loader, pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        next(iter(loader))
    with ps.Loader(pipeline(folder), rank=0, world_size=1) as loader:
        next(iter(loader))


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": 10_000},
        {"prefetch_batches": 0},
        {"rank": 0},
        {"world_size": 2},
        {"cache": "nvme"},
        {"cache": "nvme:10XB"},
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any]) -> None:
    """Every bound is checked when the loader is made."""
    with pytest.raises(ConfigError):
        ps.Loader(pipeline(folder), **options)


def test_a_pipeline_must_end_with_batch(folder: Path) -> None:
    """A pipeline without batch, and what is no pipeline, are refused."""
    with pytest.raises(ConfigError, match=r"no \.batch"):
        ps.Loader(ps.shards(f"{folder}/"))
    with pytest.raises(ConfigError, match="must be given a pipeline"):
        ps.Loader(f"{folder}/")  # type: ignore[arg-type]


def test_len_is_not_known(folder: Path) -> None:
    """len() raises TypeError with the reason, and neither list() nor truth depend on it."""
    with ps.Loader(pipeline(folder)) as loader:
        with pytest.raises(TypeError, match="without an index"):
            len(loader)
        assert loader
        assert len(list(loader)) == 12


def test_a_loader_pickles_as_its_configuration(folder: Path) -> None:
    """A copy of a running loader begins at the beginning, with the same options."""
    with ps.Loader(pipeline(folder), lanes=3, threads=2) as loader:
        first = next(iter(loader))
        with pickle.loads(pickle.dumps(loader)) as copy:
            assert repr(copy) == repr(loader)
            np.testing.assert_array_equal(next(iter(copy))["cls"], first["cls"])
    assert "lanes=3, threads=2" in repr(loader)


def test_statistics_count(folder: Path) -> None:
    """Samples, batches and bytes are those of the epochs; times add up."""
    total_bytes = sum(path.stat().st_size for path in folder.iterdir())
    with ps.Loader(pipeline(folder)) as loader:
        assert loader.statistics().samples_per_s == 0
        for _ in loader.epochs(2):
            list(loader)
        done = loader.statistics()
    assert (done.samples, done.batches, done.bytes) == (2 * sum(SIZES), 24, 2 * total_bytes)
    assert 0 < done.stall_s <= done.elapsed_s
    assert 0 < done.stall_ratio <= 1
    assert done.decode_s > 0
    assert done.parse_s > 0


GOLDEN = [[6, 7, 0, 5, 8, 1, 9, 2, 10, 3, 4], [8, 0, 5, 7, 1, 6, 10, 2, 9, 3, 4]]


def test_two_threads_at_once_are_refused(folder: Path) -> None:
    """While one thread waits for a batch, another is told so; nothing is lost or comes twice by it."""
    entered, gate = threading.Event(), threading.Event()

    def held(sample: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        gate.wait(30)
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(held).batch(8)
    with ps.Loader(made) as loader:
        steps = iter(loader)
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(next(steps)))
        other.start()
        assert entered.wait(30)
        with pytest.raises(ConfigError, match="two threads"):
            next(steps)
        gate.set()
        other.join()
        assert sorted(numbers([*found, *steps])) == list(range(92))
