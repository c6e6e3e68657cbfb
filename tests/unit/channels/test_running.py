"""``penstock.channels.run`` from Python, on directories of this machine."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.channels.runner.base import PREFIX
from penstock.channels.runner.supervisor import LOCK_NAME, mounts_below
from penstock.errors import ConfigError

COPY = """
import json, os, pathlib
found = {name: value for name, value in os.environ.items() if name.startswith("SM_")}
found["epochs"] = [pathlib.Path(os.environ["SM_CHANNEL_PIPED"] + f"_{n}").read_text() for n in range(2)]
found["file"] = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "a").read_text()
pathlib.Path(os.environ["SM_MODEL_DIR"], "found.json").write_text(json.dumps(found))
pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", "last").write_text("7")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and a script; temporary files of runs are below it, too."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("contents")
    (tmp_path / "train.py").write_text(COPY)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("SAGEMAKER_BASE_DIR", raising=False)
    return tmp_path


def test_a_base_directory_that_is_made_is_private(folder: Path) -> None:
    """Others may not look into a base directory that the run made; one that was there keeps its mode."""
    (folder / "open").mkdir()
    (folder / "open").chmod(0o755)
    for name in ("parent/made", "open"):
        ps.channels.run(["true"], inputs={"train": str(folder / "data")}, base=folder / name)
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("parent/made", "open")] == [0o700, 0o755]


def test_run(folder: Path, nothing_left: Callable[[], AbstractContextManager[None]]) -> None:
    """A script runs with its channels and hyperparameters, its results go to their URLs, and nothing is left."""

    def once() -> ps.channels.RunResult:
        return ps.channels.run(
            str(folder / "train.py"),
            inputs={"train": str(folder / "data"), "piped": f"{folder / 'data'},mode=pipe"},
            hyperparameters={"lr": 0.1, "layers": [1, 2]},
            environment={"SM_EXTRA": "x"},
            model_url=f"{folder}/model/",
            checkpoint_url=f"{folder}/checkpoints/",
        )

    once()
    with nothing_left():
        result = once()
    assert (result.exit_code, result.failure, result.directory) == (0, "", None)
    found = json.loads((folder / "model" / "found.json").read_text())
    assert found["epochs"] == ["contents", "contents"]
    assert found["file"] == "contents"
    assert (found["SM_HP_LR"], found["SM_HP_LAYERS"], found["SM_EXTRA"]) == ("0.1", "[1,2]", "x")
    assert (folder / "checkpoints" / "last").read_text() == "7"
    assert list((folder / "tmp").iterdir()) == []


def test_checkpoints_come_back(folder: Path) -> None:
    """A second run begins with the checkpoints that the first one wrote."""
    script = """
import os, pathlib
file = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", "count")
file.write_text(str(int(file.read_text()) + 1 if file.exists() else 1))
raise SystemExit(int(file.read_text()))
"""
    (folder / "train.py").write_text(script)
    for expected in (1, 2, 3):
        result = ps.channels.run(str(folder / "train.py"), checkpoint_url=f"{folder}/checkpoints/")
        assert result.exit_code == expected
    assert list((folder / "tmp").iterdir()) == []


def test_one_url_is_the_channel_training(folder: Path) -> None:
    """A URL without a name is the channel ``training``; the environment names the base directory."""
    result = ps.channels.run(
        ["sh", "-c", 'cat "$SM_CHANNEL_TRAINING/a" > "$SM_OUTPUT_DATA_DIR/b"'], inputs=str(folder / "data"),
        base=folder / "base",
    )  # fmt: skip
    assert result.directory == folder / "base"
    assert (folder / "base" / "output" / "data" / "b").read_text() == "contents"


def test_hyperparameters_as_arguments(folder: Path) -> None:
    """A script that parses its hyperparameters from arguments gets them there, if asked for."""
    result = ps.channels.run(
        ["sh", "-c", 'echo "$@" > "$SM_OUTPUT_DATA_DIR/b"', "x.py", "--own"], hyperparameters={"lr": 0.1, "n": 3},
        passes_hyperparameters=True, base=folder / "base",
    )  # fmt: skip
    assert result.exit_code == 0
    assert (folder / "base" / "output" / "data" / "b").read_text() == "--own --lr 0.1 -n 3\n"


