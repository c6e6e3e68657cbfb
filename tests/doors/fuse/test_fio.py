"""fio reads files that it wrote itself, and verifies the checksum and the offset of every block."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from doors.fuse.data_set import FIO_BLOCK_BYTES, FIO_BYTES, Folders

TIME_S_MAX = 80


def fio(path: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run fio on a file that exists; whatever it writes by itself goes to `folder`."""
    command = [
        *("fio", "--name=read", f"--filename={path}", f"--size={FIO_BYTES}", "--readonly", "--allow_file_create=0"),
        *("--verify=crc32c", f"--verify_interval={FIO_BLOCK_BYTES}", "--verify_fatal=1", "--verify_pattern=%o"),
        *("--group_reporting", "--output-format=json", "--verify_state_save=0", *flags),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_S_MAX, cwd=folder, check=False)


def read_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return fio's account of what it read."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert job["error"] == 0
    account: dict[str, Any] = job["read"]
    return account


@pytest.mark.parametrize("engine", ["psync", "mmap", "direct"])
@pytest.mark.parametrize("jobs", [1, 8, 32])
@pytest.mark.parametrize(("order", "block_bytes"), [("read", 128 << 10), ("randread", 16 << 10), ("randread", 1 << 20)])
def test_every_block_is_right(
    folders: Folders, tmp_path: Path, order: str, block_bytes: int, engine: str, jobs: int
) -> None:
    """Sequential and random reads, through the page cache, past it and by mapping, by 1 to 32 processes, are right."""
    each_bytes = FIO_BYTES if order == "read" else max(FIO_BYTES // jobs // block_bytes, 4) * block_bytes
    account = read_by(
        fio(
            folders.mounted / "fio" / "verified",
            tmp_path,
            f"--rw={order}",
            f"--bs={block_bytes}",
            f"--numjobs={jobs}",
            f"--io_size={each_bytes}",
            f"--ioengine={'mmap' if engine == 'mmap' else 'psync'}",
            f"--direct={int(engine == 'direct')}",
        )
    )
    assert account["io_bytes"] == each_bytes * jobs


def test_a_wrong_byte_is_noticed(folders: Folders, tmp_path: Path) -> None:
    """fio fails if one byte is wrong or two blocks are exchanged, so the other tests would."""
    data = bytearray((folders.local / "fio" / "verified").read_bytes())
    data[12_345_678] ^= 1
    (tmp_path / "wrong").write_bytes(data)
    flags = ("--rw=read", "--bs=128k", "--ioengine=psync")
    assert fio(tmp_path / "wrong", tmp_path, *flags).returncode != 0
    data[12_345_678] ^= 1
    data[:8192] = data[4096:8192] + data[:4096]
    (tmp_path / "wrong").write_bytes(data)
    assert fio(tmp_path / "wrong", tmp_path, *flags).returncode != 0
