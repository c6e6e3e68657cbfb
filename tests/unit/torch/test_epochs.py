from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from penstock.torch.epochs import EpochTable, Worker  # noqa: E402 - after the check that torch is there


def test_workers_of_an_iteration_get_its_epoch() -> None:
    """The first worker of an iteration takes the next number, the others find it, whatever their order."""
    table = EpochTable()
    for epoch, seed in enumerate((70, 50, 90)):
        assert [table.take(Worker(index, 3, seed)) for index in (2, 0, 1)] == [epoch] * 3
    table.close()


def test_iterations_under_way_at_once_keep_apart() -> None:
    """Workers of two iterations that come in turns still agree, each with its own."""
    table = EpochTable()
    found = [table.take(Worker(index, 2, seed)) for index in (0, 1) for seed in (11, 22)]
    assert found == [0, 1, 0, 1]
    table.close()


def test_one_seed_again_is_another_iteration() -> None:
    """A user who seeds torch before each epoch, and workers that live on, still get new epochs."""
    table = EpochTable()
    for epoch in range(20):
        assert [table.take(Worker(index, 2, 5)) for index in (0, 1)] == [epoch, epoch]
    table.close()


def test_the_next_epoch_can_be_set() -> None:
    """set_next decides the following iteration; counting goes on from there."""
    table = EpochTable()
    assert table.take(None) == 0
    table.set_next(7)
    assert [table.take(None), table.take(None)] == [7, 8]
    table.close()


def _take(table: EpochTable, answers: Any) -> None:
    answers.put([table.take(Worker(0, 1, seed)) for seed in (3, 4)])


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.server) for name in ("forkserver", "spawn"))]
)
def test_child_processes_share_it(method: str) -> None:
    """A number taken in a child process is taken in its parent, whatever starts the child."""
    context = multiprocessing.get_context(method)
    table, answers = EpochTable(), context.SimpleQueue()
    child = context.Process(target=_take, args=(table, answers))
    child.start()
    assert answers.get() == [0, 1]
    child.join(30)
    assert table.take(None) == 2
    table.close()


def test_a_pickle_is_a_new_table() -> None:
    """Stored or sent elsewhere, it begins with epoch 0."""
    table = EpochTable()
    table.set_next(5)
    copy = pickle.loads(pickle.dumps(table))
    assert copy.take(None) == 0
    table.close()
    copy.close()
