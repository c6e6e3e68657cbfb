"""What this suite shares: gateways before a directory of objects."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateways import RunningGateway

BUCKET = "views"
COUNT, SIZE_BYTES = 3, 24_000_000


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningGateway]]:
    """Return a function that starts a gateway with these flags; it is ended after the test."""
    running: list[RunningGateway] = []

    def started(*flags: str) -> RunningGateway:
        running.append(RunningGateway(tmp_path, *flags))
        return running[-1]

    try:
        yield started
    finally:
        for gateway in running:
            gateway.close()


@pytest.fixture(scope="session")
def contents() -> dict[str, bytes]:
    """Return what clients must read, by key: text that shrinks when it is compressed."""
    made = {}
    for number in range(COUNT):
        words = random.Random(number)
        block = bytes(words.choices(b"abcdefgh", k=1 << 16))
        made[f"data/part-{number}.txt"] = (block * (SIZE_BYTES // len(block) + 1))[: SIZE_BYTES + number]
    return made


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> Path:
    """Return a directory with the compressed contents under keys that end with ``.gz``."""
    folder = tmp_path_factory.mktemp("upstream")
    for key, data in contents.items():
        path = folder / f"{key}.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(data, compresslevel=1, mtime=0))
    return folder


@pytest.fixture
def views(tmp_path: Path, start: Callable[..., RunningGateway], compressed: Path) -> RunningGateway:
    """Return a gateway whose bucket shows the contents decompressed, under keys without ``.gz``."""
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'[access_points.{BUCKET}]\nupstream = "{compressed}"\ntransform = "gunzip"\n'
        'renamed_suffixes = { ".gz" = "" }\nkeys = ["AKPENSTOCKCLIENTS000"]\n'
    )
    return start("--config", str(config))
