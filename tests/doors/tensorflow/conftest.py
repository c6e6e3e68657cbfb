"""What this suite shares: a small data set on local disk, and TensorFlow without its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import penstock.tensorflow  # noqa: F401
from loading import write_counted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty counted samples in three shards."""
    write_counted(tmp_path, (9, 4, 7))
    return tmp_path
