"""``penstock pack``, ``convert`` and ``verify`` on directories, in this process."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

import penstock as ps
from penstock.cli.app import app, run
from penstock.pipeline.factories import ConnectionOptions


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the user's cache directory for a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    for number in range(10):
        (root / f"{number:03d}.txt").write_text(f"text {number}")
    return root


def test_pack_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line goes to stderr, after a warning about the size; the second time nothing is written."""
    command = ["pack", f"{source}/", f"{tmp_path}/out/t-%03d.tar", "--bytes-max", "6kB", "--verify"]
    assert run(command) == 0
    out, errors = capsys.readouterr()
    assert out == ""
    assert "are usual" in errors
    assert "10 samples in 3 shards, 3 verified, 13 KiB" in errors
    assert run(command) == 0
    assert "10 samples in 3 shards (3 were there)" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["t-000.tar", "t-001.tar", "t-002.tar"]


def test_pack_tells_machines(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints one object per line, from the plan to the summary."""
    assert run(["pack", f"{source}/", f"{tmp_path}/out/", "--samples-max", "4", "--json", "--verify"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"action": "begin", "shards": 3, "samples": 10, "source_bytes": 60}
    assert sorted(line["action"] for line in lines[1:-1]) == ["packed"] * 3 + ["verified"] * 3
    assert lines[-1]["samples"] == 10
    assert lines[-1]["shards_written"] == 3


def test_stdout_is_for_machines_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--json``, output of a transform or of Ray goes to stderr, and every line of stdout is JSON."""
    (tmp_path / "talking.py").write_text("def talk(sample):\n    print('(raylet) hello')\n    return sample\n")
    monkeypatch.chdir(tmp_path)
    assert run(["pack", f"{source}/", f"{tmp_path}/out/", "--json", "--transform", "talking:talk"]) == 0
    out, errors = capsys.readouterr()
    assert [json.loads(line)["action"] for line in out.splitlines()] == ["begin", "packed", "summary"]
    assert errors.count("(raylet) hello") == 10


def test_splits_may_be_folders_of_the_destination(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``DST/{split}/x-%03d.tar`` is a pattern of names below DST; without a number it is refused."""
    command = ["pack", f"{source}/", f"{tmp_path}/out/{{split}}/x-%03d.tar", "--split", "train=0.5,val=0.5"]
    assert run(command) == 0
    assert sorted(path.parent.name for path in (tmp_path / "out").rglob("x-000.tar")) == ["train", "val"]
    assert run(["pack", f"{source}/", f"{tmp_path}/new/{{split}}/", "--split", "train=0.5,val=0.5"]) == 2
    assert "has {split} but no number" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints shards with samples and sizes, for people and machines, and writes nothing."""
    command = ["pack", f"{source}/", f"{tmp_path}/out/", "--split", "train=0.5,val=0.5", "--dry-run"]
    assert run(command) == 0
    out, errors = capsys.readouterr()
    assert "train-000000.tar" in out
    assert "10 samples in 2 tar shards" in errors
    assert run([*command, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["planned", "planned", "plan"]
    assert lines[-1]["samples"] == 10
    assert not (tmp_path / "out").exists()


def test_a_transform_by_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``module:function`` is found in the working directory; an unknown name is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shouting.py").write_text("def shout(sample):\n    return {'txt': sample['txt'].upper()}\n")
    assert run(["pack", f"{source}/", f"{tmp_path}/out/", "--transform", "shouting:shout"]) == 0
    assert b"TEXT 3" in (tmp_path / "out/shard-000000.tar").read_bytes()
    assert run(["pack", f"{source}/", f"{tmp_path}/out2/", "--transform", "shouting:whisper"]) == 2
    assert "does not name a function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard-size", "many"], "not a size"),
        (["--split", "half"], "NAME=SHARE"),
        (["--jobs", "0"], "at least 1"),
        (["--group-by", "x"], "'stem' or 'file'"),
        (["--name", "a"], "exactly one number"),
        (["--append", "--overwrite"], "exclude each other"),
        (["--memory-bytes-max", "1MB"], "at least"),
    ],
)
def test_options_that_cannot_be(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Invalid options give one line on stderr and exit code 1, and write nothing."""
    assert run(["pack", f"{source}/", f"{tmp_path}/out/", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convert_refuses_a_loss(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss is refused by name, and allowed on request; ``--losses`` prints the table."""
    run(["pack", f"{source}/", f"{tmp_path}/tars/"])
    command = ["convert", f"{tmp_path}/tars/", f"{tmp_path}/out/", "--to", "tfrecord"]
    assert run(command) == 2
    assert "would lose the samples' keys" in capsys.readouterr().err
    assert run([*command, "--allow-loss", "--verify"]) == 0
    assert "10 samples in 1 shard, 1 verified" in capsys.readouterr().err
    assert run([*command, "--key-field", "key", "--overwrite"]) == 0
    capsys.readouterr()
    assert run(["convert", "--losses"]) == 0
    assert "| tar | keeps all |" in capsys.readouterr().out


def test_convert_cuts_anew(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--shard-size`` joins shards; ``--dry-run`` prints the sources of each shard and writes nothing."""
    run(["pack", f"{source}/", f"{tmp_path}/tars/", "--shard-samples", "2"])
    command = ["convert", f"{tmp_path}/tars/", f"{tmp_path}/out/x-%03d.tar.gz", "--to", "tar.gz", "--shard-size", "7kB"]
    capsys.readouterr()
    assert run([*command, "--dry-run", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["planned", "planned", "planned", "plan"]
    assert [len(line["sources"]) for line in lines[:-1]] == [2, 3, 2]
    assert run([*command, "--dry-run"]) == 0
    assert "2 sources" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert run([*command, "--verify"]) == 0
    assert "10 samples in 3 shards, 3 verified" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--executor", "slurm"], ["--address", "auto"]])
def test_executors_that_are_none(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    """An unknown executor, and an address without Ray, are refused before anything is written."""
    assert run(["pack", f"{source}/", f"{tmp_path}/out/", *option]) == 2
    assert "ray" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_says_what_is_wrong(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0 if all shards are right, otherwise 1 with a line per shard, also for machines."""
    run(["pack", f"{source}/", f"{tmp_path}/out/", "--shard-samples", "4"])
    capsys.readouterr()
    assert run(["verify", f"{tmp_path}/out/"]) == 0
    assert "10 samples in 3 shards verified" in capsys.readouterr().err
    (tmp_path / "out/shard-000001.tar").unlink()
    assert run(["verify", f"{tmp_path}/out/"]) == 1
    assert "1 failed" in capsys.readouterr().err
    assert run(["verify", f"{tmp_path}/out/", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["verified", "verified", "failed", "summary"]
    assert lines[2]["error"] == "ObjectMissingError"


def test_verify_says_what_it_could_not_check(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 3 if only lengths were checked, with reason and hint; machines get the action ``unchecked``."""
    run(["pack", f"{source}/", f"{tmp_path}/out/", "--shard-samples", "4"])
    shutil.rmtree(tmp_path / "out/.penstock")
    with ps.Loader(ps.shards(f"{tmp_path}/out/").batch(2)) as loader:
        assert sum(1 for _ in loader)
    capsys.readouterr()
    assert run(["verify", f"{tmp_path}/out/"]) == 3
    said = capsys.readouterr().err
    assert "0 samples in 0 shards verified, 3 not verified" in said
    assert "only the number and lengths of its samples were checked, because its index has no checksums" in said
    assert "penstock index --again --ignore-idx" in said
    assert run(["verify", f"{tmp_path}/out/", "--json"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["unchecked", "unchecked", "unchecked", "summary"]
    assert (lines[-1]["failed"], lines[-1]["unchecked"]) == (0, 3)
    assert run(["index", f"{tmp_path}/out/", "--again", "--ignore-idx"]) == 0
    assert run(["verify", f"{tmp_path}/out/"]) == 0


@pytest.mark.parametrize("name", ["pack", "convert"])
def test_options_are_called_as_arguments_are(name: str) -> None:
    """Every option has the name of the function's argument; former names work too."""
    parameters = set(inspect.signature(getattr(ps.pack, name, ps.pack)).parameters)
    command: Any = typer.main.get_command(app).commands[name]
    names = {option.name: option.opts for option in command.params}
    others = {"as_json", "dry_run", "losses", "source_format", "skip_corrupt", "retry_s"}
    others |= {"tokens", "tokenizer", "field", "separator", "dtype"}  # those of Pipeline.token_blocks
    assert set(names) - others <= parameters | set(ConnectionOptions.__annotations__)
    assert parameters - set(names) == {"listener", "connection"}
    assert names["bytes_max"] == ["--bytes-max", "--shard-size"]
    assert names["memory_bytes_max"] == ["--memory-bytes-max", "--memory"]


def test_a_directory_may_be_called_like_a_shard(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``out.tar`` with shards in it is a folder, also without a slash."""
    assert run(["pack", f"{source}/", f"{tmp_path}/out.tar"]) == 0
    assert run(["verify", f"{tmp_path}/out.tar"]) == 0
    assert "10 samples in 1 shard verified" in capsys.readouterr().err
