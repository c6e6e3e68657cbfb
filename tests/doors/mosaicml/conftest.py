"""MosaicML Streaming without torchvision, which its data sets import and nothing here uses; see ``bench/peers``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "bench/peers"))

import _without_torchvision  # noqa: F401 - before streaming
