"""Blocks in the directory of a cache are read whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cache.config import CacheConfig
from penstock.cache.directory import BlockRead, CacheDirectory, NewEntry
from penstock.cache.entry import BLOCK, block_name, digest_of, encode, header_bytes_of
from penstock.cache.eviction import Evictor
from penstock.cache.statistics import Counts

IDENTITY = b"a version"
NAME = block_name(digest_of(IDENTITY), 0)
SIZES = [(1000, 5000), (5000, 1000), (1000, 200_000), (200_000, 1000)]
"""Sizes of a block that is stored, and of the one that is expected; headers of large blocks take a whole page."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], CacheDirectory]]:
    """Opens the directory as one more process would."""
    made: list[CacheDirectory] = []

    def make() -> CacheDirectory:
        config, counts = CacheConfig(tmp_path / "cache", bytes_max=10**8, free_ratio_min=0.0), Counts()
        directory = CacheDirectory(config, counts)
        directory.reserve = Evictor(directory, config, counts).reserve
        directory.prepare()
        made.append(directory)
        return directory

    yield make
    for directory in made:
        directory.close()


def stored(directory: CacheDirectory, size: int) -> None:
    """Store a block of letters."""
    data = memoryview(b"x" * size)
    header = encode(BLOCK, IDENTITY, data, block_index=0, object_bytes=size, block_bytes=1 << 20)
    directory.write([NewEntry(NAME, data, header_bytes_of(IDENTITY, size) + size, lambda: header)])


def read(directory: CacheDirectory, size: int, start: int = 0, *, waits: bool = True) -> bytes | None:
    """Read a block of a certain size from a position on."""
    view = memoryview(bytearray(size - start))
    wanted = [BlockRead(NAME, 0, size, start, view)]
    found = directory.read_blocks(IDENTITY, wanted)[0] if waits else directory.read_blocks_nowait(IDENTITY, wanted)
    return bytes(view) if found else None


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "nowait"])
@pytest.mark.parametrize("is_verified", [True, False], ids=["verified", "new"])
@pytest.mark.parametrize(("size", "expected"), SIZES)
def test_a_block_of_another_size_is_not_found(
    opened: Callable[[], CacheDirectory], size: int, expected: int, is_verified: bool, waits: bool
) -> None:
    """If a store tells two sizes of one version, neither memory that was not filled nor a header is taken for data."""
    directory = opened()
    stored(directory, size)
    if is_verified:
        assert read(directory, size) == b"x" * size
    assert read(directory if is_verified else opened(), expected, 10, waits=waits) is None
    stored(directory, size)
    assert read(directory, size, 10) == b"x" * (size - 10)
