"""What the suites of several frameworks share: a bucket of a user, and a mount of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps


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
