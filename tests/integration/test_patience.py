"""A store is killed and comes back while everything uses it: nothing is lost, nothing is wrong, and nothing ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration import patience_scenario
from loading import shard
from mounting import HAS_FUSE
from servers.gateway import Gateway, wait_until
from servers.restarting import RestartingStore

pytestmark = pytest.mark.server

SCENARIOS = ["threads", "processes", "dataloader", "workers", *(["mount"] if HAS_FUSE else []), "save", "pipe", "cp"]
SECONDS = [5, pytest.param(30, marks=pytest.mark.heavy), pytest.param(90, marks=pytest.mark.heavy)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RestartingStore]:
    with RestartingStore(tmp_path) as running:
        for name in ("data", "files"):
            (running.bucket / name).mkdir()
        count = patience_scenario.SAMPLES // patience_scenario.SHARDS
        for index in range(patience_scenario.SHARDS):
            numbers = range(index * count, (index + 1) * count)
            samples = [
                {"__key__": f"{each}", "cls": str(each), "bin": patience_scenario.content(10_000 + each)}
                for each in numbers
            ]
            (running.bucket / "data" / f"s-{index:03d}.tar").write_bytes(shard(samples))
        for number in range(patience_scenario.FILES):
            (running.bucket / "files" / f"{number:03d}").write_bytes(patience_scenario.content(number))
        yield running


class Scenario:
    """A process that runs one of ``patience_scenario``'s functions."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir()
        tests = str(Path(patience_scenario.__file__).parent.parent)
        with (self._folder / "stdout").open("wb") as stdout, (self._folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, patience_scenario.__file__, name],
                cwd=self._folder,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])},
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
            )

    @property
    def errors(self) -> str:
        return (self._folder / "stderr").read_text()

    def wait_until_said(self, word: str) -> None:
        wait_until(lambda: word in (self._folder / "stdout").read_text() or self.process.poll() is not None)
        assert word in (self._folder / "stdout").read_text(), f"{self.name}: {self.errors}"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", SECONDS)
def test_what_uses_a_store_waits_until_it_is_back(store: RestartingStore, tmp_path: Path, seconds: int) -> None:
    """Loaders, workers, a mount, saves, a pipe, a copy and a gateway, all at once, and one outage."""
    with ExitStack() as stack:
        upstream = ["--upstream", "s3://bucket", "--name", "upstream", "--port", "0", "--cache", ""]
        (tmp_path / "gateway").mkdir()
        front = Gateway(*upstream, folder=tmp_path / "gateway", environment=store.environment | store.keys)
        stack.callback(front.kill)
        running = []
        for name in (*SCENARIOS, "client"):
            there = store.environment | ({"AWS_ENDPOINT_URL": front.url} if name == "client" else {})
            running.append(Scenario(name, tmp_path, there))
            stack.callback(running[-1].kill)
        for each in running:
            each.wait_until_said("ready")
        store.fail(seconds)
        for each in running:
            each.go_on()
        failed = {each.name: each.errors for each in running if each.process.wait(250)}
        assert not failed, "\n".join(f"{name}: {errors}" for name, errors in failed.items())
        for each in running:
            each.wait_until_said("done")


@pytest.mark.heavy
def test_a_client_of_a_gateway_hears_503_until_its_upstream_is_back(store: RestartingStore, tmp_path: Path) -> None:
    """The gateway waits for less time than its clients do, and says when to ask again."""
    (tmp_path / "gateway").mkdir()
    where = ["--upstream", "s3://bucket", "--name", "upstream", "--port", "0", "--cache", ""]
    front = Gateway(*where, folder=tmp_path / "gateway", environment=store.environment)
    try:
        assert front.get("/upstream/files/000") == patience_scenario.content(0)
        store.fail(25)
        with pytest.raises(urllib.error.HTTPError) as caught:
            front.get("/upstream/files/001")
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (503, "5")
        caught.value.close()
        store.wait_back()
        assert front.get("/upstream/files/001") == patience_scenario.content(1)
    finally:
        front.kill()


@pytest.mark.parametrize("name", ["read", "epochs", "command"])
def test_ctrl_c_ends_the_wait(store: RestartingStore, tmp_path: Path, name: str) -> None:
    """A program or command that waits for a store that is down ends within a second."""
    scenario = Scenario(name, tmp_path, store.environment)
    try:
        scenario.wait_until_said("ready")
        store.fail(3600)
        scenario.go_on()
        wait_until(lambda: "does not answer" in scenario.errors or scenario.process.poll() is not None)
        began_s = time.monotonic()
        scenario.process.send_signal(signal.SIGINT)
        code = scenario.process.wait(10)
        took_s = time.monotonic() - began_s
    finally:
        scenario.kill()
    assert code in (130, -signal.SIGINT), scenario.errors
    assert took_s < 1, scenario.errors
