"""Ranks that do not all find an index: none may read by one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import penstock as ps
from loading import index, numbers, pipeline, write_counted

SIZES = [9, 6, 14, 5, 11, 4]


def test_ranks_read_alike(tmp_path: Path) -> None:
    """One rank's host has an index, the other's has none: both stream, and every sample comes once."""
    total = write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16, batch=4)
    index(made, tmp_path / "0")
    meeting = threading.Barrier(2, timeout=30)
    said = [0, 0]
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        def agree(n: int) -> int:
            said[rank] = n
            meeting.wait()
            least = min(said)
            meeting.wait()
            return least

        job: dict[str, Any] = {"rank": rank, "world_size": 2, "agree": agree, "index_dir": tmp_path / str(rank)}
        with ps.Loader(made, lanes=4, threads=1, **job) as loader:
            if rank == 0:
                assert len(loader) > 0  # looks at the data before the other rank does
            batches = list(loader)
            found[rank] = [
                number
                for batch in batches
                for number, is_valid in zip(numbers([batch]), batch["__valid__"], strict=True)
                if is_valid
            ]

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert sorted(found[0] + found[1]) == list(range(total))
