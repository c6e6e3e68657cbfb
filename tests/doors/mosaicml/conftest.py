"""MosaicML Streaming without torchvision, which its data sets import and nothing here uses."""

from __future__ import annotations

import penstock.bench.clients.without_torchvision  # noqa: F401 - before streaming
