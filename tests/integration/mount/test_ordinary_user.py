"""Mounts of a user who is not root: by ``fusermount3``, which the system lets everybody use."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mounting import needs_fuse
from penstock.mount.fuse.watching import find_mount
from servers.leaks import has_ended

pytestmark = [
    pytest.mark.server,
    pytest.mark.heavy,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
    pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv"),
]

NOBODY = 65534
TIME_S_MAX = 60
READING_ONLY = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""Lets a user read an interpreter that lies in root's home; it permits no mount and no signal."""


START = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import penstock.mount.daemon'], check=True)"


@dataclass(frozen=True)
class User:
    """An ordinary user with a home directory, a source of files and an empty directory."""

    home: Path
    rights: Sequence[str]

    @property
    def source(self) -> Path:
        return self.home / "source"

    @property
    def directory(self) -> Path:
        return self.home / "mounted"

    def run(self, *command: str | Path, code: int = 0) -> str:
        """Run a command as this user; what it prints on both outputs."""
        done = subprocess.run(
            ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *self.rights, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=TIME_S_MAX,
            cwd=self.home,
            env={
                "HOME": str(self.home),
                "LC_ALL": "C.UTF-8",
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def penstock(self, *words: str | Path, code: int = 0) -> str:
        return self.run(sys.executable, "-m", "penstock", *words, code=code)


@pytest.fixture
def user() -> Iterator[User]:
    """The user ``nobody`` with a home of its own, in which nothing is mounted afterwards."""
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's directories, which only root may enter
        home = Path(folder)
        home.chmod(0o755)
        (home / "source/inner").mkdir(parents=True)
        (home / "source/inner/file").write_text("contents")
        (home / "mounted").mkdir()
        for path in (home, *home.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        made = User(home, ())
        try:
            made.run(sys.executable, "-c", START)
        except AssertionError:
            made = User(home, READING_ONLY)
        try:
            yield made
        finally:
            if find_mount(str(made.directory)) is not None:
                subprocess.run(["fusermount3", "-u", "-z", made.directory], check=False, timeout=TIME_S_MAX)


def process_of(said: str) -> int:
    """The process that serves a mount, of which the command has told."""
    found = re.search(r"process (\d+) serves it", said)
    assert found is not None
    return int(found[1])


def test_a_user_mounts_reads_and_unmounts(user: User) -> None:
    """Everything belongs to the user, the log lies in the user's home, and nothing is left after ``penstock umount``."""
    said = user.penstock("mount", "source", "mounted")
    entry = find_mount(str(user.directory))
    assert entry is not None
    assert user.run("cat", "mounted/inner/file") == "contents"
    assert user.run("stat", "-c", "%u %g %a", "mounted/inner/file") == f"{NOBODY} {NOBODY} 444\n"
    process_id = process_of(said)
    assert os.stat(f"/proc/{process_id}").st_uid == NOBODY
    (log,) = (user.home / ".local/state/penstock").iterdir()
    assert f"logs to {log}" in said
    assert oct(log.parent.stat().st_mode & 0o777) == "0o700"
    assert user.penstock("umount", "mounted") == ""
    assert find_mount(str(user.directory)) is None
    assert has_ended(process_id, within_s=TIME_S_MAX)
    assert [path.name for path in user.home.iterdir() if path.name not in ("source", "mounted", ".local")] == []


def test_others_cannot_use_the_mount(user: User) -> None:
    """Not even root reads a user's mount, which only ``user_allow_other`` permits; without it ``--allow-other`` says so."""
    user.penstock("mount", "source", "mounted")
    with pytest.raises(PermissionError):
        (user.directory / "inner/file").read_text()
    user.penstock("umount", "mounted")
    settings = Path("/etc/fuse.conf").read_text() if Path("/etc/fuse.conf").exists() else ""
    if re.search(r"^user_allow_other", settings, re.MULTILINE) is None:
        said = user.penstock("mount", "source", "mounted", "--allow-other", code=2)
        assert "have root add the line user_allow_other to /etc/fuse.conf, or leave allow_other out" in said
        assert find_mount(str(user.directory)) is None


@pytest.mark.parametrize("way", ["mount", "umount"])
def test_what_a_killed_process_leaves_is_removed(user: User, way: str) -> None:
    """Without auto-unmount a killed process leaves a stale mount; the next ``mount`` replaces it, ``umount`` removes it."""
    process_id = process_of(user.penstock("mount", "--no-auto-unmount", "source", "mounted"))
    os.kill(process_id, signal.SIGKILL)
    assert has_ended(process_id, within_s=TIME_S_MAX)
    assert "not connected" in user.run("cat", "mounted/inner/file", code=1)
    if way == "mount":
        user.penstock("mount", "source", "mounted")
        assert user.run("cat", "mounted/inner/file") == "contents"
    user.penstock("umount", "mounted")
    assert find_mount(str(user.directory)) is None


def test_a_mount_ends_with_its_process(user: User) -> None:
    """If the process is killed, the directory is unmounted without anybody's help, by the user's own watcher."""
    os.kill(process_of(user.penstock("mount", "source", "mounted")), signal.SIGKILL)
    deadline_s = time.monotonic() + TIME_S_MAX
    while find_mount(str(user.directory)) is not None:
        assert time.monotonic() < deadline_s, "it is still mounted"
        os.sched_yield()
    assert user.run("ls", "mounted") == ""


def test_a_directory_of_somebody_else_is_refused(user: User) -> None:
    """A user mounts on directories of their own only, and is told so in one line."""
    other = user.home / "roots"
    other.mkdir()
    (line,) = user.penstock("mount", "source", other, code=2).splitlines()
    assert str(other) in line
    assert line.startswith("penstock: ")
    assert find_mount(str(other)) is None
