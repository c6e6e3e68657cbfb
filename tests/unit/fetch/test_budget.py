"""The byte budget: never exceeded unless forced, buffers back each time, views keep them."""

from __future__ import annotations

import gc
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.fetch import Budget

MIB = 2**20
np = pytest.importorskip("numpy")


def used_and_free(budget: Budget) -> tuple[int, int]:
    statistics = budget.statistics()
    return statistics.used_bytes, statistics.free_bytes


def test_a_buffer_comes_back_each_time() -> None:
    """The same memory is leased, given back and leased again, many times over."""
    budget = Budget(64 * MIB)
    owners = set()
    for _ in range(5):
        buffer = budget.acquire(2 * MIB)
        assert buffer is not None
        owners.add(id(buffer.owner))
        assert used_and_free(budget) == (2 * MIB, 0)
        del buffer
        assert used_and_free(budget) == (2 * MIB, 2 * MIB)
    assert len(owners) == 1


@pytest.mark.parametrize("derive", [
    lambda view: view[100:200],
    lambda view: np.frombuffer(view, dtype=np.uint8)[5:],
    lambda view: memoryview(view).cast("B")[::2],
    lambda view: np.frombuffer(view[8:16], dtype=np.int64).reshape(1, 1).T,
])  # fmt: skip
def test_whatever_is_made_of_a_view_keeps_the_buffer(derive: Any) -> None:
    """Slices, casts and arrays of a buffer keep it from being used again, until the last one goes."""
    budget = Budget(64 * MIB)
    for round_number in range(3):
        buffer = budget.acquire(1 * MIB)
        assert buffer is not None
        buffer.view[:] = bytes([round_number]) * len(buffer.view)
        kept, owner = derive(buffer.view), buffer.owner
        del buffer
        other = budget.acquire(1 * MIB)
        assert other is not None
        assert other.owner is not owner
        other.view[:] = b"\xff" * len(other.view)
        assert bytes(kept)[:1] == bytes([round_number])
        del kept, other
        assert used_and_free(budget) == (used_and_free(budget)[1],) * 2


def test_the_budget_is_a_bound() -> None:
    """What does not fit is refused and counted; forced, it is let in and counted; given back, it is there again."""
    budget = Budget(4 * MIB)
    assert budget.reserve(3 * MIB)
    assert not budget.reserve(2 * MIB)
    assert budget.acquire(2 * MIB) is None
    assert budget.statistics().refused_count == 2
    forced = budget.acquire(2 * MIB, force=True)
    assert forced is not None
    assert budget.statistics().overdrawn_count == 1
    assert used_and_free(budget)[0] == 5 * MIB
    del forced
    budget.release(3 * MIB)
    assert used_and_free(budget) == (0, 0) or used_and_free(budget)[0] == used_and_free(budget)[1]
    assert budget.reserve(4 * MIB)


def test_free_buffers_make_room() -> None:
    """Buffers kept for reuse are given up where something else needs the bytes."""
    budget = Budget(8 * MIB)
    buffers = [budget.acquire(2 * MIB) for _ in range(2)]
    del buffers
    assert used_and_free(budget) == (4 * MIB, 4 * MIB)
    assert budget.reserve(8 * MIB)
    assert used_and_free(budget) == (8 * MIB, 0)


def test_disowned_memory_is_not_charged() -> None:
    """A buffer handed to a caller leaves the budget; when the caller drops it, it is kept for reuse within the bound."""
    budget = Budget(8 * MIB)
    buffer = budget.acquire(2 * MIB)
    assert buffer is not None
    view = buffer.view
    budget.disown(buffer)
    del buffer
    assert used_and_free(budget) == (0, 0)
    del view
    assert used_and_free(budget) == (2 * MIB, 2 * MIB)


def test_many_threads_agree() -> None:
    """Under contention the bound holds all the time, and at the end everything is back."""
    budget = Budget(16 * MIB)

    def work(seed: int) -> int:
        chance = random.Random(seed)
        held: list[Any] = []
        reserved = 0
        for _ in range(200):
            match chance.randrange(4):
                case 0:
                    held.append(budget.acquire(chance.randrange(1, 3 * MIB)))
                case 1 if held:
                    held.pop(chance.randrange(len(held)))
                case 2 if budget.reserve(MIB):
                    reserved += MIB
                case 3:
                    budget.release(reserved)
                    reserved = 0
            assert budget.statistics().used_bytes <= budget.bytes_max
        budget.release(reserved)
        return seed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))
    used_bytes, free_bytes = used_and_free(budget)
    assert used_bytes == free_bytes


def test_a_forked_child_begins_with_an_empty_budget() -> None:
    """What the parent holds is not charged to the child, also when the child drops it."""
    budget = Budget(8 * MIB)
    held: Any = budget.acquire(2 * MIB)
    assert budget.reserve(MIB)
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        seen = [used_and_free(budget)]
        del held
        seen.append(used_and_free(budget))
        again: Any = budget.acquire(3 * MIB)
        seen.append(used_and_free(budget))
        del again
        seen.append(used_and_free(budget))
        os.write(target, pickle.dumps(seen))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        assert pickle.load(pipe) == [(0, 0), (0, 0), (3 * MIB, 0), (3 * MIB, 3 * MIB)]
    assert used_and_free(budget) == (3 * MIB, 0)


def test_a_finaliser_may_release_in_the_midst_of_the_budget() -> None:
    """The collector may run inside any method of the budget, and end reading that releases: no deadlock, no byte lost."""

    class Reading:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            budget.release(MIB)

    budget = Budget(64 * MIB)
    thresholds = gc.get_threshold()
    try:
        for count in range(1, 60):  # the collector runs a little later each time
            gc.collect()
            assert budget.reserve(MIB)
            gc.set_threshold(count)
            Reading()
            budget.statistics()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert used_and_free(budget) == (0, 0)
