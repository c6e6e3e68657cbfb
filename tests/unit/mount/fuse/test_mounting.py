"""Mount points that cannot be used, and systems that do not permit a mount, are refused with a hint."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.mount.fuse import mounting, watching
from penstock.mount.fuse.mounting import MountOptions, mount, remove_stale, unmount
from penstock.mount.fuse.watching import MountEntry, Watcher

OPTIONS = MountOptions(source="test")


def test_a_mount_point_must_exist(tmp_path: Path) -> None:
    """A missing directory is refused, with the command that makes it."""
    with pytest.raises(ps.ConfigError, match=r"does not exist. Hint: mkdir -p '.*no such'"):
        mount(tmp_path / "no such", OPTIONS)


def test_a_mount_point_must_be_a_directory(tmp_path: Path) -> None:
    """A file is refused, and a path through a file, too."""
    (tmp_path / "file").touch()
    with pytest.raises(ps.ConfigError, match="file is not a directory"):
        mount(tmp_path / "file", OPTIONS)
    with pytest.raises(ps.ConfigError, match=r"cannot be used as a mount point: Not a directory"):
        mount(tmp_path / "file" / "below", OPTIONS)


def test_a_mount_point_must_be_empty(tmp_path: Path) -> None:
    """A directory with contents is refused, because the mount would hide them."""
    (tmp_path / "file").touch()
    with pytest.raises(ps.ConfigError, match="is not empty"):
        mount(tmp_path, OPTIONS)


def test_the_device_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, a missing /dev/fuse is an error that says how to get it."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "missing"))
    (tmp_path / "mount").mkdir()
    with pytest.raises(
        ps.ConfigError, match=r"missing cannot be opened: No such file.*modprobe fuse.*--device /dev/fuse"
    ):
        mount(tmp_path / "mount", OPTIONS)


def test_the_program_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, a missing fusermount3 is an error that names its package."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "mount").mkdir()
    with pytest.raises(ps.ConfigError, match=r"fusermount3 is not installed. Hint: install the package fuse3"):
        mount(tmp_path / "mount", OPTIONS)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf",
            "user_allow_other to /etc/fuse.conf",
        ),
        ("failed to open /dev/fuse: Permission denied", "--device /dev/fuse"),
        ("mount failed: Operation not permitted", "mode 4755"),
        ("user has no write access to mountpoint /mnt", "belongs to you"),
        ("too many FUSE filesystems mounted; mount_max=N can be set in /etc/fuse.conf", "raise mount_max"),
        ("something new", None),
        ("", None),
    ],
)
def test_what_the_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, hint: str | None) -> None:
    """When fusermount3 refuses, its words are in the message, with what helps."""
    program = tmp_path / mounting.PROGRAM
    program.write_text(f'#!/bin/sh\necho "fusermount3: {said}" >&2\nexit 1\n' if said else "#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "mount").mkdir()
    with pytest.raises(ps.ConfigError) as caught:
        mount(tmp_path / "mount", OPTIONS)
    assert (said or "gave no reason") in caught.value.what
    assert (hint in caught.value.hint) if hint else caught.value.hint is None  # type: ignore[operator]


def test_options_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the source contains cannot become an option: commas and backslashes are escaped."""
    program = tmp_path / mounting.PROGRAM
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "mount").mkdir()
    with pytest.raises(ps.ConfigError):
        mount(tmp_path / "mount", MountOptions(source="s3://b/a,dev\\,suid", allow_other=True))
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given == [
        *(
            "-o",
            r"ro,nosuid,nodev,noatime,fsname=s3://b/a\,dev\\\,suid,subtype=penstock,default_permissions,allow_other",
        ),
        *("--", str(tmp_path / "mount")),
    ]


@pytest.mark.parametrize("source", ["", "a\nb", "a\0b"])
def test_sources_are_printable(source: str) -> None:
    """A source that would break the table of mounts is refused."""
    with pytest.raises(ps.ConfigError, match="must be printable"):
        MountOptions(source=source)


def test_only_mounts_of_ours_are_unmounted(tmp_path: Path) -> None:
    """What is not mounted, and what is another file system, is not unmounted."""
    with pytest.raises(ps.ConfigError, match=r"nothing is mounted on .* Hint: findmnt"):
        unmount(tmp_path)
    with pytest.raises(ps.ConfigError, match=r"/proc is a mount of type proc, not one of penstock. Hint: umount /proc"):
        unmount("/proc")
    assert not remove_stale(tmp_path)
    assert not remove_stale("/proc")


def watched(directory: Path, entry: MountEntry) -> str:
    """What the command of a watcher has written when the watcher has ended, because its process was killed."""
    script = f"""if True:
        import os, signal
        from penstock.mount.fuse.watching import MountEntry
        from penstock.mount.fuse.watching import Watcher
        watcher = Watcher({entry!r}, ["sh", "-c", "echo unmounted > {directory}/said"])
        print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.pause()
    """
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    ended = os.pidfd_open(int(process.stdout.readline()))  # type: ignore[union-attr]
    process.terminate()
    process.communicate()
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    said = directory / "said"
    return said.read_text() if said.exists() else ""


def test_the_watcher_acts_when_its_process_dies(tmp_path: Path) -> None:
    """A process that is killed has its mount removed, but not another mount that has its place by then."""
    entry = MountEntry(*_of_proc())
    assert watched(tmp_path, entry._replace(device="0:9999")) == ""
    assert watched(tmp_path, entry) == "unmounted\n"


def test_a_mount_without_a_shell(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no shell that could watch, a mount works all the same, and a warning says what is missing."""
    monkeypatch.setattr(watching, "SHELL", "/no/such/shell")
    made = mounting.Mounted(0, _of_proc(), auto_unmount=True)
    assert made.is_mounted()
    assert "will stay mounted" in caplog.text


def test_a_closed_watcher_does_nothing(tmp_path: Path) -> None:
    """After ``close``, nothing is unmounted, and no process is left."""
    watcher = Watcher(MountEntry(*_of_proc()), ["touch", str(tmp_path / "said")])
    watcher.close()
    watcher.close()
    assert list(tmp_path.iterdir()) == []


def _of_proc() -> MountEntry:
    entry = mounting.find_mount("/proc")
    assert entry is not None
    return entry
