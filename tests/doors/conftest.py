"""What the suites of several frameworks share: a bucket of a user, and a mount of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

WITHOUT_TORCH = ("feeds", "jax", "tensorflow", "tensorflow_io")


@pytest.fixture(scope="module", autouse=True)
def _no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who uses another framework may have no PyTorch, which is in the environment of these tests: nothing imports it."""
    yield
    assert request.path.parent.name not in WITHOUT_TORCH or "torch" not in sys.modules


@pytest.fixture
def url(user: Any) -> str:
    """URL of an empty bucket of a user of the session's S3."""
    return f"s3://{user.create_bucket()}"


@pytest.fixture
def mounted(url: str, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A function that mounts the bucket of `url` as it is then, and returns the directory."""
    mounts = []

    def mount() -> Path:
        directory = tmp_path / "mounted"
        directory.mkdir()
        mounts.append(ps.mount(url, directory))
        return directory

    yield mount
    for each in mounts:
        each.close()
