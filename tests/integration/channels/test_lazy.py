"""Channels in File mode whose program starts before its files are there, on the real kernel."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from mounting import needs_fuse
from penstock.errors import ObjectMissingError, StoreError
from servers.faulty import FaultyServer

pytestmark = [
    pytest.mark.server,
    pytest.mark.heavy,
    needs_fuse,
]

COUNT = 20


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def bodies(faulty: FaultyServer) -> dict[str, bytes]:
    """The files of the channel, the last one of several blocks."""
    found = {f"{number:02d}": b"%02d" % number * 5000 for number in range(COUNT - 1)}
    found[f"{COUNT - 1:02d}"] = os.urandom(5 << 20)
    for name, body in found.items():
        faulty.objects[f"train/{name}"] = body
    return found


def run(faulty: FaultyServer, tmp_path: Path, code: str, **options: Any) -> ps.channels.RunResult:
    (tmp_path / "train.py").write_text("import os, pathlib, time, hashlib\n" + textwrap.dedent(code))
    return ps.channels.run(
        str(tmp_path / "train.py"), inputs={"train": f"{faulty.url}/train/,start=lazy"},
        endpoint_url=faulty.endpoint_url, anonymous=True, **options,
    )  # fmt: skip


def bytes_read(faulty: FaultyServer) -> list[str]:
    return [r.path for r in faulty.requests if r.method == "GET" and "/train/" in r.path.partition("?")[0]]


def test_the_files_arrive_while_the_program_runs(
    faulty: FaultyServer, bodies: dict[str, bytes], tmp_path: Path
) -> None:
    """The program starts before the first file is there, waits for what it reads, and later gets the rest from the disk."""
    faulty.fail("stall_head", match="train/00", times=1, seconds=0.5)
    code = """
        folder = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
        assert len(list(folder.iterdir())) == 20  # all names, whatever has arrived
        out = pathlib.Path(os.environ["SM_MODEL_DIR"])
        for each in sorted(folder.iterdir(), reverse=True):
            (out / each.name).write_bytes(each.read_bytes())
    """
    result = run(faulty, tmp_path, code, model_url=f"{tmp_path}/model/", downloads=tmp_path / "downloads")
    assert result.exit_code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == bodies
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_not_read_arrives_as_well(faulty: FaultyServer, bodies: dict[str, bytes], tmp_path: Path) -> None:
    """All objects come without being read, and a second run with the same downloads asks for none of them."""
    code = """
        import sys
        sys.stdin.readline()
    """
    (tmp_path / "wait.py").write_text(textwrap.dedent(code))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    main = "from penstock.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", main, "run", "--anonymous", "--endpoint-url", faulty.endpoint_url, "--downloads",
         str(tmp_path / "downloads"), "-c", f"{faulty.url}/train/,mode=file,start=lazy", "--",
         sys.executable, str(tmp_path / "wait.py")],
        env={**kept, "AWS_CONFIG_FILE": os.devnull, "TMPDIR": str(tmp_path / "tmp")}, stdin=subprocess.PIPE,
    )  # fmt: skip
    wait_until(lambda: stored_bytes(tmp_path / "downloads") >= sum(map(len, bodies.values())))
    process.communicate(b"\n", timeout=30)
    assert process.returncode == 0
    faulty.requests.clear()
    read = """
        found = [each.read_bytes() for each in sorted(pathlib.Path(os.environ["SM_CHANNEL_TRAIN"]).iterdir())]
        pathlib.Path(os.environ["SM_MODEL_DIR"], "digest").write_text(hashlib.sha256(b"".join(found)).hexdigest())
    """
    assert run(faulty, tmp_path, read, model_url=f"{tmp_path}/model/", downloads=tmp_path / "downloads").exit_code == 0
    assert (tmp_path / "model" / "digest").read_text() == hashlib.sha256(b"".join(bodies.values())).hexdigest()
    assert bytes_read(faulty) == []


def test_an_object_that_cannot_be_read_ends_the_run(
    faulty: FaultyServer, bodies: dict[str, bytes], tmp_path: Path
) -> None:
    """A program that would wait for ever is ended, as one whose download fails is not even started."""
    faulty.fail("403", match="train/07", times=None)
    with pytest.raises(StoreError):
        run(faulty, tmp_path, "time.sleep(60)", stop_s=5.0)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nothing_below_the_url(faulty: FaultyServer, tmp_path: Path) -> None:
    """A prefix without objects is refused before the program starts."""
    with pytest.raises((ps.errors.ConfigError, ObjectMissingError)):
        run(faulty, tmp_path, "raise SystemExit(3)")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_while_files_arrive(
    faulty: FaultyServer, bodies: dict[str, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    """A run that is ended or killed while the store stalls leaves no process, mount or file."""
    faulty.fail("stall_head", match="train/", times=None, seconds=60)
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    main = "from penstock.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", main, "run", "--anonymous", "--endpoint-url", faulty.endpoint_url, "--stop-s", "1",
         "-c", f"{faulty.url}/train/,mode=file,start=lazy", "--", sys.executable, str(tmp_path / "train.py")],
        env={**kept, "AWS_CONFIG_FILE": os.devnull, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    wait_until(lambda: bytes_read(faulty))
    began_s = time.monotonic()
    process.send_signal(number)
    assert process.wait(30) != 0
    process.stdout.close()
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()))
    assert time.monotonic() - began_s < 15
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "entries" in path.parts)


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
