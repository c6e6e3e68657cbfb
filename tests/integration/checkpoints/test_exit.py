"""A process that ends while a checkpoint is uploaded in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoints import Checkpoints

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAM = """
import sys, torch, penstock as ps
model = torch.nn.Linear(1000, 1000)
checkpoint = ps.torch.Checkpoint(model=model)
checkpoint.save(sys.argv[1], step=7, wait=False)
print("end", flush=True)
"""


def program(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_program_that_ends_finishes_its_upload(tmp_path: Path) -> None:
    """A process that does not wait for its last save still completes it before it ends."""
    done = program(f"{tmp_path}/run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.verify(7).ok


def test_a_program_that_ends_tells_of_its_failure(tmp_path: Path) -> None:
    """If the last save failed and nobody asked, the error is printed, and the exit code is 1."""
    (tmp_path / "file").touch()
    done = program(f"{tmp_path}/file/run")
    assert (done.returncode, done.stdout) == (1, "end\n")
    assert "saving the checkpoint of step 7 failed" in done.stderr
    assert f"{tmp_path}/file" in done.stderr