def test_another_thread(folder: Path) -> None:
    """A run may be started from another thread, which cannot pass signals on."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(ps.channels.run(["sh", "-c", "exit 3"])))
    thread.start()
    thread.join(60)
    assert [result.exit_code for result in results] == [3]


def test_handlers_are_restored(folder: Path) -> None:
    """The program's own signal handlers are back after a run."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    ps.channels.run(["true"])
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": []}, "there is no program"),
        ({"program": ["no-such-program"]}, "cannot run 'no-such-program': No such file"),
        ({"program": ["/dev/null"]}, "cannot run '/dev/null': Permission denied"),
        ({"program": ["true"], "inputs": {"a b": "data"}}, "channel name 'a b'"),
        ({"program": ["true"], "input_mode": "Fast", "inputs": "data"}, "mode='Fast'"),
        ({"program": ["true"], "hosts": ["a"]}, "go together"),
        ({"program": ["true"], "hyperparameters": {"": 1}}, "hyperparameter name ''"),
        ({"program": ["true"], "stop_s": -1}, "stop_s=-1"),
        ({"program": ["true"], "base": "/proc/nowhere"}, "the base directory /proc/nowhere"),
    ],
)
def test_refusals(folder: Path, arguments: dict[str, Any], message: str) -> None:
    """What cannot be run is an error that names it, and leaves no directory."""
    with pytest.raises(ConfigError, match=message):
        ps.channels.run(arguments.pop("program"), **arguments)
    assert list((folder / "tmp").iterdir()) == []


def test_abandoned_directories_are_removed(folder: Path) -> None:
    """A private directory that no run holds is removed by the next run, but not what it links to, nor what it holds."""
    abandoned, held = (folder / "tmp" / f"{PREFIX}{name}" for name in ("old", "held"))
    for base in (abandoned, held):
        (base / "input" / "data").mkdir(parents=True)
        (base / LOCK_NAME).touch()
        (base / "input" / "data" / "train").symlink_to(folder / "data", target_is_directory=True)
    import fcntl

    with (held / LOCK_NAME).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ps.channels.run(["true"])
    assert not abandoned.exists()
    assert held.exists()
    assert (folder / "data" / "a").read_text() == "contents"


def test_results_survive_a_kill(folder: Path) -> None:
    """The model of a run that was killed stays when its directory is cleaned; its input does not."""
    base = folder / "tmp" / f"{PREFIX}old"
    for name in ("model", "input"):
        (base / name).mkdir(parents=True)
    (base / "model" / "weights").write_text("x")
    (base / LOCK_NAME).touch()
    ps.channels.run(["true"])
    assert sorted(path.name for path in base.iterdir()) == ["model"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_mounts_of_odd_names_are_found(folder: Path) -> None:
    """A mount whose path has spaces and letters beyond ASCII is found, as the kernel escapes some of them."""
    base = folder / "base é"
    (base / "a b\tc").mkdir(parents=True)
    import ctypes

    libc = ctypes.CDLL(None)
    if libc.mount(b"none", os.fsencode(base / "a b\tc"), b"tmpfs", 0, b"size=4k"):
        pytest.skip("may not mount a tmpfs")
    try:
        assert mounts_below(base) == [str(base / "a b\tc")]
        (folder / "link").symlink_to(base)
        assert mounts_below(folder / "link") == [str(base / "a b\tc")]
        ps.channels.run(["true"], base=base)
        assert mounts_below(base) == [str(base / "a b\tc")]  # what penstock has not mounted stays
    finally:
        libc.umount2(os.fsencode(base / "a b\tc"), 2)
    assert mounts_below(base) == []


def test_python_is_this_one(folder: Path) -> None:
    """A script that ends with .py is run by this Python."""
    (folder / "train.py").write_text("import sys, pathlib; pathlib.Path('which').write_text(sys.executable)")
    here = Path.cwd()
    os.chdir(folder)
    try:
        ps.channels.run("train.py")
    finally:
        os.chdir(here)
    assert (folder / "which").read_text() == sys.executable
