"""The configuration of a cache."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.cache import CacheConfig
from penstock.config import MIB
from penstock.errors import ConfigError


def test_the_short_spelling() -> None:
    """In ``PATH:SIZE`` the path may contain colons, and becomes absolute."""
    config = CacheConfig.of("/nvme/a:b:200GB")
    assert (config.path, config.bytes_max) == ("/nvme/a:b", 200 * 10**9)
    assert CacheConfig.of(config) is config
    assert str(CacheConfig.of("here:10MB").path).startswith("/")


def test_the_short_spelling_of_free_space() -> None:
    """What must remain free may follow the size."""
    config = CacheConfig.of("/nvme/a,b:200GB,free_ratio_min=0.01")
    assert (config.path, config.bytes_max, config.free_ratio_min) == ("/nvme/a,b", 200 * 10**9, 0.01)


@pytest.mark.parametrize(
    "rest", ["", "0.01", "free_ratio_min", "free_ratio_min=", "free_ratio_min=1.5", "block_bytes=4096"]
)
def test_what_cannot_follow_the_size(rest: str) -> None:
    """Anything else after the size is refused by a message that names the setting."""
    with pytest.raises(ConfigError, match="free_ratio_min"):
        CacheConfig.of(f"/nvme/penstock:200GB,{rest}")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("1MB", "bytes_max=1000000 must"),
        ("1MB,free_ratio_min=0", "bytes_max=1000000 must"),
        ("1GB,free_ratio_min=1.5", "must lie in"),
    ],
)
def test_a_value_out_of_bounds_is_named(rest: str, message: str) -> None:
    """A value that is too small or too large is not taken for a wrong spelling."""
    with pytest.raises(ConfigError, match=message):
        CacheConfig.of(f"/nvme/penstock:{rest}")


@pytest.mark.parametrize("value", ["/nvme/penstock", ":10GB", "/x:", 7, None])
def test_what_is_no_cache(value: object) -> None:
    """A path without a size is refused with a hint, since a cache must be bounded."""
    with pytest.raises(ConfigError, match=r"200GB|size"):
        CacheConfig.of(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_max": 1000},
        {"block_bytes": 100},
        {"block_bytes": 1 << 30},
        {"free_ratio_min": 1.0},
        {"free_ratio_min": -0.1},
        {"metadata_ttl_s": -1.0},
        {"metadata_ttl_s": math.nan},
        {"wait_s_max": -1.0},
        {"threads_max": 0},
        {"namespace": "a\0b"},
    ],
)
def test_bounds(wrong: dict) -> None:
    """Each bound is checked at construction."""
    with pytest.raises(ConfigError):
        CacheConfig("/x", **{"bytes_max": 10**9, **wrong})


@given(st.integers(4096, 64 * MIB), st.integers(256 * 1024, 64 * MIB))
def test_parts_are_whole_blocks(block_bytes: int, part_bytes: int) -> None:
    """The size is at most the one wanted and more than half of it, and fits the blocks if that is possible."""
    found = CacheConfig("/x", 64 * block_bytes, block_bytes=block_bytes).whole_blocks(part_bytes)
    assert part_bytes // 2 < found <= part_bytes
    if block_bytes <= part_bytes:
        assert found % block_bytes == 0
    elif block_bytes.bit_count() == 1:
        assert block_bytes % found == 0 or found % block_bytes == 0


def test_a_loaders_parts_are_whole_blocks(tmp_path: Path) -> None:
    """With a cache the parts that a lane reads begin and end where blocks do."""
    (tmp_path / "0.tar").write_bytes(bytes(10_240))
    pipeline = ps.shards(f"{tmp_path}/").batch(1)
    sizes = []
    for cache in (None, CacheConfig(tmp_path / "cache", 10**9)):
        with ps.Loader(pipeline, lanes=1, cache=cache) as loader:
            sizes.append(loader._session.planned().read_plan.reading.sizes.part_bytes)
    assert sizes[0] % MIB != 0
    assert sizes[1] == sizes[0] - sizes[0] % MIB > 0
