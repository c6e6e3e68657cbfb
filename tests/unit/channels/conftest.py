"""A store, and a channel in Pipe mode over it, as a run begins it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import InputChannel
from penstock.channels.entries import Entries, open_source
from penstock.channels.environment import input_data_config
from penstock.channels.pipe import open_pipe_channel
from penstock.store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    """The store of the channel."""
    return MemoryStore()


@pytest.fixture
def begin(store: MemoryStore, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Begins the channel ``train`` as a run does, and returns the base directory."""
    begun = []

    def begin_it(**fields: Any) -> Path:
        channel = InputChannel(**({"name": "train", "url": "memory://bucket/", "mode": "Pipe"} | fields))
        for folder in ("config", "data"):
            (tmp_path / "input" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "input" / "config" / "inputdataconfig.json").write_text(json.dumps(input_data_config([channel])))
        if channel.mode == "Pipe":
            entries = Entries(open_source(channel, lambda _: store))
            begun.append(open_pipe_channel(channel, entries, path=tmp_path / "input" / "data" / "train"))
        return tmp_path

    yield begin_it
    for channel in begun:
        channel.close()
