"""Channels that are begun at the same time."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.channels.environment import ContainerLayout
from penstock.channels.inputs import InputChannel
from penstock.channels.runner import beginning
from penstock.channels.runner.job import Job
from penstock.errors import ObjectMissingError

WAIT_S_MAX = 30


class Opened:
    """A channel that has begun."""

    def __init__(self, path: Path, closed: list[str]) -> None:
        self.path = path
        self._closed = closed

    def check(self) -> None:
        """Nothing can go wrong."""

    def close(self) -> None:
        self._closed.append(self.path.name)


def begin(tmp_path: Path, names: list[str]) -> list[str]:
    job = Job(command=("true",), channels=tuple(InputChannel(name=name, url="data") for name in names))
    with ExitStack() as stack, beginning.RunStores({}) as stores:
        layout = ContainerLayout(base=tmp_path)
        found = beginning.begin_channels(job, layout, stores, stack=stack, progress=None)
        return [channel.path.name for channel in found]


def test_channels_begin_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three channels begin at the same time, are returned in their order, and are all closed."""
    closed: list[str] = []
    together = threading.Barrier(3, timeout=WAIT_S_MAX)

    def opened(channel: InputChannel, *_: Any, path: Path, **__: Any) -> Opened:
        together.wait()
        return Opened(path, closed)

    monkeypatch.setattr(beginning, "open_channel", opened)
    assert begin(tmp_path, ["c", "a", "b"]) == ["c", "a", "b"]
    assert sorted(closed) == ["a", "b", "c"]


def test_a_failure_gives_the_others_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a channel fails, the store of one that still waits is interrupted, and one that has begun is closed."""
    closed: list[str] = []
    begun = threading.Event()

    def opened(channel: InputChannel, connect: Any, *, path: Path, **_: Any) -> Opened:
        if channel.name == "good":
            begun.set()
            return Opened(path, closed)
        assert begun.wait(WAIT_S_MAX)
        if channel.name == "bad":
            raise ObjectMissingError("nothing there")
        store = connect("memory://b")
        ended = threading.Event()
        interrupt = store.interrupt
        store.interrupt = lambda: (interrupt(), ended.set())
        assert ended.wait(WAIT_S_MAX)
        list(store.list())
        raise AssertionError("the store still answers")

    monkeypatch.setattr(beginning, "open_channel", opened)
    with pytest.raises(ObjectMissingError, match="nothing there"):
        begin(tmp_path, ["slow", "bad", "good"])
    assert closed == ["good"]
