"""``penstock.channels.run`` from Python, on directories of this machine."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import tarfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.channels.runner.base import PREFIX
from penstock.channels.runner.supervisor import LOCK_NAME, mounts_below
from penstock.errors import ConfigError, StoreError

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


@pytest.mark.parametrize(
    "name", ["input", "input/config", "input/data", "model", "output", "output/data", "checkpoints", ".penstock-lock"]
)
@pytest.mark.parametrize("kind", ["link", "fifo", "dangling"])
def test_links_in_the_base_directory_are_not_followed(folder: Path, name: str, kind: str) -> None:
    """A link or a FIFO in the place of a directory, or of the lock, is an error that names it; nothing is written elsewhere."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "file" if name.startswith(".") else elsewhere
    if name.startswith("."):
        target.write_text("untouched")
    planted = folder / "base" / name
    planted.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.symlink_to(target if kind == "link" else folder / "nowhere")
    with pytest.raises(ConfigError, match=rf"base directory .*{name}"):
        ps.channels.run(["true"], inputs=str(folder / "data"), base=folder / "base")
    assert not (folder / "nowhere").exists()
    assert [path.read_text() for path in elsewhere.iterdir()] == (["untouched"] if name.startswith(".") else [])


@pytest.mark.parametrize("kind", ["link", "fifo", "hard link"])
def test_configuration_files_replace_what_lies_there(folder: Path, kind: str) -> None:
    """A link or FIFO with the name of a configuration file is replaced: nothing is written through it."""
    (folder / "victim").write_text("untouched")
    config = folder / "base" / "input" / "config"
    config.mkdir(parents=True)
    for name in ("hyperparameters.json", "penstock.json"):
        if kind == "fifo":
            os.mkfifo(config / name)
        elif kind == "link":
            (config / name).symlink_to(folder / "victim")
        else:
            (config / name).hardlink_to(folder / "victim")
    ps.channels.run(["true"], hyperparameters={"a": 1}, base=folder / "base")
    assert (folder / "victim").read_text() == "untouched"
    assert json.loads((config / "hyperparameters.json").read_text()) == {"a": "1"}


@pytest.mark.parametrize(
    "failure",
    ["mkfifo $F", "mkdir $F", "ln -s /etc/hostname $F", "ln -s $F $F", "truncate -s 100G $F", "mkdir $F; touch $F/x"],
)
def test_a_failure_file_that_is_none(folder: Path, failure: str) -> None:
    """What the program puts in the place of the failure file ends neither this run nor the next one, and is not followed."""
    for _ in range(2):
        result = ps.channels.run(
            ["sh", "-c", f"F=$SAGEMAKER_BASE_DIR/output/failure; {failure}; exit 3"], base=folder / "base"
        )
        assert result.exit_code == 3
        assert set(result.failure) <= {"\0"}
    if "mkdir" in failure:
        return  # it stays, as it may hold something
    result = ps.channels.run(["sh", "-c", 'printf "why\\377" > "$SM_OUTPUT_FAILURE"; exit 3'], base=folder / "base")
    assert result.failure == "why\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("suffix", ["", "model.tar.gz"])
@pytest.mark.parametrize("what", ["model", "output", "checkpoint"])
def test_links_out_of_the_results_are_not_stored(folder: Path, what: str, suffix: str) -> None:
    """Links out of a directory of results are an error that names them, and all else is stored: no file of the host is."""
    if what == "checkpoint" and suffix:
        pytest.skip("checkpoints are no archive")
    (folder / "secret").mkdir()
    (folder / "secret" / "key").write_text("secret")
    place = {"model": "model", "output": "output/data", "checkpoint": "checkpoints"}[what]
    script = """
        cd "$SAGEMAKER_BASE_DIR/$0"; echo -n w > a; mkdir sub; ln -s ../a sub/inside; ln -s sub again; ln -s . here
        ln -s "$1/secret" outside; ln -s "$1/secret/key" sub/outside; mkfifo fifo; ln -s nothing sub/nothing
        """
    with pytest.raises(StoreError, match=rf"{place}/outside and 1 more lead out of the directory"):
        ps.channels.run(
            ["sh", "-c", script, place, str(folder)], base=folder / "base", **{f"{what}_url": f"{folder}/to/{suffix}"}
        )
    if suffix:
        with tarfile.open(folder / "to" / suffix) as archive:
            assert archive.getnames() == ["a", "again", "here", "sub", "sub/inside", "sub/nothing"]
        return
    names = [str(path.relative_to(folder / "to")) for path in sorted((folder / "to").rglob("*")) if path.is_file()]
    assert names == ["a", "again/inside", "sub/inside"]


@pytest.mark.parametrize("suffix", ["", "model.tar.gz"])
@pytest.mark.parametrize("instead", ["ln -s /etc model", "touch model", "mkfifo model", "ln -s nothing model"])
def test_a_model_directory_that_is_none(folder: Path, instead: str, suffix: str) -> None:
    """A program that replaces the model directory by something else ends in an error, and nothing is stored."""
    script = f'cd "$SAGEMAKER_BASE_DIR"; rmdir model; {instead}'
    with pytest.raises(StoreError, match=r"/model is not a directory any more"):
        ps.channels.run(["sh", "-c", script], base=folder / "base", model_url=f"{folder}/to/{suffix}")
    assert not (folder / "to").exists()


def test_checkpoints_come_back_through_no_link(folder: Path) -> None:
    """Checkpoints that would be written through a link in the base directory are refused."""
    (folder / "to" / "sub").mkdir(parents=True)
    (folder / "to" / "sub" / "file").write_text("new")
    (folder / "elsewhere").mkdir()
    (folder / "base" / "checkpoints").mkdir(parents=True)
    (folder / "base" / "checkpoints" / "sub").symlink_to(folder / "elsewhere")
    with pytest.raises(ConfigError, match="checkpoints/sub is a link"):
        ps.channels.run(["true"], base=folder / "base", checkpoint_url=f"{folder}/to/")
    assert list((folder / "elsewhere").iterdir()) == []


def test_what_others_have_in_place_of_the_channels_stays(folder: Path) -> None:
    """FIFOs of others stay if the program replaces the directory of the channels by a link to them."""
    (folder / "others").mkdir()
    os.mkfifo(folder / "others" / "fifo")
    script = f'cd "$SAGEMAKER_BASE_DIR/input"; rm -r data; ln -s {folder}/others data'
    ps.channels.run(["sh", "-c", script], base=folder / "base")
    assert (folder / "others" / "fifo").is_fifo()


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
