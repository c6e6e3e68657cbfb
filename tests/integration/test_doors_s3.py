"""The PyTorch doors on a real S3 server: what they give is what was written, also in workers that were forked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import penstock as ps
from loading import counted, numbers, shard
from penstock.store import Store

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

SAMPLES = 40


@pytest.fixture(autouse=True)
def _forking_is_the_users_choice() -> Iterator[None]:
    """Python warns of fork in a process with threads; what must work all the same is tested here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


@pytest.fixture
def shards(s3_store: Store, bucket: str, connection: dict[str, Any]) -> Any:
    """Counted samples in four shards."""
    for number in range(4):
        s3_store.write(f"train/s-{number:03d}.tar", shard(counted(range(number * 10, number * 10 + 10))))
    return ps.shards(f"s3://{bucket}/train/", **connection).shuffle(window=16).decode(ps.Integer("cls")).batch(6)


@pytest.fixture
def objects(s3_store: Store, bucket: str, connection: dict[str, Any]) -> Any:
    """Counted samples, each an object."""
    for number in range(SAMPLES):
        s3_store.write(f"objects/{number:03d}.cls", str(number).encode())
    return ps.objects(f"s3://{bucket}/objects/", **connection).decode(ps.Integer("cls"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_shards_in_workers(shards: Any, method: str) -> None:
    """Workers started while this process reads from the same store get the loader's epoch, and the reading goes on."""
    with ps.Loader(shards) as loader:
        expected = numbers(loader)
        batches = iter(loader)
        first = next(batches)
        dataset = ps.torch.IterableDataset(shards, threads=1)
        workers = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
        assert numbers(workers) == expected
        assert sorted(numbers([first]) + numbers(batches)) == list(range(SAMPLES))
        dataset.close()


def test_objects_in_workers(objects: Any) -> None:
    """Single objects by number, first here, then in workers, which use connections of their own."""
    dataset = ps.torch.MapDataset(objects)
    assert dataset[7]["cls"] == 7
    workers = torch.utils.data.DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork"
    )
    assert sorted(numbers(workers)) == list(range(SAMPLES))
    assert dataset[-1]["cls"] == SAMPLES - 1
