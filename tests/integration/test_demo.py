"""The main job: `make demo`'s own script, on the embedded server, from writing the shards to the accuracy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.server
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_demo() -> None:
    """It exits with 0, ends with one JSON line that says so, and leaves no server behind."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "embedded_store.py")], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() == {"samples", "samples_per_s", "bytes", "stall_ratio", "accuracy", "verified"}
    assert result["verified"] is True
    assert result["accuracy"] >= 0.97
    assert result["samples"] % (1797 - 360) == 0
    assert 0 <= result["stall_ratio"] < 1
    assert "waited for data" in done.stderr
    server_pid = int(done.stderr.partition("(pid ")[2].partition(")")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(server_pid, 0)


def test_the_example_is_short() -> None:
    """What a user copies fits on two screens: under 120 lines."""
    assert len((EXAMPLES / "digits.py").read_text().splitlines()) < 120
