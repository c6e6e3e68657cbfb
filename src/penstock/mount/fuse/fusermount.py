"""``fusermount3`` of the package fuse3 mounts and unmounts for users who may not do so themselves."""

from __future__ import annotations

import array
import os
import shutil
import socket
import subprocess

from penstock.errors import ConfigError

PROGRAM = "fusermount3"
TIME_S_MAX = 30.0
"""Longest time that the program may take. It makes a few system calls."""

_INSTALL = "install the package fuse3 (apt install fuse3; dnf install fuse3), or mount as root"
_HINTS = {
    "user_allow_other": "have root add the line user_allow_other to /etc/fuse.conf, or leave allow_other out",
    "fuse device not found": "load the kernel's module as root: modprobe fuse; in a container: --device /dev/fuse",
    "failed to open /dev/fuse": "in a container, start it with --device /dev/fuse and --cap-add SYS_ADMIN",
    "Operation not permitted": (
        "fusermount3 must belong to root with mode 4755; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
    ),
    "no write access": "choose a directory that belongs to you",
    "too many FUSE filesystems": "unmount some, or have root raise mount_max in /etc/fuse.conf",
    "busy": "end the programs that use it, or unmount lazily",
}


def mount(directory: str, *, options: list[str]) -> int:
    """Mount a FUSE file system, and return the open ``/dev/fuse``.

    Raises:
        ConfigError: The program is missing, or refuses.
    """
    ours, its = socket.socketpair()
    with ours:
        with its:
            process = _started([PROGRAM, "-o", ",".join(options), "--", directory], its)
        ours.settimeout(TIME_S_MAX)
        try:
            descriptor = _received(ours)
        except TimeoutError:
            process.kill()
            descriptor = None
        _, said = process.communicate()
    if descriptor is None:
        raise _refused(f"{directory} cannot be mounted", said)
    return descriptor


def unmount(directory: str, *, is_lazy: bool) -> None:
    """Unmount what is mounted on a directory.

    Raises:
        ConfigError: The program is missing, or refuses.
    """
    process = _started([PROGRAM, "-u", *(["-z"] if is_lazy else []), "--", directory])
    try:
        _, said = process.communicate(timeout=TIME_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    if process.returncode:
        raise _refused(f"{directory} cannot be unmounted", said)


def _started(command: list[str], its: socket.socket | None = None) -> subprocess.Popen[str]:
    if shutil.which(PROGRAM) is None:
        raise ConfigError(f"{PROGRAM} is not installed", hint=_INSTALL)
    given = {} if its is None else {"_FUSE_COMMFD": str(its.fileno())}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | given | {"LC_ALL": "C"},
        pass_fds=() if its is None else (its.fileno(),),
    )


def _received(ours: socket.socket) -> int | None:
    """Receive the descriptor that the program sends; None if it ended without one."""
    size = array.array("i").itemsize
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(size))
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % size])
    if not numbers:
        return None
    os.set_inheritable(numbers[0], False)
    return numbers[0]


def _refused(what: str, said: str) -> ConfigError:
    """The error that says what the program printed, with what helps."""
    reason = "; ".join(line.removeprefix(f"{PROGRAM}: ") for line in said.strip().splitlines())
    hint = next((hint for text, hint in _HINTS.items() if text in reason), None)
    return ConfigError(f"{what}: {reason or f'{PROGRAM} gave no reason'}", hint=hint)
