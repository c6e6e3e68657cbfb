"""Locks on files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.system.locks import is_range_locked, process_lock, try_lock_file, try_lock_range, unlock_range


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def test_a_range_has_one_holder(tmp_path: Path) -> None:
    """A second open file gets a range only after the first has unlocked it; other ranges are free."""
    first, second = opened(tmp_path / "f"), opened(tmp_path / "f")
    assert try_lock_range(first, 1 << 60, 3)
    assert not try_lock_range(second, (1 << 60) + 2)
    assert is_range_locked(second, 1 << 60, 3)
    assert not is_range_locked(first, 1 << 60, 3)
    assert try_lock_range(second, (1 << 60) + 3)
    unlock_range(first, 1 << 60, 3)
    assert try_lock_range(second, (1 << 60) + 2)
    os.close(first)
    os.close(second)


def test_closing_unlocks(tmp_path: Path) -> None:
    """A lock ends with the descriptor that holds it."""
    first, second = opened(tmp_path / "f"), opened(tmp_path / "f")
    assert try_lock_range(first, 0)
    assert try_lock_file(first)
    assert not try_lock_file(second)
    os.close(first)
    assert try_lock_range(second, 0)
    assert try_lock_file(second)
    os.close(second)


def test_a_range_needs_a_writable_file(tmp_path: Path) -> None:
    """A descriptor that is open for reading only raises ``OSError`` instead of returning False."""
    os.close(opened(tmp_path / "f"))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock_range(fd, 0)
    os.close(fd)


TRY = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_process_lock_excludes_other_processes(tmp_path: Path) -> None:
    """Another process cannot get the lock before it is released."""
    fd = opened(tmp_path / "f")
    command = [sys.executable, "-c", TRY, str(tmp_path / "f")]
    with process_lock(fd):
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    os.close(fd)
