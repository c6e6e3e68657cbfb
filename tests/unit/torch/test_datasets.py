from __future__ import annotations

import json
import pickle
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from loading import index_beside, numbers, pipeline, write_counted
from penstock.errors import ClosedError, ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.server) for name in ("forkserver", "spawn"))]  # slow to start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", (9, 4, 7))
    index_beside(tmp_path / "data")  # else the first epoch leaves one, and the second loader goes by it
    return tmp_path / "data"


@pytest.fixture
def expected(folder: Path) -> list[list[int]]:
    """The batches of epochs 0 to 3 as a Loader gives them, all in one list per epoch."""
    with ps.Loader(pipeline(folder, batch=3)) as loader:
        return [numbers(loader) for _ in range(4)]


@pytest.fixture(autouse=True)
def _warnings_of_others() -> Any:
    """Python warns of fork in a process with threads, torch of more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


def loader_of(dataset: Any, **options: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=None, **options)


def test_in_a_dataloader(folder: Path) -> None:
    """DataLoader(dataset, batch_size=None) passes the loader's batches on, epoch after epoch."""
    dataset = ps.torch.IterableDataset(pipeline(folder), threads=1)
    with ps.Loader(pipeline(folder)) as loader:
        for _ in range(2):
            batches: list[Any] = list(loader_of(dataset))
            assert numbers(batches) == numbers(loader)
            assert isinstance(batches[0]["cls"], torch.Tensor)
    assert dataset.statistics().samples == 40
    dataset.close()
    assert dataset.statistics().samples == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-read")]


@pytest.mark.parametrize("method", METHODS)
def test_workers_share_the_batches_in_the_loaders_order(folder: Path, expected: list[list[int]], method: str) -> None:
    """However workers are started, an epoch is the Loader's: each batch once, in its order; the next one differs."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    workers = loader_of(dataset, num_workers=2, multiprocessing_context=method)
    assert [numbers(workers) for _ in range(2)] == expected[:2]
    dataset.close()


def test_persistent_workers_go_through_the_epochs(folder: Path, expected: list[list[int]]) -> None:
    """Workers that live on give epoch after epoch, as those that are started anew do."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    workers = loader_of(dataset, num_workers=2, persistent_workers=True)
    assert [numbers(workers) for _ in range(3)] == expected[:3]
    dataset.close()


def test_more_workers_than_batches(folder: Path) -> None:
    """Workers for which no batch is left end without one; nothing hangs, nothing is lost."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=16), threads=1)
    with ps.Loader(pipeline(folder, batch=16)) as loader:
        assert numbers(loader_of(dataset, num_workers=4)) == numbers(loader)
    dataset.close()


def test_an_epoch_left_early_is_over(folder: Path, expected: list[list[int]]) -> None:
    """After break the next iteration is the whole next epoch, with and without workers."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    for options in ({}, {"num_workers": 1}):
        dataset.set_epoch(0)
        batches = loader_of(dataset, **options)
        next(iter(batches))
        assert numbers(batches) == expected[1]
    dataset.close()


def test_an_iteration_that_never_began_costs_no_epoch(folder: Path, expected: list[list[int]]) -> None:
    """iter() without a batch taken does not skip one."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3))
    iter(dataset)
    assert numbers(dataset) == expected[0]
    dataset.close()


def test_an_epoch_of_which_nothing_is_left_is_over(folder: Path) -> None:
    """A filter may drop all samples of an epoch: it is empty, and the next one follows."""
    kept = [0]
    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] < kept[0]).batch(4)
    dataset = ps.torch.IterableDataset(made, threads=1)
    assert numbers(dataset) == []
    kept[0] = 2
    assert sorted(numbers(dataset)) == [0, 1]
    assert dataset.state_dict()["epoch"] == 1
    dataset.close()


def test_workers_number_batches_in_order_in_any_case(folder: Path) -> None:
    """Workers that read all batches and give theirs by number ignore in_order=False: none is lost, none comes twice."""
    met = threading.Barrier(2, timeout=20)

    def crossed(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__position__"] in (3, 9):  # neither batch 1 nor batch 3 is complete before the other has begun
            met.wait()
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(crossed).filter(lambda sample: True).batch(3)
    dataset = ps.torch.IterableDataset(made, threads=2, in_order=False)
    for _ in range(3):
        assert numbers(loader_of(dataset, num_workers=2)) == list(range(20))
    dataset.close()


def test_the_epoch_can_be_set(folder: Path, expected: list[list[int]]) -> None:
    """set_epoch decides the next iteration, in workers too."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    dataset.set_epoch(2)
    assert numbers(dataset) == expected[2]
    dataset.set_epoch(1)
    assert numbers(loader_of(dataset, num_workers=2)) == expected[1]
    with pytest.raises(ConfigError, match="whole number"):
        dataset.set_epoch(-1)
    dataset.close()


