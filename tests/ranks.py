"""Scripts in several processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(processes: int, script: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run `script` in that many processes; what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},  # more threads round in another way
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
