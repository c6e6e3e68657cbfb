"""``penstock bench run`` on a real server: the record, the page, a run that is stopped and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from loading import shard
from penstock.bench.data import look_at
from penstock.bench.page import PAGE
from penstock.bench.record import FILE, BenchRecord
from penstock.bench.running import BenchOptions, run_benchmark
from penstock.cli.app import run
from servers.faulty import FaultyServer
from servers.gateway import wait_until

pytestmark = pytest.mark.server

PREFIX = "<script>alert(1)<b>"
SAMPLES_COUNT = 400


@pytest.fixture
def url(user: Any, bucket: str, s3_client: Any) -> str:
    """Two shards of small samples, whose keys are hostile to a page."""
    for name in ("a", "b"):
        samples = [
            {"__key__": f"{name}{number:04d}", "bin": bytes(2000), "cls": str(number)}
            for number in range(SAMPLES_COUNT)
        ]
        s3_client.put_object(Bucket=bucket, Key=f"{PREFIX}/{name}.tar", Body=shard(samples))
    return f"s3://{bucket}/{PREFIX}/"


def test_a_run_and_its_page(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the limit and the page are there; the same command adds nothing, and one with another batch is refused."""
    command = ["bench", "run", url, "--seconds", "4", "--out", str(tmp_path), "--batch", "50", "--clients", "penstock"]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert "raw reading" in out
    assert "is the limit" in out or "The limit is not known. penstock delivers" in out  # so little data allows both
    assert f"the page: {tmp_path / PAGE}" in err
    page = (tmp_path / PAGE).read_text()
    assert "&lt;script&gt;alert(1)&lt;b&gt;" in page
    assert "<script" not in page
    record = BenchRecord.load(tmp_path)
    assert {(turn["name"], turn["round"]) for turn in record.turns} >= {
        ("penstock", 0),
        ("penstock", 1),
        ("raw reading", 1),
    }
    again = ["--batch", "50", "--step", "none", "--clients", "penstock", "--seconds", "4"]
    assert record.run["command"] == ["penstock", "bench", "run", url, *again]
    assert record.run["data"]["sample_bytes"] == 2000
    assert record.run["data"]["stored_bytes"] == 512 + 2048 + 512 + 512
    assert run(command) == 0
    assert len(BenchRecord.load(tmp_path).turns) == len(record.turns)
    capsys.readouterr()
    assert run([*command, "--batch", "20"]) == 2
    assert "holds a run with another batch" in capsys.readouterr().err
    (tmp_path / PAGE).unlink()
    assert run(["bench", "report", str(tmp_path), f"{tmp_path}/"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / PAGE}\n"


def test_a_run_that_is_stopped(url: str, tmp_path: Path) -> None:
    """Ctrl-C leaves a page of what was measured, and the same command goes on there."""
    command = [sys.executable, "-m", "penstock", "bench", "run", url, "--seconds", "20", "--out", str(tmp_path)]
    command += ["--batch", "1", "--step", "python", "--clients", "penstock"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def has_turn() -> bool:
        path = tmp_path / FILE
        return path.exists() and '"kind": "turn"' in path.read_text()  # the last line may not be complete

    wait_until(has_turn)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=80)
    assert process.returncode == 130
    assert "goes on" in err
    assert "raw reading" in out
    assert "stopped before the end" in (tmp_path / PAGE).read_text()
    assert not BenchRecord.load(tmp_path).is_complete


def test_a_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a record is wrong usage."""
    assert run(["bench", "report", str(tmp_path)]) == 2
    assert "has no record.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("percent_max", "alive"), [(100, [0, 1, 2, 1]), (0, [0, 0, 0, 0])])
def test_clients_end_after_their_last_turn(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent_max: int, alive: list[int]
) -> None:
    """Processes stay for the turns that they still have, unless memory is short; then they start again."""
    monkeypatch.setattr("penstock.bench.running.MEMORY_PERCENT_MAX", percent_max)
    monkeypatch.setattr("penstock.bench.running.CORES", 1)  # as many start side by side
    found = []

    def progress(*_: object) -> None:
        lines = [" ".join(child.cmdline()) for child in psutil.Process().children()]
        found.append(sum("penstock.bench.clients" in line for line in lines))

    record = BenchRecord(tmp_path / FILE)
    data = look_at(url, {})
    run_benchmark(data, BenchOptions(clients=["penstock"], seconds=60), record, progress, url=url, part="")
    assert len(record.turns) == 4
    assert found == alive


def test_public_data(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--anonymous`` reads without credentials, of which there are none; tests of all clients are in make test-bench."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    faulty.objects["x/a.tar"] = shard([{"__key__": str(number), "bin": bytes(500)} for number in range(50)])
    command = ["bench", "run", f"{faulty.url}/x/", "--endpoint-url", faulty.endpoint_url, "--anonymous"]
    assert run([*command, "--seconds", "1", "--out", str(tmp_path), "--clients", "penstock"]) == 0
    assert {turn["name"] for turn in BenchRecord.load(tmp_path).turns} >= {"penstock", "raw reading"}


INTERRUPTED = """
import signal, sys, threading
from penstock.bench.process import ClientProcess
start = threading.Timer.start
def interrupted(timer):
    start(timer)
    signal.raise_signal(signal.SIGINT)
threading.Timer.start = interrupted
process = ClientProcess("client", [sys.executable, "-c", "input()"], answer_s_max=600)
try:
    process.ask({})
except KeyboardInterrupt:
    process.close()
    print("closed")
"""


def test_an_interrupt_while_a_client_is_asked() -> None:
    """Ctrl-C at the moment that the clock of an answer starts does not have the process wait for that clock."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
