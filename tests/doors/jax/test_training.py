"""The same training with JAX, killed and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loading import index_beside, write_counted
from penstock.testing.s3_server import free_ports

pytest.importorskip("jax")

SCRIPT = Path(__file__).with_name("training.py")
BATCHES = 12  # per epoch


def train(folder: Path, run: str, kill_step: int, ranks_count: int) -> list[int]:
    """Train in processes, one for each rank; their exit statuses."""
    (port,) = free_ports(1)
    command = [sys.executable, str(SCRIPT), f"{folder}/data/", f"{folder}/{run}", str(kill_step)]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks_count), str(port)], stderr=subprocess.PIPE)
        for rank in range(ranks_count)
    ]
    errors = [each.communicate(timeout=120)[1] for each in started]
    assert all(each.returncode in (0, -signal.SIGKILL) for each in started), errors[0][-3000:].decode()
    return [each.returncode for each in started]


def logged(folder: Path, run: str, rank: int) -> list[Any]:
    """Step, epoch, keys and loss of each step."""
    return list(map(json.loads, (folder / f"{run}.{rank}.jsonl").read_text().splitlines()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path: Path, ranks_count: int) -> None:
    """Killed behind a checkpoint inside an epoch, and at the end of one, it trains on the same keys with the same losses."""
    write_counted(tmp_path / "data", (30, 4, 40, 1, 22))
    index_beside(tmp_path / "data")
    train(tmp_path, "whole", 0, ranks_count)
    for step in (5, BATCHES, 0):
        status = -signal.SIGKILL if step else 0
        assert train(tmp_path, "killed", step, ranks_count) == [status] * ranks_count
    for rank in range(ranks_count):
        whole = logged(tmp_path, "whole", rank)
        assert [step for step, *_ in whole] == list(range(1, 3 * BATCHES + 1))
        parts = logged(tmp_path, "killed", rank)
        assert [step for step, *_ in parts] == [*range(1, 6), *range(5, 13), *range(13, 37)]
        assert all(part == whole[part[0] - 1] for part in parts)
