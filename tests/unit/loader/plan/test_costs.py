"""What a loader holds against its budget: refused before it is held."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index, pipeline, shard, write_counted
from penstock.config import MIB, FetchConfig
from penstock.errors import ConfigError
from penstock.fetch import process_budget
from penstock.loader.plan.costs import MemoryNeeds
from penstock.memory import buffers
from penstock.memory.buffers import give_back_free_memory

SAMPLE_BYTES = 200_000


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """32 MB in 8 shards, of samples of 200 KB, and a window of 100 of them."""
    (tmp_path / "data").mkdir()
    for number in range(8):
        samples = [{"__key__": f"{number}-{at}", "raw": bytes(SAMPLE_BYTES), "cls": str(at)} for at in range(20)]
        (tmp_path / "data" / f"{number}.tar").write_bytes(shard(samples))
    return ps.shards(f"{tmp_path}/data/").shuffle(window=100).decode(ps.Integer("cls")).batch(4)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_window_that_cannot_fit_is_refused(tmp_path: Path, made: Any, is_indexed: bool) -> None:
    """With an index before anything is read, else before the first batch, with the numbers; half of it is not."""
    if is_indexed:
        index(made, tmp_path / "index")
    options: dict[str, Any] = {"lanes": 4, "threads": 1, "index_dir": tmp_path / "index"}
    with (
        ps.Loader(made, fetch=FetchConfig(budget_bytes_max=16 * MIB), **options) as loader,
        pytest.raises(ConfigError, match=r"window 19\.[12] MiB.*more than its budget of 16 MiB") as caught,
    ):
        next(iter(loader))
    assert "a smaller window" in str(caught.value)
    with ps.Loader(made, fetch=FetchConfig(budget_bytes_max=48 * MIB), **options) as loader:
        assert sum(len(batch["cls"]) for batch in loader) == 160


def test_a_window_is_no_larger_than_the_data(tmp_path: Path) -> None:
    """A few large samples do not have the usual window's worth of them."""
    (tmp_path / "few.tar").write_bytes(shard([{"__key__": str(at), "raw": bytes(SAMPLE_BYTES)} for at in range(9)]))
    made = ps.shards(f"{tmp_path}/few.tar").shuffle(window=16384).batch(3)
    index(made, tmp_path / "index")
    with ps.Loader(made, index_dir=tmp_path / "index", fetch=FetchConfig(budget_bytes_max=16 * MIB)) as loader:
        assert len(list(loader)) == 3


def test_read_ahead_has_what_the_window_leaves() -> None:
    """A window that fills most of the budget is read with less ahead, and fits."""
    fetch = FetchConfig(budget_bytes_max=2048 * MIB)
    holding = MemoryNeeds(
        window_count=16384, rows_count=3 * 128, row_bytes=150_528, readers_count=64, data_bytes=None, fetch=fetch
    )
    for sample_bytes in (1_000, 60_000, 115_000):
        plan = holding.plan(sample_bytes, holding.read_ahead_sizes(sample_bytes))
        plan.check()
        assert plan.read_ahead_bytes >= 96 * MIB
    with pytest.raises(ConfigError, match="more than its budget of 2 GiB"):
        holding.plan(130_000, holding.read_ahead_sizes(130_000)).check()


@pytest.mark.parametrize("is_indexed", [True, False])
def test_what_left_is_let_go_of(tmp_path: Path, is_indexed: bool) -> None:
    """Half-way through its runs a feed holds a window of samples, not those as well that left; and it is charged for them."""
    write_counted(tmp_path / "data", [240] * 8)
    made = pipeline(tmp_path / "data", window=480, batch=8)
    place = index(made, tmp_path / "index") if is_indexed else tmp_path / "none"
    used_bytes = process_budget().statistics().used_bytes
    with ps.Loader(made, lanes=4, threads=1, index_dir=place) as loader:
        plan = loader._session.planned()
        feed, _ = plan.read_plan.begin(0, None, batching=plan.batching)
        for _ in range(115):
            feed.take(8)
        held = sum(len(lane._ready_from) + len(lane._filling_from) for lane in feed.lanes)
        assert 300 <= held < 640
        assert process_budget().statistics().used_bytes > used_bytes
        feed.close()
        feed.close()
    assert process_budget().statistics().used_bytes - process_budget().statistics().free_bytes <= used_bytes


def test_batches_that_wait_are_charged(tmp_path: Path, made: Any) -> None:
    """Decoded or as stored, complete batches count against the process's budget until they are handed out or dropped."""
    stored = ps.shards(f"{tmp_path}/data/").batch(4)
    decoded = ps.shards(f"{tmp_path}/data/").map(lambda sample: {"raw": np.frombuffer(sample["raw"], "u1")}).batch(4)
    for pipeline_made in (stored, decoded):
        before = process_budget().statistics()
        with ps.Loader(pipeline_made, threads=1, prefetch_batches=2, index="stream") as loader:
            next(iter(loader))
            backend: Any = loader._session._running.backend  # type: ignore[union-attr]
            deadline_s = time.monotonic() + 20
            while len(backend._batches) < 3:
                assert time.monotonic() < deadline_s
                os.sched_yield()
            assert sum(batch.charged_bytes for batch in backend._batches) >= 3 * 4 * SAMPLE_BYTES
            after = process_budget().statistics()
            assert after.used_bytes - before.used_bytes + before.free_bytes >= 3 * 4 * SAMPLE_BYTES
            del backend  # and the parts that it refers to
        gc.collect()
        after = process_budget().statistics()
        assert after.used_bytes - after.free_bytes <= before.used_bytes - before.free_bytes


def test_epochs_leave_no_free_memory_behind(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``malloc`` keeps of a window's samples is given back when the epoch ends: the heaps' holes do not add up."""
    monkeypatch.setattr(buffers, "GIVE_BACK_BYTES", 16 * MIB)
    with ps.Loader(made, lanes=4, threads=1, index="stream") as loader:
        for _ in loader.epochs(2):
            for _ in loader:
                pass
    assert _free_bytes() < 2 * MIB


def _free_bytes() -> int:
    """Of whole free pages that ``malloc`` keeps, as far as giving them back shows."""
    before_bytes = _resident_bytes()
    give_back_free_memory()
    return before_bytes - _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
