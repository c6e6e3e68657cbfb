"""Random access on a real S3 server: one engine for all threads, children that go on, versions that are held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from forking import exit_code_of, start_child
from loading import counted, shard
from penstock.access import PipelineDataset
from penstock.store import Store

pytestmark = pytest.mark.server
SAMPLES = 40


@pytest.fixture
def dataset(s3_store: Store, bucket: str, connection: dict[str, Any], tmp_path: Path) -> Iterator[PipelineDataset]:
    """Counted samples in four shards."""
    for number in range(4):
        s3_store.write(f"train/s-{number:03d}.tar", shard(counted(range(number * 10, number * 10 + 10))))
    made = ps.shards(f"s3://{bucket}/train/", **connection).decode(ps.Integer("cls"))
    with made.open(index_dir=tmp_path) as opened:
        yield opened


def numbers(samples: Any) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def test_threads_share_one_engine(dataset: PipelineDataset) -> None:
    """Whatever number of threads ask for batches, no thread is added to the process's one loop."""
    dataset[0]
    before = {thread.name for thread in threading.enumerate()}
    orders = [np.random.default_rng(seed).permutation(SAMPLES).tolist() for seed in range(8)]
    with ThreadPoolExecutor(8, "asking") as pool:
        assert list(pool.map(lambda order: numbers(dataset[order]), orders)) == orders
        added = {thread.name for thread in threading.enumerate()} - before
    assert all(name.startswith("asking") for name in added)


def test_a_forked_child_goes_on(dataset: PipelineDataset) -> None:
    """A child uses the data set with connections of its own while its parent reads, and does not disturb it."""
    batches = dataset.iter_samples(range(SAMPLES))
    assert next(batches)["cls"] == 0
    child = start_child(lambda: numbers(dataset[[33, 2]]) == [33, 2] and dataset["s00007"]["cls"] == 7)
    assert numbers(batches) == list(range(1, SAMPLES))
    assert exit_code_of(child) == 0
