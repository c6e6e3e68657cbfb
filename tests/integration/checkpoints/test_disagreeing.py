"""Ranks that do not agree on what they save, or on whether they restore."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch, pytest.mark.heavy]


def test_every_rank_hears_of_the_failure_of_one(tmp_path: Path) -> None:
    """Other steps, other models, a tensor on meta and a state that one rank refuses are errors on both; what follows works."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    scenario = Path(__file__).parent / "disagreeing_scenario.py"
    done = subprocess.run(
        [*launcher, str(scenario), f"{tmp_path}/run/"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["agreed", "agreed"]
