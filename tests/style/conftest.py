"""What the rules share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _uncollected() -> Iterator[None]:
    """Let the collector rest: it would visit millions of nodes of syntax trees again and again, longer than parsing takes."""
    gc.disable()
    yield
    gc.enable()
