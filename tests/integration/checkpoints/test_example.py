"""The example that goes on after it was killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loading import index_beside
from pages import write_pictures

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch, pytest.mark.heavy, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "resumable_training.py"


def losses(folder: Path, run: str, steps: int) -> tuple[set[str], dict[tuple[str, ...], str]]:
    """Run the example on two processes; the steps at which they began, and the losses that they printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLE), f"{folder}/train/", f"{folder}/{run}/", "--steps", str(steps), "--every", "5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # gloo's threads may abort a process that has done its work, while it ends (pytorch/pytorch#179291)
    assert done.returncode == 0 or "terminate called" in done.stderr, done.stderr[-3000:]
    printed = re.findall(r"rank (\d) step (\d+) loss ([\d.]+)", done.stdout)
    return set(re.findall(r"begins at step (\d+)", done.stdout)), {tuple(line[:2]): line[2] for line in printed}


def test_the_example_goes_on(tmp_path: Path) -> None:
    """It begins at the newest checkpoint, and from there on has the losses of the run that was not interrupted."""
    write_pictures(tmp_path / "train", samples=200, shards=4)
    index_beside(tmp_path / "train")
    began, whole = losses(tmp_path, "whole", 20)
    assert (began, len(whole)) == ({"0"}, 8)
    name = "step-0000000010"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "parts" / name)  # what a run leaves that was killed after it
    began, parts = losses(tmp_path, "parts", 20)
    assert began == {"10"}
    assert parts == {place: loss for place, loss in whole.items() if int(place[1]) > 10}
