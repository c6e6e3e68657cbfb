"""What all commands share: help, logs, completion, and ways to start them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import commands, run
from penstock.store import Store


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return all commands that do something, by full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name.strip(), command
    for each, child in (inner or {}).items():
        yield from leaves(child, f"{name} {each}")


LEAVES = dict(leaves(commands())) | {"gateway": commands().commands["gateway"]}  # a group that is a command, too


@pytest.fixture
def no_handlers() -> Iterator[None]:
    """Undo the logging that ``-v`` sets up."""
    logger = logging.getLogger("penstock")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)


@pytest.mark.parametrize("name", LEAVES)
def test_help_says_what_each_value_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No option shows its Python type as a value's name, and each command shows an example."""
    monkeypatch.setenv("COLUMNS", "160")
    assert run([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "<" not in text.partition("Options")[2]
    assert f"penstock {name}" in text.partition("For example:")[2]


@pytest.mark.usefixtures("no_handlers")
@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--foo", "penstock"),
        ("bla", "penstock"),
        ("ls gateway --foo", "penstock ls"),
        ("gateway --foo", "penstock gateway"),
        ("-v gateway bla", "penstock gateway"),
        ("gateway try gzip", "penstock gateway try"),
        ("gateway gc --place", "penstock gateway gc"),
    ],
)
def test_usage_errors_name_the_help_of_their_command(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help that is named is the one that has the options of the command, also of a command in a group."""
    assert run(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"(see {command} --help)\n")


@pytest.mark.usefixtures("no_handlers")
@pytest.mark.parametrize("before", [True, False])
def test_verbose_logs_requests(before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``-v`` before or after the command's name logs to stderr, with control characters escaped and without secrets."""
    (tmp_path / "a\x1b[31m").write_bytes(b"x")
    arguments = ["-v", "ls", str(tmp_path)] if before else ["ls", "-v", str(tmp_path)]
    assert run(arguments) == 0
    assert "ListPage" in capsys.readouterr().err
    logging.getLogger("penstock.store").debug("GET https://host/x\x1b?X-Amz-Signature=s3cr3t")
    text = capsys.readouterr().err
    assert "https://host/x\\x1b" in text
    assert "s3cr3t" not in text


def test_a_sandbox_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ministack, one line says how to install it."""
    monkeypatch.setitem(sys.modules, "ministack", None)
    assert run(["sandbox", "true"]) == 2
    assert "pip install 'ministack>=" in capsys.readouterr().err


def penstock(*arguments: str, **changes: str) -> str:
    """Return what ``python -m penstock`` prints."""
    full = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(full, env=os.environ | changes, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_module_is_the_command() -> None:
    """``python -m penstock`` runs ``penstock``."""
    assert penstock("--version").startswith("penstock ")


@pytest.mark.server
def test_shells_complete_commands_and_options() -> None:
    """The completion script is printed, and its requests are answered."""
    asking = [sys.executable, "-m", "penstock", "--show-completion"]  # for the shell that it finds among its parents
    shell = ["bash", "-c", '"$@"; exit $?', "bash", *asking]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=True)
    assert "_PENSTOCK_COMPLETE" in done.stdout
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock c", "COMP_CWORD": "1"}
    assert {"cat", "cp", "convert"} <= set(penstock(**asked).split())
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock ls --rec", "COMP_CWORD": "2"}
    assert penstock(**asked).split() == ["--recursive"]


@pytest.mark.server
def test_shells_complete_values_buckets_and_keys(s3_endpoint: Any, s3_store: Store, bucket: str) -> None:
    """Values of options, buckets, keys and folders are offered; bash splits URLs at the colon, and wants what follows it."""
    for key in ("train/a.tar", "train/b.tar", "trial.txt"):
        s3_store.write(key, b"x")

    def offered(*words: str) -> list[str]:
        asked = {
            "_PENSTOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": f"{len(words) - 1}",
        }
        return penstock(**s3_endpoint.environment, **asked).split()

    assert offered("penstock", "run", "--mode", "f") == ["fastfile", "file"]
    assert "tfrecord" in offered("penstock", "peek", "--format", "tfr")
    assert offered("penstock", "ls", f"s3://{bucket[:-2]}") == [f"s3://{bucket}/"]
    assert offered("penstock", "ls", f"s3://{bucket}/tr") == [f"s3://{bucket}/train/", f"s3://{bucket}/trial.txt"]
    assert offered("penstock", "ls", "-r", "s3", ":", f"//{bucket}/train/a") == [f"//{bucket}/train/a.tar"]
    assert offered("penstock", "cp", "s3", ":", f"//{bucket}/trial.txt", "s3", ":", f"//{bucket}/train/b") == [
        f"//{bucket}/train/b.tar"
    ]
    assert offered("penstock", "ls", f"s3://{bucket}-none/") == []
