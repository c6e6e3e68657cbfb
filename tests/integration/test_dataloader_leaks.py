"""A DataLoader over our datasets leaves nothing behind, however it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from integration.test_loader_processes import held
from loading import index_beside, numbers, pipeline, write_counted

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

TOTAL = 120
ENDS_S_MAX = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", [TOTAL // 4] * 4)
    index_beside(tmp_path / "data")
    return tmp_path / "data"


def _iterate(folder: Path, way: str, options: dict[str, Any]) -> None:
    dataset = ps.torch.IterableDataset(pipeline(folder, batch=4), lanes=4, **options["dataset"])
    batches: Any = torch.utils.data.DataLoader(dataset, batch_size=None, **options["loader"])
    if way == "error":
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - what is tested is a loop that fails
            for _ in batches:
                _ = 1 / 0
    elif way == "break":
        for _ in batches:
            break
    elif way == "dropped":
        next(iter(batches))
    else:
        assert sorted(numbers(batches)) == list(range(TOTAL))
    if way == "end":
        dataset.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dataset": {"processes": 2}, "loader": {}}, id="processes"),
        pytest.param({"dataset": {"threads": 1}, "loader": {"num_workers": 2}}, id="workers"),
        pytest.param(
            {"dataset": {"threads": 1}, "loader": {"num_workers": 1, "persistent_workers": True}}, id="persistent"
        ),
    ],
)
def test_everything_is_released(folder: Path, options: dict[str, Any]) -> None:
    """Threads, processes, descriptors and entries of /dev/shm after the end, break, an error in the loop, and collection."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        _iterate(folder, "end", options)  # starts what is shared
        gc.collect()
        before = held()
        for way in ("end", "break", "error", "dropped"):
            _iterate(folder, way, options)
            gc.collect()
            deadline_s = time.monotonic() + ENDS_S_MAX  # torch's queues end their threads by themselves
            while any(np.array(held()) > before):
                assert time.monotonic() < deadline_s, (way, before, held(), threading.enumerate())
                os.sched_yield()
