from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import numbers, pipeline, write_counted
from penstock.errors import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path, (9, 4, 7))
    return tmp_path


def test_in_a_dataloader(folder: Path) -> None:
    """DataLoader(dataset, batch_size=None) passes the loader's batches on, epoch after epoch."""
    dataset = ps.torch.IterableDataset(pipeline(folder), threads=1)
    with ps.Loader(pipeline(folder)) as loader:
        for _ in range(2):
            batches: list[Any] = list(torch.utils.data.DataLoader(dataset, batch_size=None))
            assert numbers(batches) == numbers(loader)
            assert isinstance(batches[0]["cls"], torch.Tensor)
    assert dataset.statistics().samples == 40
    dataset.close()
    assert dataset.statistics().samples == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-read")]


def test_workers_are_refused(folder: Path) -> None:
    """In worker processes every batch would come several times: an error that says what to do."""
    dataset = ps.torch.IterableDataset(pipeline(folder))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(loader))


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
