"""Whatever the data set, the batch size and the number of workers: a DataLoader's workers together give the Loader's epochs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.pipeline import Pipeline

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EPOCHS = 2


@contextmanager
def as_worker(number: int, count: int, seed: int) -> Iterator[None]:
    """This process as DataLoader makes a worker process see itself."""
    from torch.utils.data._utils import worker

    worker._worker_info = worker.WorkerInfo(id=number, num_workers=count, seed=seed + number, dataset=None)
    try:
        yield
    finally:
        worker._worker_info = None


def epoch_of(datasets: list[Any], seed: int, *, stop: int | None = None, states: list[Any] | None = None) -> list[Any]:
    """Batches of one iteration, each worker asked in its turn, as DataLoader does; `stop` of them, or all.

    Appends the workers' states behind the last batch to `states`.
    """
    iterators = []
    for number, dataset in enumerate(datasets):
        with as_worker(number, len(datasets), seed):
            iterators.append(iter(dataset))
    batches: list[Any] = []
    left = list(range(len(datasets)))
    turn = 0
    while left and (stop is None or len(batches) < stop):
        number = left[turn % len(left)]
        with as_worker(number, len(datasets), seed):
            batch = next(iterators[number], None)
        if batch is None:
            turn = left.index(number)
            left.remove(number)
        else:
            batches.append(batch)
            turn = left.index(number) + 1
    if states is not None:
        for number, dataset in enumerate(datasets):
            with as_worker(number, len(datasets), seed):
                states.append(json.loads(json.dumps(dataset.state_dict())))
    return batches


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    batch=st.integers(1, 7),
    workers=st.integers(1, 4),
    window=st.sampled_from([None, 1, 8, 64]),
    indexed=st.booleans(),
    cut=st.integers(0, 40),
    gap_bytes=st.sampled_from([0, 512 * 1024]),
    drops=st.booleans(),
)
def test_workers_together_are_the_loader(
    sizes: list[int], batch: int, workers: int, window: int | None, indexed: bool, cut: int, gap_bytes: int, drops: bool
) -> None:
    """In the Loader's order, epoch after epoch; and stopped anywhere and restored, the rest comes as it would have."""
    with tempfile.TemporaryDirectory() as folder:
        write_counted(Path(folder) / "data", sizes)
        made = pipeline(Path(folder) / "data", window=window, batch=batch)
        if drops:  # also whole batches, which no worker may count
            made = Pipeline(made.source, made.stages[:-1]).filter(lambda sample: sample["cls"] // 4 % 2).batch(batch)
        options: dict[str, Any] = {"index_dir": Path(folder) / "index", "threads": 1}
        options["fetch"] = ps.FetchConfig(gap_bytes_max=gap_bytes)  # 0: workers read their own samples' ranges alone
        options["index"] = "require" if indexed else "stream"
        if indexed:
            index(made, Path(folder) / "index")
        with ps.Loader(made, **options) as loader:
            expected = [[numbers([each]) for each in loader] for _ in range(EPOCHS)]
        table_owner = ps.torch.IterableDataset(made, **options)
        datasets = [ps.torch.IterableDataset(made, **options) for _ in range(workers)]
        for dataset in datasets:
            dataset._epochs = table_owner._epochs  # what fork and spawn hand on
        found = [[numbers([each]) for each in epoch_of(datasets, seed)] for seed in (5, 6)]
        assert found == expected
        stop, states = cut % (len(expected[0]) + 1), list[Any]()
        fresh = [ps.torch.IterableDataset(made, **options) for _ in range(workers)]
        seen = [numbers([each]) for each in epoch_of(fresh, 5, stop=stop, states=states)]
        assert seen == expected[0][:stop]
        if stop % workers == 0:  # DataLoader goes on with the worker whose turn it is
            restored = [ps.torch.IterableDataset(made, **options) for _ in range(workers)]
            for number, (dataset, state) in enumerate(zip(restored, states, strict=True)):
                with as_worker(number, workers, 7):
                    dataset.load_state_dict(state)
            assert [numbers([each]) for each in epoch_of(restored, 7)] == expected[0][stop:]
            datasets += restored
        for dataset in [table_owner, *datasets, *fresh]:
            dataset.close()
