"""The benchmark of workers on a cluster, and its client of ``penstock bench``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.process import client_environment

pytest.importorskip("psutil")
PROGRAM = Path(__file__).parents[3] / "bench" / "offload.py"


@pytest.mark.timeout(120)
def test_a_node_is_killed_in_the_benchmark() -> None:
    """The program starts a cluster of its own, and says how long the loop waited."""
    command = [sys.executable, PROGRAM, "--quick", "--part", "kill"]
    done = subprocess.run(command, capture_output=True, text=True, env=client_environment(), check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [row["row"] for row in record["rows"]] == ["seconds to the first batch", "seconds to go on"]
    assert all(0 < row["value"] < 60 for row in record["rows"])
