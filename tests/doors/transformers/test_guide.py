from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pages import ROOT, programs_of, run_page
from penstock.testing.ministack import Ministack


def test_the_page_runs(tmp_path: Path, ministack: Ministack) -> None:
    """What the page shows of transformers runs, in order, against a real store."""
    ministack.create_bucket("bucket")
    programs = programs_of(ROOT / "docs/guides/checkpoints.md", "transformers")
    (program,) = [program for program in programs if "from transformers import" in program]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **ministack.environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_training_of_the_page_runs(tmp_path: Path) -> None:
    """What the page shows of the Trainer and of Accelerate runs, in order, on shards of pictures."""
    run_page("docs/guides/huggingface.md", "transformers", tmp_path)
