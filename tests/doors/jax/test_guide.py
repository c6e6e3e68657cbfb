from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pages import code_of, write_pictures

PAGES = ["docs/guides/jax.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(tmp_path: Path, page: str) -> None:
    """What the page shows as runnable runs, in order, on shards of pictures."""
    write_pictures(tmp_path / "train", samples=64, shards=4, size=(30, 40), kind="jpg")
    code = code_of(page, "jax").replace("s3://bucket/train/", f"{tmp_path}/train/")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
