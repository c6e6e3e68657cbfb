"""Restores a loader from every position and compares the whole tail: what every iterator with state must pass."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.errors import PenstockError


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Two batches hold the same columns with the same dtypes and values."""
    assert list(left) == list(right)
    for name, column in left.items():
        assert type(column) is type(right[name]), name
        assert getattr(column, "dtype", None) == getattr(right[name], "dtype", None), name
        np.testing.assert_array_equal(column, right[name], err_msg=name)


def assert_resumes_everywhere(
    make: Callable[[], ps.Loader], *, epochs: int = 2, every: int = 1, resumed: Callable[[], ps.Loader] | None = None
) -> int:
    """Save behind every batch of some epochs, load in a new loader, and compare all that follows.

    Args:
        make: A loader at its beginning.
        epochs: To go through.
        every: Save behind every so many batches only.
        resumed: Makes the loader that goes on; default `make`.

    Returns:
        Batches compared.
    """
    compared = 0
    with make() as loader:
        states = [loader.state_dict()]
        batches = []
        for _ in loader.epochs(epochs):
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
    for index in range(0, len(states), every):
        state = json.loads(json.dumps(states[index]))
        with (resumed or make)() as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [batch for _ in loader.epochs(epochs) for batch in loader]
        assert len(rest) == len(batches) - index
        for left, right in zip(batches[index:], rest, strict=True):
            assert_same(left, right)
        compared += len(rest)
    return compared


def ring(size: int, barrier: threading.Barrier) -> list[Callable[[int], int]]:
    """An ``agree`` for each of `size` ranks that run in threads: the smallest value of all."""
    values = [0] * size

    def agree(rank: int) -> Callable[[int], int]:
        def smallest(value: int) -> int:
            values[rank] = value
            barrier.wait()
            found = min(values)
            barrier.wait()
            return found

        return smallest

    return [agree(rank) for rank in range(size)]


def together(train: Callable[[int, Callable[[int], int]], Any], size: int) -> list[Any]:
    """What ``train(rank, agree)`` gives on each of `size` ranks that run in threads.

    Raises:
        BaseException: what a rank raised; rather that than its consequence on another.
    """
    barrier = threading.Barrier(size, timeout=60)
    agrees = ring(size, barrier)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = train(rank, agrees[rank])
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(
        errors, key=lambda each: (isinstance(each, threading.BrokenBarrierError), type(each) is PenstockError)
    ):
        raise error
    return found


def in_step(make: Callable[..., ps.Loader], size: int, *, epochs: int = 1) -> list[list[dict[str, Any]]]:
    """The batches of `size` ranks that run in threads, each given ``rank``, ``world_size`` and ``agree``."""

    def train(rank: int, agree: Callable[[int], int]) -> list[dict[str, Any]]:
        with make(rank=rank, world_size=size, agree=agree) as loader:
            return [batch for _ in loader.epochs(epochs) for batch in loader]

    return together(train, size)


def children() -> set[int]:
    """Processes that this one started and that live."""
    out = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            out |= set(map(int, (task / "children").read_text().split()))
    return out


def valid_rows(batches: list[dict[str, Any]], field: str) -> Iterator[int]:
    """Values of a field in the rows that count."""
    for batch in batches:
        valid = batch.get("__valid__", np.ones(len(batch[field]), dtype=bool))
        yield from (int(value) for value, counts in zip(batch[field], valid, strict=True) if counts)
