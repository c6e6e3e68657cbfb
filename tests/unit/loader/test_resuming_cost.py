"""What it costs to go on near the end of an epoch, counted at the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from counting import Counted, counted_stores
from loading import index, number_of, numbers, write_formatted

LANES, RUN, BATCH = 4, 10, 8
SHARDS, EACH = 12, 40
TOTAL = SHARDS * EACH
SAVED_AT = 54  # of 60 batches


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return counted_stores(monkeypatch)


@pytest.mark.parametrize(
    ("name", "mode", "samples_max"),
    [
        ("tar", "stream", TOTAL - SAVED_AT * BATCH + LANES * RUN),  # what is left, and the current runs
        ("tar", "require", TOTAL - SAVED_AT * BATCH + LANES * RUN),
        ("tar.gz", "stream", LANES * EACH),  # a compressed shard is read from its head: the current ones
    ],
)
def test_it_costs_the_current_runs_and_no_replay(
    tmp_path: Path, counted: Counted, name: str, mode: Any, samples_max: int
) -> None:
    """At nine tenths of an epoch: bytes of what is left and of the current runs, or units; a request or two per lane."""
    write_formatted(tmp_path / "data", name, [EACH] * SHARDS)
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=LANES * RUN, seed=0)
    made = made.map(number_of).batch(BATCH)
    options: dict[str, Any] = {
        "lanes": LANES,
        "threads": 1,
        "index": mode,
        "index_dir": index(made, tmp_path / "index"),
    }
    counted.clear()
    with ps.Loader(made, **options) as loader:
        whole = numbers(loader)
        all_requests, all_bytes = len(counted.spans), counted.bytes
        loader.restart(0)
        for _, _ in zip(range(SAVED_AT), loader, strict=False):
            pass
        state = loader.state_dict()
    counted.clear()
    with ps.Loader(made, **options) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == whole[SAVED_AT * BATCH :]
    assert counted.bytes <= 1.1 * all_bytes * samples_max / TOTAL
    assert len(counted.spans) <= 2 * LANES < all_requests
