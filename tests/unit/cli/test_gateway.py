"""The flags of ``penstock gateway``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.app import commands, run
from penstock.cli.gateway import make_config
from penstock.errors import ConfigError
from penstock.gateway.config import AccessPoint, GatewayConfig, flags_of

UNUSED = {
    "--timeout": {"time_s_max": "9s"},
    "--processes": {"processes": 2},
    "--memory": {"memory_bytes_max": "1GiB"},
    "--version-tag": {"version": "2"},
    "--length": {"length": "spool"},
    "--list-sizes": {"list_sizes": "source"},
}


@pytest.mark.parametrize("flag", UNUSED)
def test_limits_of_a_transform_that_is_not_there_are_refused(flag: str) -> None:
    """A flag that would have no effect is an error that names it."""
    upstream = {"upstream": "s3://bucket"}
    with pytest.raises(ConfigError, match=f"{flag} is for a transform"):
        make_config(None, upstream, transform=UNUSED[flag])
    (point,) = make_config(None, upstream, transform={"transform": "gzip", **UNUSED[flag]}).access_points
    assert point.transform == "gzip"


REFUSED = {
    "--port=70000 must be a whole number in [0, 65535]": "--port 70000",
    "--tls-key is not given": "--tls-certificate c.pem",
    "--cache='10XB' must be PATH:SIZE": "--cache 10XB",
    "--cache='/x:10XB': '10XB' is not a size": "--cache /x:10XB",
    "--cache='/x:1KB': bytes_max=1000 must be at least": "--cache /x:1KB",
    "--keys: nowhere is not a file": "--keys nowhere",
    "--host='1.2.3.400' is not an address of this machine: Name": "--host 1.2.3.400",
    "--connections-max=0 must be": "--connections-max 0",
    "--memory=3 must be a whole number": "--transform gzip --memory 3",
    "--timeout=1000.0 must be a number": "--lambda a.b --timeout 1000",
    "--lambda-python: ": "--lambda a.b --lambda-python nowhere",
    "--webhook='ftp://x' is not": "--webhook ftp://x",
    "--transform and --webhook cannot be combined": "--transform gzip --webhook http://x/",
    "--transform: there is no built-in transform gzipp. Hint: did you mean gzip?": "--transform gzipp",
    "--transform: the transform 'gzip(' lacks a closing ')'": "--transform gzip(",
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_values_are_named_by_their_flags(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message names the flag as it was given, not the key that a file would have for it."""
    assert run(["gateway", "--upstream", str(tmp_path), "--name", "abc", "--port", "0", *REFUSED[message].split()]) == 2
    assert message in capsys.readouterr().err


def test_flags_in_messages_exist() -> None:
    """Every flag that a message may name is one of the command."""
    options = {option for each in commands().commands["gateway"].params for option in each.opts}
    assert options >= {*flags_of(GatewayConfig).values(), *flags_of(AccessPoint).values()}


def test_messages_name_the_flag_or_the_key_that_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a file, a flag is named only if it replaced the file's key."""
    file = tmp_path / "gateway.toml"
    file.write_text("workers = 0\nport = 0\n[access_points.abc]\nupstream = 's3://bucket'\n")
    assert run(["gateway", "--config", str(file)]) == 2
    assert "gateway.toml: workers=0 must be" in capsys.readouterr().err
    assert run(["gateway", "--config", str(file), "--workers", "1000"]) == 2
    assert "penstock: --workers=1000 must be" in capsys.readouterr().err


AUTHORED = """
def fails(reader, request):
    yield reader.read()
    {}["no"]

def opens(reader, request):
    open("/no/such/file")

def nothing(reader, request):
    return None

def text(reader, request):
    yield "words"
"""
FAILING = {
    "text": ("penstock: the transform yielded str; a transform yields bytes. Hint: text.encode()", ""),
    "fails": ("Traceback", "KeyError: 'no'"),
    "opens": ("Traceback", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"),
    "nothing": ("penstock: authored_here.py:nothing returned NoneType; a transform returns bytes", "or a Response"),
}


@pytest.mark.parametrize("function", FAILING)
def test_a_trial_that_fails_shows_the_authors_frames_alone(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the author's function raises has no frame of penstock; what it must not return is said in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    monkeypatch.setattr("sys.path", sys.path.copy())
    Path("authored_here.py").write_text(AUTHORED)
    Path("words.txt").write_text("words")
    assert run(["gateway", "try", f"./authored_here.py:{function}", "words.txt", "-o", "out"]) == 1
    first, last = FAILING[function]
    error = capfd.readouterr().err.rstrip()
    assert error.startswith(first)
    assert error.endswith(last)
    assert error.count("  File ") <= 1


@pytest.mark.server
def test_a_transform_that_cannot_be_imported_shows_its_traceback_line_by_line(tmp_path: Path) -> None:
    """The gateway ends with the reason in one line, and the author's frames below it."""
    (tmp_path / "unusable.py").write_text("VALUE = {}['no']\n")
    flags = "--upstream s3://bucket --anonymous --transform ./unusable.py:f --cache none --port 0 --processes 1"
    command = [sys.executable, "-m", "penstock", "gateway", *flags.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_TRACEBACK"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[:2] == [
        "penstock: the transform of bucket does not start: KeyError: 'no'",
        "    Traceback (most recent call last):",
    ]
    assert lines[2] == f'      File "{tmp_path}/unusable.py", line 1, in <module>'
    assert lines[-1] == "    KeyError: 'no'"


WRONG_TRANSFORMS = {
    "resize(widht=3)": "resize(widht=...) is not an option of resize(). Hint: did you mean width=?",
    "gunzip | resize(width=big)": "resize: width='big' must be a whole number",
    "recode": "recode needs the argument format",
    "tar2tfrecord(a=b:nope)": "'nope' is not one of file, bytes",
}


@pytest.mark.parametrize("transform", WRONG_TRANSFORMS)
def test_check_finds_wrong_arguments_of_built_in_transforms(
    transform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the start would refuse, ``check`` refuses, by the key in the file; it runs no code of others."""
    file = tmp_path / "gateway.toml"
    file.write_text(f"[access_points.abc]\nupstream = 's3://b'\ntransform = '{transform} | ./mine.py:f'\n")
    assert run(["gateway", "check", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: gateway.toml: access_points.abc.transform: ")
    assert WRONG_TRANSFORMS[transform] in error
    file.write_text("[access_points.abc]\nupstream = 's3://b'\ntransform = 'gunzip | ./mine.py:f'\n")
    assert run(["gateway", "check", "--config", str(file)]) == 0
