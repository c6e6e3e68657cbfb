from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index_beside, numbers, pipeline, write_counted
from penstock.errors import ConfigError

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _warnings_of_others() -> Any:
    """Python warns of fork in a process with threads, torch of what torchdata calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


def loader_of(folder: Path, workers: int, *, persistent: bool = False) -> Any:
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=3), threads=1)
    return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), pytest.param(2, False, marks=pytest.mark.server), (2, True)]
)
def test_a_restored_loader_continues(tmp_path: Path, workers: int, persistent: bool) -> None:
    """Stopped and restored several times, also at an epoch's end, the sequence is the one without a stop."""
    total = write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    loader = loader_of(tmp_path, workers, persistent=persistent)
    whole = [number for _ in range(3) for number in numbers(loader)]
    seen: list[int] = []
    state: Any = None
    for taken in (2, 3, 2, 1):  # in the middle, in the middle again, to the last batch, into the next epoch
        loader = loader_of(tmp_path, workers, persistent=persistent)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(taken):
            batch = next(batches, None)
            seen += [] if batch is None else numbers([batch])
        if len(seen) == total:
            assert next(batches, None) is None
        state = copy.deepcopy(loader.state_dict())
        assert seen == whole[: len(seen)]
    assert seen + numbers(batches) + numbers(loader) == whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 8},
        pytest.param({"batch_size": 2, "num_workers": 1, "drop_last": True}, marks=pytest.mark.server),
    ],
)
@pytest.mark.parametrize("loader_type", [torch.utils.data.DataLoader, stateful.StatefulDataLoader])
def test_batches_of_batches_are_refused(tmp_path: Path, loader_type: Any, options: dict[str, Any]) -> None:
    """A DataLoader that would stack whole batches is an error that says what to write; a collate_fn may unpack them."""
    write_counted(tmp_path, (9, 4, 7))
    dataset = ps.torch.IterableDataset(pipeline(tmp_path, window=None), threads=1)
    with pytest.raises(ConfigError, match=r"DataLoader\(dataset, batch_size=None\)"):
        next(iter(loader_type(dataset, **options)))
    assert numbers(loader_type(dataset, batch_size=1, collate_fn=lambda batches: batches[0])) == list(range(20))
    dataset.close()
