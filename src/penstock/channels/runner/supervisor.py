"""A program that starts another one, adopts the orphaned processes of that program, and ends all when its own parent is gone.

It runs by ``python -I -S supervisor.py SETTINGS`` and imports the standard library only, so that it starts in milliseconds and
holds little memory. SETTINGS is JSON: ``command``, ``control_fd``, ``status_fd``, ``stop_s``, ``base`` and ``is_private``.

Control, a byte at a time: the number of a signal that the program gets, or 0 to end everything. The end of the control pipe
means that the runner is gone. Status, one line: ``exit N``, ``signal N`` or ``error ERRNO``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MNT_DETACH = 2
_STDERR = 2
END_S_MAX = 10.0
"""How long processes may take to vanish after SIGKILL; those in uninterruptible sleep are left to the kernel."""

OUTLIVED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal or a scheduler sends to a whole group of processes."""

LOCK_NAME = ".penstock-lock"
MOUNT_TYPE = b"fuse.penstock"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the program of the settings in ``sys.argv[1]``."""
    settings = json.loads(sys.argv[1])
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep_descriptors()
    # Ctrl-C reaches the program, which this process has to outlive. What was ignored before stays so for the program: nohup.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in OUTLIVED}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    pid = start(settings, heard=heard)
    if pid is not None:
        supervise(settings, pid)


def keep_descriptors() -> None:
    """Hide the runner's descriptors from the program, which would hold the lock of the run and its pipes."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - without pathlib's objects
        if int(name) > _STDERR:
            with contextlib.suppress(OSError):  # the descriptor of this listing
                os.set_inheritable(int(name), False)


def start(settings: dict[str, Any], *, heard: list[signal.Signals]) -> int | None:
    """Start the program; None if it cannot be started, which the status says.

    Args:
        settings: Command, base directory, control descriptor and time limit in seconds, as the runner passes them.
        heard: Signals that it does not ignore at its start.
    """
    failure_r, failure_w = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for number in (*heard, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                os.execvp(settings["command"][0], settings["command"])
        except OSError as error:
            os.write(failure_w, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(failure_w)
    failure = os.read(failure_r, 16)
    os.close(failure_r)
    if failure:
        os.waitpid(pid, 0)
        _report(settings, f"error {failure.decode()}")
        return None
    return pid


def supervise(settings: dict[str, Any], pid: int) -> None:
    """Wait for the end of the program or of the runner, and end the remaining processes."""
    control_fd, stop_s = settings["control_fd"], settings["stop_s"]
    program_fd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(control_fd, select.POLLIN)
    poller.register(program_fd, select.POLLIN)
    is_orphaned, deadline_s = False, None
    while True:
        wait_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1000
        ready = {fd for fd, _ in poller.poll(wait_ms)}
        if program_fd in ready:
            break
        if control_fd in ready:
            data = os.read(control_fd, 64)
            if not data:
                is_orphaned, deadline_s = True, time.monotonic() + stop_s
                poller.unregister(control_fd)
                _send(program_fd, signal.SIGTERM)
            for number in data:
                if number:
                    _send(program_fd, number)
                else:
                    deadline_s = 0.0
        if deadline_s is not None and time.monotonic() >= deadline_s:
            _send(program_fd, signal.SIGKILL)
            deadline_s = time.monotonic() + END_S_MAX
    _, status = os.waitpid(pid, 0)
    end_children()
    code = os.waitstatus_to_exitcode(status)
    _report(settings, f"exit {code}" if code >= 0 else f"signal {-code}")
    if is_orphaned:
        clean(Path(settings["base"]), is_private=settings["is_private"])


def _send(program_fd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program_fd, number)


def _report(settings: dict[str, Any], line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the runner is gone
        os.write(settings["status_fd"], line.encode() + b"\n")


def end_children() -> None:
    """Kill every process that this one has started or adopted, and their children, until there is none."""
    deadline_s = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline_s:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the children of this process."""
    found = []
    me = os.getpid()
    for entry in os.listdir("/proc"):  # noqa: PTH208 - without pathlib's objects for each process
        if entry.isdecimal():
            try:
                text = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[1]) == me:
                found.append(int(entry))
    return found


def clean(base: Path, *, is_private: bool) -> None:
    """Unmount all mounts below a base directory and remove its FIFOs; a private one is removed, unless it has results.

    Args:
        base: The base directory.
        is_private: Whether the run made it for itself.
    """
    unmount_below(base)
    if not is_private:
        data = base / "input" / "data"
        if os.path.realpath(data) == os.path.join(os.path.realpath(base), "input", "data") and data.is_dir():  # noqa: PTH118
            for path in data.iterdir():
                if stat.S_ISFIFO(path.lstat().st_mode):
                    path.unlink()
        return
    if has_results(base):
        shutil.rmtree(base / "input", ignore_errors=True)
        (base / LOCK_NAME).unlink(missing_ok=True)
    elif not mounts_below(base):
        shutil.rmtree(base, ignore_errors=True)


def has_results(base: Path) -> bool:
    """Whether a program has left files that are nowhere else."""
    folders = (base / "model", base / "output", base / "checkpoints")
    failure = base / "output" / "failure"  # it is reported
    return any(path != failure for folder in folders for path in files_in(folder))


def files_in(folder: Path) -> Iterator[Path]:
    """Iterate over the files in a directory; over itself alone, if the program has put something else in its place."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        yield folder
        return
    for path, _, names in os.walk(folder):
        for name in names:
            yield Path(path, name)


def mounts_below(base: Path, *, kind: bytes = b"") -> list[str]:
    """Return the mount points below a directory, the deepest first.

    Args:
        base: The directory.
        kind: Beginning of the type of their file systems.
    """
    found = []
    root = os.path.realpath(base)  # the kernel shows paths without links
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # the kernel writes white space and backslashes as octal numbers
        path = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line.split()[4]))
        if path.startswith(f"{root}/") and line.partition(b" - ")[2].startswith(kind):
            found.append(path)
    return sorted(found, key=len, reverse=True)


def unmount_below(base: Path) -> None:
    """Unmount what penstock has mounted below a directory, also if it is busy or has lost its daemon.

    Others' mounts stay, such as the volumes that a container has there.
    """
    for path in mounts_below(base, kind=MOUNT_TYPE):
        if _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
            continue
        for program in ("fusermount3", "fusermount"):
            if shutil.which(program):
                subprocess.run([program, "-u", "-z", "--", path], check=False, stderr=subprocess.DEVNULL, timeout=10)
                break


if __name__ == "__main__":
    main()
