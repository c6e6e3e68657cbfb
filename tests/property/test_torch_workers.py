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
from loading import as_one_field, forget_content, index, numbers, pipeline, shard, write_counted
from penstock.formats import TFRecordWriter
from penstock.formats.writers import encode_example
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


@pytest.mark.parametrize("first", [b"", b"\x01", encode_example({"x": b"a"})])
@pytest.mark.parametrize("old", [False, True])
def test_workers_read_records_as_their_shards_first_record_is(tmp_path: Path, first: bytes, old: bool) -> None:
    """Workers that read ranges of their own give the fields that reading in order gives, also by an older index."""
    (tmp_path / "data").mkdir()
    for number in range(2):
        records = [first, *(encode_example({"x": b"%d" % each}) for each in range(20))]
        data = shard([{"record": record} for record in records], TFRecordWriter)
        (tmp_path / f"data/s{number}.tfrecord").write_bytes(data)
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=8, seed=1).map(as_one_field).batch(2)
    place = index(made, tmp_path / "index")
    if old:
        forget_content(made, place)
    options: dict[str, Any] = {"index_dir": place, "threads": 1, "index": "require"}
    options["fetch"] = ps.FetchConfig(gap_bytes_max=0)
    with ps.Loader(made, **options) as loader:
        expected = [list(each["all"]) for each in loader]
    datasets = [ps.torch.IterableDataset(made, **options) for _ in range(3)]
    for dataset in datasets:
        dataset._epochs = datasets[0]._epochs
    assert [list(each["all"]) for each in epoch_of(datasets, 5)] == expected
    assert all(value.startswith(b"(('x'" if len(first) > 1 else b"(('record'") for each in expected for value in each)
    for dataset in datasets:
        dataset.close()
