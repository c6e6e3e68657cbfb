"""Formats that are looked into before they are read, among worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import formatted, index, number_of
from resuming import assert_same

pytestmark = pytest.mark.server


@pytest.mark.parametrize("name", ["parquet", "zip", "mds"])
def test_worker_processes_give_the_same_batches(tmp_path: Path, name: str) -> None:
    """By range, entered inside, with fields left out: what threads give, and the same bytes saved."""
    (tmp_path / "data").mkdir()
    for shard in range(3):
        samples = [
            {"__key__": f"{shard}{at:03d}", "n": b"%d" % (100 * shard + at), "big": bytes([at]) * 3000}
            for at in range(20)
        ]
        (tmp_path / "data" / f"s{shard}.{name}").write_bytes(formatted(name, samples))
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=16).select(["n"]).map(number_of).batch(7)
    options: dict[str, Any] = {
        "lanes": 4, "index_dir": index(made, tmp_path / "index"), "fetch": ps.FetchConfig(gap_bytes_max=1000),
    }  # fmt: skip
    with ps.Loader(made, threads=1, **options) as threads, ps.Loader(made, processes=2, **options) as processes:
        for left, right in zip(threads, processes, strict=True):
            assert_same(left, dict(right))
        if name != "mds":
            assert threads.statistics().saved_bytes == processes.statistics().saved_bytes > 0
