"""``penstock checkpoint`` on directories, in this process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from penstock.checkpoints import CheckpointFile, Checkpoints, CheckpointSave, layout, step_directory
from penstock.checksums.crc32c import crc32c
from penstock.cli.app import run


def save(url: Path, *steps: int) -> None:
    """Write a checkpoint of one file for each step."""
    with Checkpoints(url) as run:
        for step in steps:
            directory, data = step_directory(step), os.urandom(1000)
            with CheckpointSave(run.store, directory, world_size=2) as saving:
                name = layout.data_name(saving.save_id, rank=0, index=0)
                run.store.write(directory + name, data)
                saving.commit(b"metadata", [CheckpointFile(name=name, size_bytes=len(data), crc32c=crc32c(data))])


def data_file(url: Path, step: int) -> Path:
    return next((url / step_directory(step)).glob("*.distcp"))


def steps_of(url: Path) -> list[int]:
    with Checkpoints(url) as run:
        return run.steps()


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A run with the checkpoints of four steps, of which 30 is cut short and 40 was never committed."""
    save(tmp_path / "run", 10, 20, 30, 40)
    with data_file(tmp_path / "run", 30).open("r+b") as file:
        file.truncate(999)
    (tmp_path / "run" / step_directory(40) / ".metadata").unlink()
    return tmp_path / "run"


def test_ls_tells_what_can_be_restored(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each checkpoint has a line with its status, as text and as JSON, and what is wrong with it is on stderr."""
    assert run(["checkpoint", "ls", f"{url}/"]) == 0
    said = capsys.readouterr()
    assert [line.split()[:2] for line in said.out.splitlines()] == [
        ["10", "whole"], ["20", "whole"], ["30", "damaged"], ["40", "unfinished"],
    ]  # fmt: skip
    assert "2 ranks" in said.out
    assert data_file(url, 30).name in said.err
    assert run(["checkpoint", "ls", "--json", f"{url}/"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["status"], row["world_size"]) for row in rows[:3]] == [
        (10, "whole", 2), (20, "whole", 2), (30, "damaged", 2),
    ]  # fmt: skip
    assert rows[0]["size_bytes"] == 1000 + len(b"metadata")


def test_ls_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL without a whole checkpoint is exit code 1 and one line."""
    assert run(["checkpoint", "ls", f"{tmp_path}/nothing/"]) == 1
    assert "there is no checkpoint that is whole" in capsys.readouterr().err


def test_verify_reads_the_newest(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a step, the newest whole checkpoint is read; a flipped byte is found and named, and sizes do not show it."""
    assert run(["checkpoint", "verify", "--json", f"{url}/"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["action"], row["step"], row["read_bytes"]) == ("verified", 20, 1000)
    file = data_file(url, 20)
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)
    assert run(["checkpoint", "verify", "--sizes-only", f"{url}/"]) == 0
    assert run(["checkpoint", "verify", f"{url}/"]) == 1
    said = capsys.readouterr()
    assert "step 20: failed" in said.out
    assert file.name in said.err


def test_verify_all(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--all looks at every committed checkpoint, goes on after a damaged one, and fails in the end."""
    assert run(["checkpoint", "verify", "--all", "--json", f"{url}/"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["action"]) for row in rows] == [(10, "verified"), (20, "verified"), (30, "failed")]
    assert run(["checkpoint", "verify", "--step", "10", "--step", "11", f"{url}/"]) == 1
    assert "there is no checkpoint of step 11" in capsys.readouterr().err


def test_what_another_program_wrote_is_unchecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A committed checkpoint without a manifest can be listed, and verifying it is exit code 3."""
    folder = tmp_path / "run" / step_directory(5)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).write_bytes(b"data")
    assert run(["checkpoint", "ls", f"{tmp_path}/run/"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["5", "unchecked"]
    assert run(["checkpoint", "verify", f"{tmp_path}/run/"]) == 3
    assert "unchecked" in capsys.readouterr().out


def test_rm_of_steps(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the named steps go; a step that does not exist is an error before anything is removed."""
    assert run(["checkpoint", "rm", "--yes", "--step", "10", "--step", "11", f"{url}/"]) == 1
    assert "step 11" in capsys.readouterr().err
    assert steps_of(url) == [10, 20, 30, 40]
    assert run(["checkpoint", "rm", "--yes", "--json", "--step", "10", "--step", "30", f"{url}/"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [{"action": "removed", "step": 30}, {"action": "removed", "step": 10}]
    assert steps_of(url) == [20, 40]


def test_rm_of_later_steps(url: Path) -> None:
    """--after leaves a run at an earlier step, the newest from then on."""
    assert run(["checkpoint", "rm", "--yes", "--after", "10", f"{url}/"]) == 0
    assert steps_of(url) == [10]
    assert run(["checkpoint", "rm", "--yes", "--after", "10", f"{url}/"]) == 1


def test_rm_by_retention(url: Path) -> None:
    """--keep-last counts whole checkpoints only, and keeps what is newer than they are."""
    save(url, 25)
    assert run(["checkpoint", "rm", "--yes", "--keep-last", "1", "--keep-every", "10", f"{url}/"]) == 0
    assert steps_of(url) == [10, 20, 25, 30, 40]
    assert run(["checkpoint", "rm", "--yes", "--keep-last", "1", f"{url}/"]) == 0
    assert steps_of(url) == [25, 30, 40]


def test_rm_of_debris(url: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--debris removes nothing of a committed checkpoint."""
    assert run(["checkpoint", "rm", "--yes", "--debris", f"{url}/"]) == 0
    assert "nothing to remove" in capsys.readouterr().err
    assert steps_of(url) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --step"),
        (["--step", "10", "--debris"], "exactly one of --step"),
        (["--keep-every", "2"], "--keep-every needs --keep-last. Hint: --keep-last 3"),
        (["--step", "10", "--keep-every", "2"], "--keep-every needs --keep-last"),
    ],
)
def test_rm_must_be_told_what(
    url: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No way, or two ways, to name what goes is an error, and nothing is removed."""
    assert run(["checkpoint", "rm", "--yes", *arguments, f"{url}/"]) == 2
    assert message in capsys.readouterr().err
    assert steps_of(url) == [10, 20, 30, 40]


def test_rm_asks(url: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal --yes is needed; on one, the answer counts, and the question says that the newest would go."""
    assert run(["checkpoint", "rm", "--step", "20", f"{url}/"]) == 2
    assert "--yes" in capsys.readouterr().err
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "r") as stdin, os.fdopen(controller, "wb", buffering=0) as keyboard:
        monkeypatch.setattr(sys, "stdin", stdin)
        for answer, code, left in ((b"n\n", 1, [10, 20, 30, 40]), (b"y\n", 0, [10, 30, 40])):
            keyboard.write(answer)
            assert run(["checkpoint", "rm", "--step", "20", f"{url}/"]) == code
            assert "the newest that is whole" in capsys.readouterr().err
            assert steps_of(url) == left
