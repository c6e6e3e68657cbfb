"""``penstock gateway fill --executor ray``: tasks on several nodes make the results that a gateway looks up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.cli.app import run
from penstock.errors import ConfigError
from penstock.gateway import filling
from penstock.gateway.config import AccessPoint, GatewayConfig
from penstock.gateway.filling import Filled, FillOptions, fill, fill_job
from penstock.gateway.results.derived import read_derived
from penstock.store import LocalStore

COUNT = 12

MODULE = """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent
def swap(reader, request):
    data = reader.read()
    if data.startswith(b"7 ") and (HERE / "hold").exists():
        (HERE / f"{os.getppid()}.waiting").touch()
        while (HERE / "hold").exists():
            time.sleep(0.01)
    if data.startswith(b"5 ") and (HERE / "broken").exists():
        raise ValueError("no fives")
    return data.swapcase()
"""


class Heard:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.results: list[Filled] = []
        self.planned_count = 0

    def planned(self, results_count: int, source_bytes: int) -> None:
        self.planned_count = results_count

    def filled(self, result: Filled) -> None:
        self.results.append(result)

    def outcomes(self) -> dict[str, str]:
        return {each.source.key: each.outcome for each in self.results}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GatewayConfig:
    """A gateway of one function; each source is a batch of its own."""
    monkeypatch.setattr(filling, "BATCH_RESULTS_MAX", 1)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MODULE)
    for name in ("data", "derived"):
        (tmp_path / name).mkdir()
    for number in range(COUNT):
        (tmp_path / "data" / f"{number:02d}.txt").write_bytes(b"%d text " % number * 20_000)
    point = AccessPoint(
        name="made", upstream=str(tmp_path / "data"), transform="mine:swap", folder=str(tmp_path / "code")
    )
    return GatewayConfig(access_points=(point,), cache=f"{tmp_path / 'cache'}:500MB", results=str(tmp_path / "derived"))


def derived(tmp_path: Path) -> dict[str, str]:
    """ETags of the results in the bucket by key of their sources."""
    store = LocalStore(tmp_path / "derived")
    try:
        return {each.record.key: each.record.etag for each in read_derived(store).results}
    finally:
        store.close()


def test_the_results_are_those_of_one_machine(cluster: Cluster, config: GatewayConfig, tmp_path: Path) -> None:
    """Tasks on three nodes store all results in the bucket, under the ETags that this machine computes; then all exist."""
    heard = Heard()
    fill(fill_job(config), FillOptions(executor="ray"), heard)
    assert heard.planned_count == COUNT
    assert heard.outcomes() == {f"{number:02d}.txt": "made" for number in range(COUNT)}
    assert derived(tmp_path) == {each.source.key: each.etag for each in heard.results}
    again = Heard()
    fill(fill_job(config), FillOptions(), again)
    assert set(again.outcomes().values()) == {"present"}
    assert {each.etag for each in again.results} == {each.etag for each in heard.results}


def test_a_failure_is_told_and_the_others_are_made(cluster: Cluster, config: GatewayConfig, tmp_path: Path) -> None:
    """The author's line comes back from the machine where it failed; the next run makes only what is missing."""
    (tmp_path / "code" / "broken").touch()
    heard = Heard()
    fill(fill_job(config), FillOptions(executor="ray", jobs=2), heard)
    (failed,) = [each for each in heard.results if each.outcome == "failed"]
    assert failed.source.key == "05.txt"
    assert "no fives" in failed.error
    (tmp_path / "code" / "broken").unlink()
    again = Heard()
    fill(fill_job(config), FillOptions(executor="ray"), again)
    assert [key for key, outcome in again.outcomes().items() if outcome == "made"] == ["05.txt"]


def test_a_node_is_lost_under_way(cluster: Cluster, config: GatewayConfig, tmp_path: Path) -> None:
    """Its batch is begun again elsewhere, and nothing that is stored in part is found."""
    (tmp_path / "code" / "hold").touch()
    heard = Heard()
    thread = threading.Thread(target=fill, args=(fill_job(config), FillOptions(executor="ray"), heard))
    thread.start()
    try:
        while thread.is_alive() and not list((tmp_path / "code").glob("*.waiting")):
            pass
        (path,) = (tmp_path / "code").glob("*.waiting")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGKILL)  # the task's process, as if its machine were lost
    finally:
        (tmp_path / "code" / "hold").unlink()
    thread.join(120)
    assert not thread.is_alive()
    assert set(heard.outcomes().values()) == {"made"}
    assert len(derived(tmp_path)) == COUNT


def test_machines_with_other_code_are_refused(
    cluster: Cluster, config: GatewayConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a machine's transform has another identity, its results would not be found, so the run ends with an error."""
    monkeypatch.setattr(filling.ResultFiller, "identities", lambda _: {"made": "of another version"})
    with pytest.raises(ConfigError, match="another version of the transform of access point 'made'"):
        fill(fill_job(config), FillOptions(executor="ray"), Heard())
    assert not derived(tmp_path)


def test_the_command(
    cluster: Cluster, config: GatewayConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--executor ray --address``, with progress for machines; a cluster that does not answer is an error."""
    data, cache = str(tmp_path / "data"), str(config.cache)
    command = ["gateway", "fill", "--upstream", data, "--name", "made", "--transform", "gzip", "--cache", cache]
    assert run([*command, "--executor", "ray", "--address", cluster.address, "--into", "cache", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[0]["results"], lines[-1]["made"]) == (COUNT, COUNT)
    assert ray.is_initialized()
