from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from loading import pipeline, write_counted
from penstock.errors import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_no_group_is_none() -> None:
    """Without a process group there is nothing to say."""
    assert ps.torch.rank_and_world_size() is None


def test_the_process_group_says_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch.distributed is initialised, it wins over the environment."""
    import torch.distributed

    write_counted(tmp_path / "data", (9, 4, 7))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="world_size=2"):
        next(iter(ps.torch.IterableDataset(pipeline(tmp_path / "data"))))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert ps.torch.rank_and_world_size() == (0, 1)
        dataset = ps.torch.IterableDataset(pipeline(tmp_path / "data"))
        next(iter(dataset))
        dataset.close()
    finally:
        torch.distributed.destroy_process_group()
