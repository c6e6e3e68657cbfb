"""What this suite shares: shards in a folder, the same in a bucket, and the options of a connection to it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.webdataset
from loading import shard
from servers.faulty import FaultyServer

SIZES = (30, 4, 40, 1, 12)
"""Samples of each shard; the one of 40 is several parts long."""

URL = "s3://bucket/train-{000..004}.tar"


def pytest_configure(config: pytest.Config) -> None:
    """WebDataset leaves the closing of local files and pipes to the collector; 0.2 then raises if a command has failed."""
    config.addinivalue_line("filterwarnings", "ignore:unclosed file:ResourceWarning")
    config.addinivalue_line("filterwarnings", "ignore:.*Pipe.__del__:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _known_warnings() -> Iterator[None]:
    """Forking is the user's choice, and the DataLoader's workers are forked here too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards as files."""
    made = tmp_path_factory.mktemp("shards")
    number = 0
    for index, size in enumerate(SIZES):
        samples = []
        for _ in range(size):
            data = os.urandom(600_000 if size == 40 else 20_000)
            samples.append({"__key__": f"s{number:05d}", "bin": data, "cls": str(number)})
            number += 1
        (made / f"train-{index:03d}.tar").write_bytes(shard(samples))
    return made


@pytest.fixture
def bucket(folder: Path, faulty: FaultyServer) -> Iterator[FaultyServer]:
    """A server whose bucket has the shards; ``s3://`` leads there for the time of the test."""
    for path in folder.iterdir():
        faulty.objects[path.name] = path.read_bytes()
    penstock.webdataset.register(endpoint_url=faulty.endpoint_url, anonymous=True)
    yield faulty
    penstock.webdataset.register()
