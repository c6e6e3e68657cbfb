"""What ranks agree on when an epoch opens: how to read, and that all can."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import PenstockError
from resuming import ring

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


@pytest.mark.parametrize("failing", ["on_epoch", "listing"])
@pytest.mark.parametrize("mode", ["auto", "stream", "require"])
def test_ranks_hear_of_one_that_cannot_open_an_epoch(tmp_path: Path, mode: Any, failing: str) -> None:
    """The others get an error and wait for nobody, though the failing rank lives on; then all begin again together."""
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16, batch=4)
    index(made, tmp_path / "index")
    agrees = ring(2, threading.Barrier(2, timeout=20))
    is_broken = [True]
    raised: list[list[str]] = [[], []]
    counts = [0, 0]

    def run(rank: int) -> None:
        own = made
        if rank and failing == "listing":
            own = pipeline(tmp_path / "nothing", window=16, batch=4)
        job: dict[str, Any] = {"rank": rank, "world_size": 2, "agree": agrees[rank], "index_dir": tmp_path / "index"}

        def on_epoch(epoch: int, statistics: Any) -> None:
            if rank and is_broken[0]:
                raise RuntimeError("only here")

        job["on_epoch"] = on_epoch if failing == "on_epoch" else None
        with ps.Loader(own, lanes=4, threads=1, index=mode, **job) as loader:
            try:
                sum(1 for _ in loader)
            except (PenstockError, RuntimeError) as error:
                raised[rank].append(type(error).__name__)
            if failing != "listing":
                is_broken[0] = False
                loader.restart()
                counts[rank] = sum(1 for _ in loader)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert raised == [["PenstockError"], ["RuntimeError" if failing != "listing" else "DirectoryMissingError"]]
    assert failing == "listing" or counts[0] == counts[1] > 0