def test_an_older_iteration_does_not_end_in_silence(folder: Path) -> None:
    """Two iterations of one dataset at once: the first raises, instead of ending as if its epoch were over."""
    dataset = ps.torch.IterableDataset(pipeline(folder))
    first = iter(dataset)
    next(first)
    next(iter(dataset))
    with pytest.raises(ClosedError, match="later iteration"):
        next(first)
    dataset.close()


def test_the_state_continues_behind_every_batch(folder: Path, expected: list[list[int]]) -> None:
    """Restored from the state after any batch, the rest of the epoch and the next epoch come as they would have."""
    whole = expected[0] + expected[1]
    for taken in range(8):
        dataset = ps.torch.IterableDataset(pipeline(folder, batch=3))
        batches = iter(dataset)
        seen = [number for _ in range(taken) for number in numbers([next(batches)])]
        state = json.loads(json.dumps(dataset.state_dict()))
        dataset.close()
        copy = ps.torch.IterableDataset(pipeline(folder, batch=3))
        copy.load_state_dict(state)
        rest = numbers(copy)
        rest += numbers(copy) if len(seen) + len(rest) < len(whole) else []
        assert seen + rest == whole
        copy.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_of_what_workers_read_is_refused(folder: Path, expected: list[list[int]], persistent: bool) -> None:
    """Only the workers know how far they are: in their parent state_dict() raises, until it has a place of its own."""
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    whole = loader_of(dataset)
    next(iter(whole))
    workers = loader_of(dataset, num_workers=2, persistent_workers=persistent)
    batches = iter(workers)
    for _ in range(3):
        next(batches)
    for _ in range(2):
        with pytest.raises(ConfigError, match="StatefulDataLoader"):
            dataset.state_dict()
    batches._shutdown_workers()
    dataset.set_epoch(1)
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["batches"]) == (1, 0)
    assert numbers(whole) == expected[1]
    assert dataset.state_dict()["finished"]
    dataset.close()


def test_foreign_states_are_refused(folder: Path) -> None:
    """A state of another kind, or of another number of workers, is an error and never a guess."""
    dataset = ps.torch.IterableDataset(pipeline(folder))
    with pytest.raises(ConfigError, match="version"):
        dataset.load_state_dict({"epoch": 1})
    with pytest.raises(ConfigError, match="worker 1 of 2"):
        dataset.load_state_dict({**dataset.state_dict(), "worker": 1, "workers": 2})
    dataset.close()


def test_workers_do_not_decide_about_the_next_epoch(folder: Path) -> None:
    """on_epoch would decide differently in each worker: refused there, and only there."""
    dataset = ps.torch.IterableDataset(pipeline(folder), on_epoch=lambda epoch, statistics: None, threads=1)
    assert sorted(numbers(dataset)) == list(range(20))
    batches = iter(loader_of(dataset, num_workers=1))
    with pytest.raises(ConfigError, match="on_epoch"):
        next(batches)
    batches._shutdown_workers()  # left to the garbage collector, with the traceback's cycle, it takes torch 5 s
    dataset.close()


def test_workers_have_no_cluster_of_their_own(folder: Path) -> None:
    """Each DataLoader worker would open a pool of workers of a cluster: refused there."""
    dataset = ps.torch.IterableDataset(pipeline(folder), workers=SimpleNamespace(open=None.__class__, fallback=False))
    batches = iter(loader_of(dataset, num_workers=1))
    with pytest.raises(ConfigError, match="DataLoader worker has its own"):
        next(batches)
    batches._shutdown_workers()
    dataset.close()


def test_bad_options_are_refused_when_it_is_made(folder: Path) -> None:
    """The loader's checks run in the constructor."""
    with pytest.raises(ConfigError, match="prefetch_batches"):
        ps.torch.IterableDataset(pipeline(folder), prefetch_batches=0)


def test_a_copy_begins_at_the_beginning(folder: Path) -> None:
    """A dataset pickles without its threads and its place."""
    dataset = ps.torch.IterableDataset(pipeline(folder))
    first = next(iter(dataset))
    copy = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(next(iter(copy))["cls"], first["cls"])
    dataset.close()
    copy.close()
