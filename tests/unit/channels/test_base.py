"""The mark of a run, by which its processes are found after its end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock.channels.runner.base import MARK, end_marked, new_mark, read_mark, write_mark


def test_only_processes_with_the_mark_end() -> None:
    """A process that has the mark ends, also in a session of its own; those with another mark, or none, do not."""
    mark, other = new_mark(), new_mark()
    assert mark != other
    with (
        subprocess.Popen(["sleep", "1000"], env={MARK: mark}, start_new_session=True) as marked,
        subprocess.Popen(["sleep", "1000"], env={MARK: other}) as others,
        subprocess.Popen(["sleep", "1000"], env={f"X{MARK}": mark, "Y": f"{MARK}={mark}"}) as unmarked,
    ):
        assert end_marked(mark)
        assert end_marked("")
        assert marked.wait(10) < 0
        assert (others.poll(), unmarked.poll()) == (None, None)
        others.kill()
        unmarked.kill()


def test_nobody_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the mark itself ends nothing, and says so."""
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    with subprocess.Popen(["sleep", "1000"], env={MARK: mark}) as marked:
        assert not end_marked(mark)
        assert marked.poll() is None
        marked.kill()


@pytest.mark.parametrize("text", [b"", b"abc", b"g" * 32, b"0" * 31, b"\xff" * 40])
def test_a_damaged_mark_is_none(text: bytes, tmp_path: Path) -> None:
    """A lock without a mark, or with anything else in it, names no process."""
    (tmp_path / "lock").write_bytes(text)
    fd = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        assert read_mark(fd) == ""
        mark = new_mark()
        write_mark(fd, mark)
        assert read_mark(fd) == mark
    finally:
        os.close(fd)
