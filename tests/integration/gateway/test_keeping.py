"""``penstock gateway ls`` and ``gc``: what is kept of results, and what is removed of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run
from penstock.gateway.results.derived import UPLOADS_PREFIX

pytestmark = [pytest.mark.server, pytest.mark.heavy]

Command = Callable[..., list[dict[str, Any]]]
FLAGS = (
    "--upstream",
    "data",
    "--name",
    "made",
    "--transform",
    "gzip",
    "--cache",
    "cache:200MB",
    "--results",
    "derived",
)
DAY_S = 86400


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four sources, and an empty folder for results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "derived").mkdir()
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number} ä.txt").write_bytes(os.urandom(10_000 + number))
    return tmp_path


@pytest.fixture
def folder(sources: Path) -> Path:
    """The same with all results, in the cache and in the bucket."""
    assert run(["gateway", "fill", *FLAGS, "--jobs", "1"]) == 0
    return sources


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command with ``--json``, and returns its lines."""
    capsys.readouterr()

    def call(name: str, *arguments: str) -> list[dict[str, Any]]:
        assert run(["gateway", name, *arguments, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def kept(command: Command) -> set[tuple[str, str]]:
    return {(line["place"], line["key"]) for line in command("ls", *FLAGS)}


ALL = {(place, f"{number} ä.txt") for place in ("cache", "results") for number in range(4)}


def test_what_is_kept(command: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both places list each result with its access point, transform, size and age, under one ETag; by the places alone too."""
    lines = command("ls", *FLAGS)
    assert {(line["place"], line["key"]) for line in lines} == ALL
    assert {(*line["points"], line["transform"], line["complete"]) for line in lines} == {("made", "gzip", True)}
    assert all(line["age_s"] < 600 and line["size_bytes"] > 10_000 for line in lines)
    assert len({line["etag"] for line in lines}) == 4
    bare = command("ls", "--results", "derived", "--place", "results")
    assert [line["etag"] for line in bare] == [line["etag"] for line in lines if line["place"] == "results"]
    assert not any(line["points"] for line in bare)
    assert run(["gateway", "ls", *FLAGS]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 8
    assert "8 results" in shown.err


def test_what_nobody_asks_for_is_removed(command: Command, folder: Path) -> None:
    """Results of replaced and removed sources are removed, only with --remove; the others are served as before."""
    assert command("gc", *FLAGS, "--remove") == []
    (folder / "data" / "0 ä.txt").unlink()
    (folder / "data" / "1 ä.txt").write_bytes(b"other bytes")
    shown = command("gc", *FLAGS)
    assert {line["action"] for line in shown} == {"would-remove"}
    assert kept(command) == ALL
    removed = command("gc", *FLAGS, "--remove")
    assert {(line["key"], line["reason"]) for line in removed} == {
        ("0 ä.txt", "its source is gone"),
        ("1 ä.txt", "its source or its transform has changed"),
    }
    assert kept(command) == {each for each in ALL if each[1][0] in "23"}
    assert len([path for path in (folder / "derived").rglob("*") if path.is_file()]) == 4
    again = command("fill", *FLAGS, "--into", "both")
    assert {line["key"]: line["action"] for line in again if "key" in line} == {
        "1 ä.txt": "made", "2 ä.txt": "present", "3 ä.txt": "present",
    }  # fmt: skip


def test_another_version_of_the_transform(command: Command) -> None:
    """With another version tag all results are out of date; with another transform they belong to somebody else."""
    newer = command("gc", *FLAGS, "--version-tag", "2")
    assert {(line["place"], line["key"]) for line in newer} == ALL
    other = [*FLAGS]
    other[other.index("gzip")] = "zstd"
    assert command("gc", *other) == []


def test_an_upstream_that_lists_nothing(command: Command, folder: Path) -> None:
    """If no source is left at all, that is taken for a mistake, and nothing is removed."""
    for path in (folder / "data").iterdir():
        path.unlink()
    assert command("gc", *FLAGS, "--remove") == []
    assert kept(command) == ALL


def test_old_results_and_too_many(command: Command, folder: Path) -> None:
    """Results beyond an age or a number of bytes are removed, the oldest first."""
    for age_days, path in enumerate(sorted((folder / "derived").rglob("*.json"))):
        os.utime(path, times=(time.time() - age_days * DAY_S,) * 2)
    old = command("gc", *FLAGS, "--older-than", "36h", "--place", "results")
    assert len(old) == 2
    assert min(line["age_s"] for line in old) > 1.9 * DAY_S
    many = command("gc", *FLAGS, "--bytes-max", "25000", "--place", "results", "--remove")
    assert {line["etag"] for line in many} == {line["etag"] for line in old}
    assert len(kept(command)) == 6


def test_leftovers(command: Command, folder: Path) -> None:
    """Bytes without a record and notes about uploads are removed once they are old enough."""
    (folder / "derived" / UPLOADS_PREFIX).mkdir()
    (folder / "derived" / UPLOADS_PREFIX / f"{'0' * 32}-run").write_text(json.dumps(["00/x", "1234"]))
    next(iter((folder / "derived").rglob("*.json"))).unlink()
    assert command("gc", *FLAGS) == []
    found = command("gc", *FLAGS, "--leftovers-after", "0s", "--remove")
    assert [line["reason"] for line in found] == ["a leftover"] * 2
    assert len([path for path in (folder / "derived").rglob("*") if path.is_file()]) == 6


REFUSED = {
    "place": (["ls", *FLAGS, "--place", "disk"], "must be one of cache, results"),
    "no-bucket": (["ls", "--cache", "cache:1GB", "--place", "results"], "there is no bucket of results"),
    "transform": (["gc", "--transform", "gzip"], "without --upstream"),
    "time": (["gc", *FLAGS, "--older-than", "soon"], "is not a duration"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that make no sense are told."""
    arguments, message = REFUSED[case]
    assert run(["gateway", *arguments]) == 2
    assert message in capsys.readouterr().err
