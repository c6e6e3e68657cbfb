"""The same training, resumed: torchdata's ``StatefulDataLoader`` on an ``IterableDataset``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loading import index_beside, write_counted
from ranks import run_ranks

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.server, pytest.mark.torch]


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    """From checkpoints inside, at the end of and after epochs, another job of two ranks, each with two workers, sees the same
    batches, with the same losses.
    """
    write_counted(tmp_path / "data", (30, 4, 40, 1, 26))
    index_beside(tmp_path / "data")
    last = 7  # the last batch of an epoch
    script, arguments = Path(__file__).with_name("stateful_training.py"), [str(tmp_path), "2"]
    checkpoints = {"step3": 3, f"step{last}": last, "epoch0": last}
    run_ranks(2, script, *arguments)
    run_ranks(2, script, *arguments, *checkpoints)
    for rank in range(2):
        whole, *resumed = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        assert len(whole) == 3 * last
        for (name, done), rest in zip(checkpoints.items(), resumed, strict=True):
            assert rest == whole[done:], f"rank {rank}, {name}"
