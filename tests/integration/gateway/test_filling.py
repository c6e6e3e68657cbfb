"""``penstock gateway fill``: results that are made ahead are those that a gateway looks up."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loading import counted
from loading import shard as packed
from penstock.cli.app import run
from servers.gateway import WAIT_S, Gateway, wait_until

pytestmark = [pytest.mark.server, pytest.mark.heavy]

RUNS = 'penstock_gateway_result_runs_total{access_point="made",outcome="ok"}'
COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources in ``data``, and an empty folder for results."""
    (tmp_path / "derived").mkdir()
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for number in range(COUNT):
        name = f"deep/{number:02d}.bin" if number % 2 else f"{number:02d} ä.txt"
        (tmp_path / "data" / name).write_bytes(b"%d " % number * 50_000)
    (tmp_path / "data" / ".penstock").mkdir()
    (tmp_path / "data" / ".penstock" / "penstock.index").write_bytes(b"{}")
    return tmp_path


BASE = ("--upstream", "data", "--name", "made", "--transform", "gzip")
HERE = ("--cache", "cache:200MB")
RESULTS = (*HERE, "--results", "derived")


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "penstock", "gateway", "fill", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fill(folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run the command with ``--json``, and return its lines."""
    with begin(folder, *arguments, "--json") as process:
        out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, errors
    assert not errors
    return [json.loads(line) for line in out.splitlines()]


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["key"]: line["action"] for line in lines if "key" in line}


@pytest.fixture
def gateway(folder: Path) -> Iterator[Any]:
    started = []

    def start(*arguments: str) -> Gateway:
        made = Gateway(*BASE, *arguments, "--port", "0", "--processes", "1", folder=folder)
        started.append(made)
        return made

    yield start
    for each in started:
        each.kill()


def sources(folder: Path) -> dict[str, bytes]:
    root = folder / "data"
    files = [path for path in root.rglob("*") if path.is_file() and ".penstock" not in path.parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("where", [HERE, RESULTS], ids=["cache", "results"])
def test_a_gateway_finds_what_was_made(folder: Path, gateway: Any, where: tuple[str, ...]) -> None:
    """All results are made once, under the ETags that a gateway computes, which then runs no transform; again, all exist."""
    lines = fill(folder, *BASE, *where, "--jobs", "2")
    assert outcomes(lines) == dict.fromkeys(sources(folder), "made")
    assert (lines[-1]["made"], lines[-1]["failed"]) == (COUNT, 0)
    etags = {line["key"]: line["etag"] for line in lines if "key" in line}
    started = gateway(*(where if where == HERE else ("--cache", "other:200MB", "--results", "derived")))
    for key, data in sources(folder).items():
        with urllib.request.urlopen(f"{started.url}/made/{urllib.parse.quote(key)}", timeout=WAIT_S) as answer:
            assert (gzip.decompress(answer.read()), answer.headers["ETag"]) == (data, etags[key])
    assert started.metric(RUNS) == 0
    assert outcomes(fill(folder, *BASE, *where)) == dict.fromkeys(sources(folder), "present")


def test_what_is_chosen(folder: Path) -> None:
    """Patterns, prefixes and keys name sources; a manifest does too; what was made into one place is copied to another."""
    chosen = fill(folder, *BASE, *HERE, "--source", "**/*3.bin", "--source", "00 ä.txt", "--source", "deep/03.bin")
    assert outcomes(chosen) == {"deep/03.bin": "made", "00 ä.txt": "made"}
    assert len(outcomes(fill(folder, *BASE, *HERE, "--source", "deep/"))) == COUNT // 2
    copied = outcomes(fill(folder, *BASE, *RESULTS))
    assert copied["deep/03.bin"] == copied["deep/01.bin"] == "copied"
    assert copied["02 ä.txt"] == "made"
    command = [sys.executable, "-m", "penstock", "manifest", "data/deep/", "--output", "list.jsonl"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=WAIT_S)
    named = fill(
        folder, *BASE, "--cache", "other:200MB", "--results", "derived", "--into", "both", "--manifest", "list.jsonl"
    )
    assert set(outcomes(named).items()) == {(key, "copied") for key in sources(folder) if key.startswith("deep/")}


SHARDS = ("--upstream", "shards", "--name", "made", "--transform", "tar2tfrecord", *RESULTS)
INDEXED = 'penstock_gateway_result_runs_total{access_point="made/index",outcome="ok"}'


def test_a_gateway_finds_the_index_that_was_made(folder: Path) -> None:
    """With --index, a gateway with an empty cache serves the index of all results and of each, and makes nothing itself."""
    (folder / "shards" / "deep").mkdir(parents=True)
    for name in ("one.tar", "deep/two.tar"):
        (folder / "shards" / name).write_bytes(packed(counted(range(9))))
    (folder / "shards" / "words.csv").write_text("a,b\n")
    lines = outcomes(fill(folder, *SHARDS, "--source", "**/*.tar"))
    assert set(lines.values()) == {"made"}
    (folder / "shards" / "words.csv").unlink()
    lines = outcomes(fill(folder, *SHARDS, "--index"))
    assert lines == {"one.tar": "present", "deep/two.tar": "present", ".penstock/dataset.index": "made"}
    assert outcomes(fill(folder, *SHARDS, "--index"))[".penstock/dataset.index"] == "present"
    other = tuple("other:200MB" if each == HERE[1] else each for each in SHARDS)
    started = Gateway(*other, "--port", "0", "--processes", "1", folder=folder)
    try:
        for key in ("dataset.index", "shards/one.tar.index", "shards/deep/two.tar.index"):
            with urllib.request.urlopen(f"{started.url}/made/.penstock/{key}", timeout=WAIT_S) as answer:
                assert answer.read()
        assert (started.metric(RUNS), started.metric(INDEXED)) == (0, 0)
    finally:
        started.kill()


def test_what_is_no_shard_has_no_index_to_make(folder: Path) -> None:
    """Results that are not shards are made, and the index is left out."""
    assert outcomes(fill(folder, *BASE, *HERE, "--index"))[".penstock/dataset.index"] == "left-out"


def test_failures_do_not_stop_the_others(folder: Path) -> None:
    """Each failure is told with its key and the author's line; the exit code is 1, and the others are made."""
    (folder / "mine.py").write_text(
        "def half(reader, request):\n    data = reader.read()\n    if data.startswith(b'3 '):\n"
        "        raise ValueError('no threes')\n    return data[::2]\n"
    )
    base = ("--upstream", "data", "--name", "made", "--transform", "mine:half", *RESULTS)
    with begin(folder, *base) as process:
        out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert not out
    assert f"{COUNT - 1} results made" in errors
    assert "1 failed" in errors
    assert "failed: made: deep/03.bin: TransformFailed" in errors
    assert "no threes" in errors
    again = fill(folder, *base, code=1)
    assert sorted(outcomes(again).values()) == ["failed", *["present"] * (COUNT - 1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_it_goes_on_later(folder: Path, number: int) -> None:
    """A signal ends it at once and cleanly; the next run makes the rest only, and nothing is left half-stored."""
    (folder / "mine.py").write_text(
        "import pathlib, time\n"
        "def wait(reader, request):\n"
        f"    hold = pathlib.Path({str(folder / 'hold')!r})\n"
        "    while request.key == 'deep/11.bin' and hold.exists():\n"
        "        hold.with_name('waiting').touch()\n"
        "        time.sleep(0.01)\n"
        "    return reader.read()\n"
    )
    (folder / "hold").touch()
    base = ("--upstream", "data", "--name", "made", "--transform", "mine:wait", *RESULTS, "--jobs", "2")
    with begin(folder, *base) as process:
        wait_until(lambda: len(list((folder / "derived").rglob("*.json"))) == COUNT - 1)
        wait_until((folder / "waiting").exists)
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "Traceback" not in errors
    (folder / "hold").unlink()
    assert sorted(outcomes(fill(folder, *base)).values()) == ["made", *["present"] * (COUNT - 1)]
    assert len([path for path in (folder / "derived").rglob("*") if path.is_file()]) == 2 * COUNT


REFUSED = {
    "no-transform": (["--upstream", "data", "--name", "made"], "no access point has a transform"),
    "no-such-point": (["train", *BASE], "there is no access point 'train'"),
    "into": ([*BASE, "--into", "results"], "needs a bucket of results"),
    "no-cache": ([*BASE, "--cache", "none"], "results are made in the cache"),
    "both": ([*BASE, "--manifest", "x", "--source", "y"], "--manifest and --source cannot be combined"),
    "index-of-some": ([*BASE, "--index", "--source", "y"], "--index describes all results"),
    "index-on-ray": ([*BASE, "--index", "--executor", "ray"], "--index is made on one machine"),
    "index-of-sources": ([*BASE, "--index", "--list-sizes", "source", "--processes", "1"], "serves no index"),
    "executor": ([*BASE, "--executor", "threads"], "must be processes or ray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be filled is told before anything starts."""
    arguments, message = REFUSED[case]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    assert run(["gateway", "fill", *arguments]) == 2
    assert message in capsys.readouterr().err
