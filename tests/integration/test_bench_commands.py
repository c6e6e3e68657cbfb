"""``penstock bench`` as a process, against real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock as ps
from penstock.bench.origin.server import MODULE

if TYPE_CHECKING:
    from penstock.testing.ministack import Ministack

pytestmark = pytest.mark.server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "bench", *arguments]


@pytest.mark.skipif(not MODULE.exists(), reason="nginx has no Lua")
def test_the_origin_serves_until_ctrl_c(tmp_path: Path) -> None:
    """``bench origin`` says where it serves, delays its answers, logs them, and ends on Ctrl-C without an error."""
    (tmp_path / "data/bucket").mkdir(parents=True)
    (tmp_path / "data/bucket/key").write_bytes(b"0123456789")
    log = tmp_path / "log"
    options = ["--ttfb-ms", "40", "--rate", "10MB", "--log", str(log)]
    process = subprocess.Popen(
        command("origin", str(tmp_path / "data"), *options), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        with ps.connect("s3://bucket/", endpoint_url=url[0], anonymous=True) as store:
            assert bytes(store.read("key").data) == b"0123456789"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0, process.stderr.read()
        process.stderr.close()
    finally:
        process.kill()
        process.wait()
    assert "GET 20" in log.read_text()


def test_without_nginx_the_origin_says_what_to_install(tmp_path: Path) -> None:
    """Where nginx is missing, ``bench origin`` is a usage error that names the packages."""
    code = (
        "import penstock.bench.origin.server as s; s.MODULE = s.Path('/nowhere'); from penstock.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "origin", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "apt-get install nginx libnginx-mod-http-lua" in done.stderr


def records(folder: Path) -> dict[str, list[dict[str, object]]]:
    """The lines of each part's record, by the names of the folders."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*/record.jsonl"))
    }


@pytest.mark.skipif(not MODULE.exists(), reason="nginx has no Lua")
def test_a_scenario_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C keeps what was measured; the same command measures the rest, with requests, and nothing twice."""
    folder = tmp_path / "out"
    line = command(
        "run", "--scenario", "minio", "--scale", "0.002", "--clients", "MinIO", "--seconds", "10", "--out", str(folder)
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    first = folder / "one-object-for-each-sample" / "record.jsonl"
    deadline_s = time.monotonic() + 60
    while not (first.exists() and '"turn"' in first.read_text()) and time.monotonic() < deadline_s:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130, (tmp_path / "log").read_text()
    assert "goes on" in (tmp_path / "log").read_text()
    before = records(folder)
    assert "end" not in [each["kind"] for each in before["one-object-for-each-sample"]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == (find_spec("minio") is None), done.stderr  # the only client of this run
    after = records(folder)
    assert (
        after["one-object-for-each-sample"][: len(before["one-object-for-each-sample"])]
        == before["one-object-for-each-sample"]
    )
    assert len(after) == 3
    for lines in after.values():
        turns = [(each["name"], each["round"], str(each["settings"])) for each in lines if each["kind"] == "turn"]
        assert len(turns) == len(set(turns)) >= 2
        assert lines[-1]["kind"] == "end"
    (turn,) = [each for each in after["packed"] if each["kind"] == "turn"][:1]
    assert isinstance(turn["requests"], dict)
    assert turn["requests"]["GET"] >= 1  # the data is one shard, which a turn may read once
    assert "one object for each sample: s3://bench/objects-140/" in done.stdout
    assert "first byte after 3" in done.stdout
    assert (folder / "report.html").exists()


def test_a_scenario_keeps_its_settings() -> None:
    """Settings beside a scenario's own, an unknown scenario and a sweep without scratch are errors that say what to do."""
    for words, message in {
        ("--scenario", "minio", "--batch", "3"): "a scenario has its own settings",
        ("--scenario", "mino"): "did you mean 'minio'?",
        ("s3://b/", "--sweep", "shard_bytes=1MB"): "--scratch s3://bucket/folder/",
        ("s3://b/", "--sweep", "thread=1"): "a sweep of 'thread' is not known",
        (): "bench run needs a URL or --scenario",
    }.items():
        done = subprocess.run(command("run", *words), capture_output=True, text=True, timeout=60)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


PIPELINES = """
import penstock as ps
def good():
    return ps.shards("s3://own/train/").map(lambda sample: {"twice": sample["jpg"] * 2}).batch(8)
def bad():
    raise ValueError("no such day\\nsecond line")
"""


def test_the_users_pipeline(ministack: Ministack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline is read in place of the fields, others say why not, and one that raises is a row in one line."""
    ministack.create_bucket("own")
    (tmp_path / "mine.py").write_text(PIPELINES)
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    with ps.pack.writer("s3://own/train/%06d.tar") as writer:
        for number in range(64):
            writer.write({"__key__": f"{number:03d}", "jpg": bytes([number]) * 500, "cls": str(number)})
    for name in ("good", "bad"):
        line = command("run", "s3://own/train/", "--pipeline", f"mine:{name}", "--seconds", "6", "--out", name)
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == (name == "bad"), done.stderr
        lines = [json.loads(each) for each in (tmp_path / name / "record.jsonl").read_text().splitlines()]
        reasons = {each["name"]: each["reason"] for each in lines if each["kind"] == "not run"}
        assert reasons["connector names on penstock"] == "reads its own pipeline"
        turns = [each for each in lines if each["kind"] == "turn" and each["name"] == "penstock"]
        if name == "good":
            assert turns[0]["bytes"] == 1000 * turns[0]["samples"] > 0
            assert turns[0]["fetched_bytes"] > 0
        else:
            assert not turns
            assert reasons["penstock"] == "failed: penstock: ValueError: no such day"
