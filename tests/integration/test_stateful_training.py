"""The same training, resumed: torchdata's ``StatefulDataLoader`` on an ``IterableDataset``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loading import index_beside, write_counted
from ranks import torchrun

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.server, pytest.mark.torch]


@pytest.mark.parametrize(("ranks_count", "workers_count"), [(1, 2), (2, 0)])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    tmp_path: Path, ranks_count: int, workers_count: int
) -> None:
    """From checkpoints inside, at the end of and after epochs, another process sees the same batches, with the same losses."""
    write_counted(tmp_path / "data", (30, 4, 40, 1, 26))
    index_beside(tmp_path / "data")
    last = {1: 13, 2: 7}[ranks_count]  # the last batch of an epoch
    script, arguments = Path(__file__).with_name("stateful_training.py"), [str(tmp_path), str(workers_count)]
    checkpoints = {"step3": 3, f"step{last}": last, f"step{last + 2}": last + 2, "epoch0": last, "epoch1": 2 * last}
    torchrun(ranks_count, script, *arguments)
    torchrun(ranks_count, script, *arguments, *checkpoints)
    for rank in range(ranks_count):
        whole, *resumed = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        assert len(whole) == 3 * last
        for (name, done), rest in zip(checkpoints.items(), resumed, strict=True):
            assert rest == whole[done:], f"rank {rank}, {name}"
