"""The FUSE session with the real kernel, over a file system in memory that a process of its own serves.

Whatever touches the mount is a process with a time limit, so that no test can hang in the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from mounting import needs_fuse
from penstock.mount.fuse.mounting import MountOptions, mount, remove_stale, unmount
from penstock.mount.fuse.watching import find_mount
from servers.memory_file_system import content

pytestmark = [
    pytest.mark.server,
    needs_fuse,
    pytest.mark.skipif(
        os.geteuid() != 0 and shutil.which("fusermount3") is None, reason="needs fusermount3 (package fuse3), or root"
    ),
]

TIME_S_MAX = 20
NOBODY = 65534
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C"}


class ServedMount:
    """The process that serves the file system, and its directory."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "servers.memory_file_system", str(directory), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=ENVIRONMENT,
            )
        answer = self._read()
        assert answer["ready"]

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        assert line, self.log.read_text()
        return json.loads(line)  # type: ignore[no-any-return]

    def tell(self, command: str) -> dict[str, Any]:
        """Have the process do something; what it says then."""
        self.process.stdin.write(command.encode() + b"\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the mounted directory, with a time limit."""
        return subprocess.run(
            ["sh", "-c", 'cd "$0" && exec "$@"', self.directory, *command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_S_MAX,
            env=ENVIRONMENT,
        )

    def close(self) -> None:
        """End the process, and remove the mount, whatever state they are in."""
        self.process.kill()
        self.process.communicate()
        while find_mount(str(self.directory)) is not None:
            unmount(self.directory, is_lazy=True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedMount]:
    """A mounted file system in memory."""
    directory = tmp_path / "mount"
    directory.mkdir()
    mounted = ServedMount(directory)
    try:
        yield mounted
    finally:
        mounted.close()


@pytest.fixture(params=["thread", "loop"])
def served_either_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedMount]:
    """The same, by a session that has a thread of its own, and by one on the thread of an event loop."""
    directory = tmp_path / "mount"
    directory.mkdir()
    mounted = ServedMount(directory, *(["--loop"] if request.param == "loop" else []))
    try:
        yield mounted
    finally:
        mounted.close()


def test_names_attributes_and_bytes(served: ServedMount) -> None:
    """Programs see the entries, their attributes and their bytes."""
    names = served.run("ls", "-1").stdout.split()
    assert {"small.txt", "empty", "large.bin", "folder", "many"} <= set(names)
    assert served.run("stat", "-c", "%s %i %h %a %Y", "small.txt").stdout == "1000 1002 1 644 1700000000\n"
    assert served.run("cat", "folder/näme with spaces").stdout == "x"
    digest = served.run("md5sum", "large.bin").stdout.split()[0]
    assert digest == hashlib.md5(content("large.bin", 20_000_003)).hexdigest()
    assert served.run("cat", "nothing").stderr == "cat: nothing: No such file or directory\n"


def test_large_directory(served: ServedMount) -> None:
    """A directory of thousands of entries is complete and in order, read with or without attributes."""
    expected = [f"file-{number:05}" for number in range(5000)]
    assert served.run("ls", "-U", "many").stdout.split() == expected
    sizes = served.run("find", "many", "-type", "f", "-size", "-2", "-printf", "%f %s\n").stdout.splitlines()
    assert sizes == [f"{name} {len(str(number))}" for number, name in enumerate(expected)]


def test_reading_a_directory_replaces_lookups(served: ServedMount) -> None:
    """Files of a directory that was read are opened without LOOKUP and GETATTR."""
    served.run("ls", "-U", ".", "many")
    before = served.tell("statistics")["requests"]
    assert served.run("sh", "-c", "cat many/file-000??").stdout.startswith("012345678910")
    after = served.tell("statistics")["requests"]
    assert after["OPEN"] - before.get("OPEN", 0) == 100
    assert [after.get(name, 0) - before.get(name, 0) for name in ("LOOKUP", "GETATTR")] == [0, 0]


def test_memory_maps_and_concurrent_readers(served: ServedMount) -> None:
    """Threads that read at random offsets, directly and by a memory map, see the right bytes."""
    script = """if True:
        import mmap, os, random, sys
        from concurrent.futures import ThreadPoolExecutor
        from servers.memory_file_system import content
        expected = content("large.bin", 20_000_003)
        descriptor = os.open("large.bin", os.O_RDONLY)
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        def read(seed):
            chance = random.Random(seed)
            for _ in range(50):
                start = chance.randrange(len(expected))
                length = chance.randrange(1, 300_000)
                assert os.pread(descriptor, length, start) == expected[start : start + length]
                assert mapped[start : start + length] == expected[start : start + length]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
        print("done")
    """
    ran = served.run(sys.executable, "-c", script)
    assert ran.stdout == "done\n", ran.stderr


def test_errors_of_the_file_system(served: ServedMount) -> None:
    """An exception becomes its errno in the program and one traceback in the log; the session goes on."""
    for _ in range(3):
        assert served.run("cat", "raises").stderr == "cat: raises: Input/output error\n"
    assert served.run("cat", "changed").stderr == "cat: changed: Stale file handle\n"
    log = served.log.read_text()
    assert log.count("RuntimeError: this file cannot be read") == 1
    assert served.run("cat", "small.txt").returncode == 0


def test_answers_from_other_threads(served: ServedMount) -> None:
    """A reply may come late and from another thread; a second reply is refused, and logged once."""
    for name in ("late", "twice", "twice"):
        digest = served.run("md5sum", name).stdout.split()[0]
        assert digest == hashlib.md5(content(name, 100_000)).hexdigest()
    assert served.log.read_text().count("answered twice") == 1


@pytest.mark.parametrize(
    ("name", "signal_name"),
    [("hangs", "KILL"), ("hangs", "TERM"), ("hangs-open", "KILL"), ("hangs-open", "TERM")],
)
def test_a_killed_program_dies(served_either_way: ServedMount, name: str, signal_name: str) -> None:
    """A program that waits for a reply which never comes ends at once when it is killed; a late reply does no harm.

    SIGQUIT is left out: the kernel does not always interrupt the request for it.
    """
    served = served_either_way
    program = subprocess.Popen(["cat", served.directory / name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_until(lambda: served.tell("statistics")["held"] > 0)
    program.send_signal(getattr(signal, f"SIG{signal_name}"))
    assert program.wait(TIME_S_MAX) == -getattr(signal, f"SIG{signal_name}")
    assert served.tell("answer")["answered"] > 0
    assert served.run("cat", "small.txt").returncode == 0
    assert served.tell("statistics")["waiting"] == 0


@pytest.mark.parametrize("name", ["hangs", "hangs-open"])
def test_a_signal_that_does_not_kill(served_either_way: ServedMount, name: str) -> None:
    """A handled signal does not make a read fail; a fatal one that comes later still ends the program."""
    served = served_either_way
    script = """if True:
        import signal, sys
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        sys.stdout.write(str(len(open(sys.argv[1], "rb", buffering=0).readall())))
    """
    command = [sys.executable, "-c", script, str(served.directory / name)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    _wait_until(lambda: served.tell("statistics")["held"] > 0 and _has_interrupts(served, name))
    while first.poll() is None:
        served.tell("answer")
    assert first.communicate()[0] == "100000"
    if name == "hangs-open":
        second = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _wait_until(lambda: served.tell("statistics")["requests"]["INTERRUPT"] > 1)
        second.kill()
        assert second.wait(TIME_S_MAX) == -signal.SIGKILL


def test_unmounting_while_files_are_open(served: ServedMount) -> None:
    """After a lazy unmount, open files can still be read; the session ends when the last one is closed."""
    with (served.directory / "large.bin").open("rb") as file:
        assert served.tell("unmount") == {"mounted": False}
        assert list(served.directory.iterdir()) == []
        assert served.run("true").returncode == 0
        digest = subprocess.run(
            ["md5sum"], stdin=file, capture_output=True, text=True, timeout=TIME_S_MAX
        ).stdout.split()[0]
        assert digest == hashlib.md5(content("large.bin", 20_000_003)).hexdigest()
        assert served.process.poll() is None
    served.process.communicate(timeout=TIME_S_MAX)
    assert served.process.returncode == 0


def test_a_busy_mount_is_not_unmounted(served: ServedMount) -> None:
    """Without ``is_lazy``, a mount that programs use stays, and the error says so."""
    with (
        (served.directory / "large.bin").open("rb"),
        pytest.raises(ps.ConfigError, match=r"busy.*Hint: end the programs"),
    ):
        unmount(served.directory)
    unmount(served.directory)
    assert find_mount(str(served.directory)) is None


def test_stop(served: ServedMount) -> None:
    """Stopping ends the session though nobody unmounted: programs that wait fail, and so do later ones."""
    program = subprocess.Popen(["cat", served.directory / "hangs"], stderr=subprocess.PIPE, text=True)
    _wait_until(lambda: served.tell("statistics")["held"] > 0)
    assert served.tell("stop") == {"alive": False, "closed": True}
    assert "cat: " in program.communicate(timeout=TIME_S_MAX)[1]
    assert served.tell("answer")["answered"] > 0
    assert "not connected" in served.run("ls", ".").stderr


def test_names_are_looked_up_anew(served: ServedMount) -> None:
    """Names that the kernel remembers are forgotten on demand, where the kernel can do that."""
    served.run("cat", "small.txt")
    before = served.tell("statistics")["requests"].get("LOOKUP", 0)
    if not served.tell("forget")["names"]:
        pytest.skip("needs Linux 6.16 or newer")
    served.run("cat", "small.txt")
    assert served.tell("statistics")["requests"]["LOOKUP"] > before


def test_directories_that_the_kernel_may_remember(served: ServedMount) -> None:
    """A directory that was opened with ``keeps_cache`` is read again from the kernel's memory, and any other one is not."""
    for name in ("kept", "folder", "kept", "folder"):
        served.run("ls", "-U", name)
    before = served.tell("statistics")["requests"]["READDIRPLUS"]
    assert served.run("ls", "-U", "kept").stdout == "one\ntwo\n"
    assert served.tell("statistics")["requests"]["READDIRPLUS"] == before
    served.run("ls", "-U", "folder")
    assert served.tell("statistics")["requests"]["READDIRPLUS"] > before


def test_direct_reads(served: ServedMount) -> None:
    """Programs that bypass the kernel's pages (``O_DIRECT``) read the right bytes, and can be killed while they wait."""
    read = ["dd", "if=large.bin", "bs=1M", "iflag=direct", "status=none"]
    digest = served.run("sh", "-c", f"{' '.join(read)} | md5sum").stdout.split()[0]
    assert digest == hashlib.md5(content("large.bin", 20_000_003)).hexdigest()
    command = ["dd", f"if={served.directory}/hangs", "iflag=direct", "status=none"]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_until(lambda: served.tell("statistics")["held"] > 0)
    program.kill()
    assert program.wait(TIME_S_MAX) == -signal.SIGKILL


def test_a_killed_process_leaves_a_stale_mount(served: ServedMount) -> None:
    """After ``kill -9`` programs get ``ENOTCONN`` at once; the stale mount is found and removed, and mounting works again."""
    program = subprocess.Popen(["cat", served.directory / "hangs"], stderr=subprocess.DEVNULL)
    _wait_until(lambda: served.tell("statistics")["held"] > 0)
    served.process.kill()
    served.process.wait()
    assert program.wait(TIME_S_MAX) != 0
    with pytest.raises(OSError, match="not connected"):
        list(served.directory.iterdir())
    again = ServedMount(served.directory)
    assert again.run("cat", "folder/inner/deep.txt").returncode == 0
    again.close()
    assert not remove_stale(served.directory)


@pytest.mark.heavy
def test_killed_while_many_programs_read(served: ServedMount) -> None:
    """When the serving process is killed under load, all programs end with an error; the directory can be mounted again."""
    loop = "while md5sum large.bin many/file-000?? > /dev/null; do ls -l many > /dev/null; done"
    command = ["sh", "-c", loop]
    programs = [
        subprocess.Popen(command, cwd=served.directory, stderr=subprocess.PIPE, env=ENVIRONMENT) for _ in range(16)
    ]
    _wait_until(lambda: served.tell("statistics")["requests"].get("RELEASE", 0) > 500)
    served.process.kill()
    served.process.wait()
    for program in programs:
        said = program.communicate(timeout=TIME_S_MAX)[1]
        assert b"not connected" in said or b"connection abort" in said
    again = ServedMount(served.directory)
    assert again.run("cat", "small.txt").returncode == 0
    again.close()


def test_a_forked_child_does_not_keep_the_mount_alive(served: ServedMount) -> None:
    """A child that the serving process forked holds no connection: when the process dies, the mount is dead."""
    child = served.tell("fork")["child"]
    try:
        served.process.kill()
        served.process.wait()
        with pytest.raises(OSError, match=r"not connected|connection abort"):
            list(served.directory.iterdir())
        assert remove_stale(served.directory)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_mount_disappears_with_a_killed_process(tmp_path: Path) -> None:
    """With ``auto_unmount``, nothing is left of a mount whose process was killed, nor of the watcher after a clean end."""
    directory = tmp_path / "watched"
    directory.mkdir()
    killed = ServedMount(directory, "--watch")
    killed.process.kill()
    _wait_until(lambda: find_mount(str(directory)) is None)
    killed.close()
    clean = ServedMount(directory, "--watch")
    children = Path(f"/proc/{clean.process.pid}/task/{clean.process.pid}/children").read_text().split()
    clean.tell("unmount")
    clean.process.communicate(timeout=TIME_S_MAX)
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()
    clean.close()


@pytest.fixture
def of_nobody() -> Iterator[Path]:
    """A directory of a user who is not root, by a path that everybody may follow."""
    with tempfile.TemporaryDirectory(prefix="penstock-mount-") as folder:
        os.chmod(folder, 0o755)
        directory = Path(folder, "mount")
        directory.mkdir()
        os.chown(directory, NOBODY, NOBODY)
        yield directory


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("fusermount3") is None, reason="needs root, and fusermount3")
def test_mounting_as_a_user(of_nobody: Path) -> None:
    """A user mounts by fusermount3, and uses the mount; other users cannot; nothing is left of it when it is killed."""
    served = ServedMount(of_nobody, "--user", str(NOBODY), "--watch")
    try:
        entry = find_mount(str(of_nobody))
        assert entry is not None
        assert (entry.kind, entry.source) == ("fuse.penstock", "memory, of a\\ test")
        command = ["cat", of_nobody / "small.txt"]
        own = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=TIME_S_MAX
        )
        assert own.stdout == content("small.txt", 1000)
        others = subprocess.run(
            command, user=NOBODY - 1, group=NOBODY, extra_groups=[], capture_output=True, timeout=TIME_S_MAX
        )
        assert b"Permission denied" in others.stderr
        served.process.kill()
        _wait_until(lambda: find_mount(str(of_nobody)) is None)
    finally:
        served.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_other_users_may_use_it_if_asked(of_nobody: Path) -> None:
    """With ``allow_other``, other users read what the permissions of the files allow."""
    served = ServedMount(of_nobody, "--allow-other")
    try:
        command = ["cat", of_nobody / "small.txt"]
        other = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=TIME_S_MAX
        )
        assert other.stdout == content("small.txt", 1000)
    finally:
        served.close()


def test_mounting_twice(served: ServedMount) -> None:
    """A directory that is a mount of a living process is refused, with the command that unmounts it."""
    with pytest.raises(ps.ConfigError, match=r"already a mount of memory, of a.* test. Hint: .*penstock umount"):
        mount(served.directory, MountOptions(source="again"))
    assert served.run("cat", "small.txt").returncode == 0


def _has_interrupts(served: ServedMount, name: str) -> bool:
    """Whether the kernel has said that a signal came; it does not for reads that it began itself."""
    return name == "hangs" or "INTERRUPT" in served.tell("statistics")["requests"]


def _wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which the process that serves the mount can tell."""
    until_s = time.monotonic() + TIME_S_MAX
    while not condition():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.01)
