"""Mounting and unmounting: as root by system calls, otherwise by ``fusermount3`` of the package fuse3."""

from __future__ import annotations

import array
import ctypes
import errno
import logging
import os
import shlex
import shutil
import socket
import stat
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import KIB
from penstock.errors import ConfigError
from penstock.mount.fuse.watching import KIND, Watcher, find_mount

if TYPE_CHECKING:
    from penstock.mount.fuse.watching import MountEntry

DEVICE = "/dev/fuse"
ANSWER_S_MAX = 5.0
"""How long a process that serves a mount may take to say that it lives; it has nothing to ask for that."""

_CONTAINER = (
    "in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN "
    "and, with AppArmor, --security-opt apparmor=unconfined"
)
_FLAGS = 1 | 2 | 4 | 1024  # MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME
_DETACH, _NO_FOLLOW = 2, 8

PROGRAM = "fusermount3"
PROGRAM_S_MAX = 30.0
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

_log = logging.getLogger("penstock")
_DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""Answers of a mount whose process has died; the second while it is dying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """The options of a mounted file system. It is always read-only, without devices, set-user-id programs and access times.

    Attributes:
        source: Name that ``mount`` and ``df`` show, such as a URL without credentials.
        allow_other: Whether other users may use it. Without root, this needs ``user_allow_other`` in ``/etc/fuse.conf``.
        nonempty: Whether the directory may have contents, which the mount hides.
        auto_unmount: Whether the mount disappears when this process is killed; this takes a small process that watches.
    """

    source: str
    allow_other: bool = False
    nonempty: bool = False
    auto_unmount: bool = True

    def __post_init__(self) -> None:
        if not self.source.isprintable() or not self.source:
            raise ConfigError(f"source={self.source!r} must be printable text")


class Mounted:
    """A mounted file system, which a ``FuseSession`` has to serve.

    Attributes:
        descriptor: Open ``/dev/fuse``. The session owns it: it closes it.
        entry: Line of the kernel's table of mounts.
    """

    def __init__(self, descriptor: int, entry: MountEntry, *, auto_unmount: bool) -> None:
        self.descriptor = descriptor
        self.entry = entry
        self._watcher = _watcher(entry) if auto_unmount else None

    def set_read_ahead(self, length_bytes: int) -> bool:
        """Set how far the kernel reads ahead of a sequential reader, which bounds the length of its requests.

        Call it when the session is ready: the kernel sets its default of 128 KiB while it begins.

        Returns:
            Whether the system permits it; root may do it, unless ``/sys`` is read-only as in many containers.
        """
        try:
            Path(f"/sys/class/bdi/{self.entry.device}/read_ahead_kb").write_text(str(length_bytes // KIB))
        except OSError as error:
            _log.info("The read-ahead of %s remains as it is: %s.", self.entry.directory, error)
            return False
        return True

    def is_mounted(self) -> bool:
        """Whether it is still mounted on its directory, and no other mount hides it."""
        return find_mount(self.entry.directory) == self.entry

    def unmount(self, *, is_lazy: bool = True) -> None:
        """Unmount it, unless that has been done already. The session then ends when the last program has closed its files.

        Args:
            is_lazy: Take it away from the directory now, even if programs use it.

        Raises:
            ConfigError: Programs use it, and `is_lazy` is False; or the system refuses.
        """
        if self.is_mounted():
            _unmount(self.entry.directory, is_lazy=is_lazy)
        if self._watcher is not None:
            self._watcher.close()


def mount(directory: str | os.PathLike[str], options: MountOptions) -> Mounted:
    """Mount a file system that this process serves. Until a ``FuseSession`` runs, programs that use it wait.

    The stale mount of a process that was killed is removed first.

    Raises:
        ConfigError: The directory or the system does not permit it; the message says why, and the hint what to do.
    """
    path = _checked_directory(directory, options)
    descriptor = _mount_as_root(path, options) if os.geteuid() == 0 else _mount_as_user(path, options)
    try:
        entry = find_mount(path)
        if entry is None or entry.kind != KIND:
            raise ConfigError(f"{path} was mounted, but somebody has unmounted it again")
        return Mounted(descriptor, entry, auto_unmount=options.auto_unmount)
    except BaseException:
        with suppress(ConfigError):
            _unmount(path, is_lazy=True)
        os.close(descriptor)
        raise


def unmount(directory: str | os.PathLike[str], *, is_lazy: bool = False) -> None:
    """Unmount a file system of penstock, whichever process serves it; also a stale one.

    Raises:
        ConfigError: Nothing of penstock is mounted there, programs use it and `is_lazy` is False, or the system refuses.
    """
    path = _real_path(directory)
    entry = find_mount(path)
    if entry is None:
        raise ConfigError(f"nothing is mounted on {path}", hint="findmnt -t fuse.penstock lists what is mounted")
    if entry.kind != KIND:
        raise ConfigError(
            f"{path} is a mount of type {entry.kind}, not one of penstock", hint=f"umount {shlex.quote(path)}"
        )
    _unmount(path, is_lazy=is_lazy)


def remove_stale(directory: str | os.PathLike[str]) -> bool:
    """Unmount a file system of penstock whose process has died; whether there was one.

    Raises:
        ConfigError: The system refuses.
    """
    path = _real_path(directory)
    entry = find_mount(path)
    if entry is None or entry.kind != KIND or not _is_stale(path):
        return False
    _unmount(path, is_lazy=True)
    _log.warning("%s was still mounted by a process that has died; it was unmounted.", path)
    return True


def _is_stale(path: str) -> bool:
    """Whether the process that served a mount has died. One that does not answer for ``ANSWER_S_MAX`` seconds lives."""
    found: list[bool] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # unlike stat, this always asks the process that serves the mount
        except OSError as error:
            found.append(error.errno in _DEAD)

    # A stopped process would make this one wait for ever; the thread that waits ends with this process.
    thread = threading.Thread(target=ask, name="penstock-stale", daemon=True)
    thread.start()
    thread.join(ANSWER_S_MAX)
    return found == [True]


def _real_path(directory: str | os.PathLike[str]) -> str:
    """The path as the table of mounts shows it. A mount is not touched: its process may hang or be gone."""
    given = Path(directory).absolute()
    if given.name in ("", ".."):
        return os.path.realpath(given)
    path = os.path.join(os.path.realpath(given.parent), given.name)  # noqa: PTH118 - the path is text
    return path if find_mount(path) is not None else os.path.realpath(path)


def _checked_directory(directory: str | os.PathLike[str], options: MountOptions) -> str:
    path = _real_path(directory)
    quoted = shlex.quote(path)
    while remove_stale(path):
        pass
    entry = find_mount(path)
    if entry is not None and entry.kind == KIND:
        raise ConfigError(
            f"{path} is already a mount of {entry.source}",
            hint=f"choose another directory, or: penstock umount {quoted}",
        )
    try:
        status = os.stat(path)  # noqa: PTH116 - the path is text
        has_contents = stat.S_ISDIR(status.st_mode) and any(Path(path).iterdir())
    except FileNotFoundError:
        raise ConfigError(f"the directory {path} does not exist", hint=f"mkdir -p {quoted}") from None
    except OSError as error:
        hint = f"the process that served it has died: fusermount3 -u -z {quoted}" if error.errno in _DEAD else None
        raise ConfigError(f"{path} cannot be used as a mount point: {error.strerror}", hint=hint) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory")
    if has_contents and not options.nonempty:
        raise ConfigError(
            f"the directory {path} is not empty, and a mount would hide its contents", hint="name an empty one"
        )
    return path


def _mount_as_root(path: str, options: MountOptions) -> int:
    try:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = f"load the kernel's module as root: modprobe fuse; {_CONTAINER}"
        raise ConfigError(f"{DEVICE} cannot be opened: {error.strerror}", hint=hint) from None
    words = [
        f"fd={descriptor}",
        "rootmode=40000",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
        "default_permissions",
    ]
    if options.allow_other:
        words.append("allow_other")
    try:
        source, target = os.fsencode(options.source), os.fsencode(path)
        _system_call("mount", path, source, target, KIND.encode(), ctypes.c_ulong(_FLAGS), ",".join(words).encode())
    except OSError as error:
        os.close(descriptor)
        advice = _CONTAINER if error.errno in (errno.EPERM, errno.EACCES) else None
        raise ConfigError(f"{path} cannot be mounted: {error.strerror}", hint=advice) from None
    return descriptor


def _mount_as_user(path: str, options: MountOptions) -> int:
    escaped = options.source.replace("\\", "\\\\").replace(",", "\\,")
    words = ["ro", "nosuid", "nodev", "noatime", f"fsname={escaped}", "subtype=penstock", "default_permissions"]
    if options.allow_other:
        words.append("allow_other")
    ours, its = socket.socketpair()
    with ours:
        with its:
            process = _started([PROGRAM, "-o", ",".join(words), "--", path], its)
        ours.settimeout(PROGRAM_S_MAX)
        try:
            descriptor = _received(ours)
        except TimeoutError:
            process.kill()
            descriptor = None
        _, said = process.communicate()
    if descriptor is None:
        raise _refused(f"{path} cannot be mounted", said)
    return descriptor


def _unmount(path: str, *, is_lazy: bool) -> None:
    if os.geteuid() != 0:
        _unmount_as_user(path, is_lazy=is_lazy)
        return
    try:
        _system_call("umount2", path, os.fsencode(path), ctypes.c_int(_NO_FOLLOW | (_DETACH if is_lazy else 0)))
    except OSError as error:
        hint = (
            "end the programs that use it (fuser -m lists them), or unmount lazily"
            if error.errno == errno.EBUSY
            else None
        )
        raise ConfigError(f"{path} cannot be unmounted: {error.strerror}", hint=hint) from None


def _unmount_as_user(path: str, *, is_lazy: bool) -> None:
    process = _started([PROGRAM, "-u", *(["-z"] if is_lazy else []), "--", path])
    try:
        _, said = process.communicate(timeout=PROGRAM_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    if process.returncode:
        raise _refused(f"{path} cannot be unmounted", said)


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
    """The error for the output of the program, with a hint."""
    reason = "; ".join(line.removeprefix(f"{PROGRAM}: ") for line in said.strip().splitlines())
    hint = next((hint for text, hint in _HINTS.items() if text in reason), None)
    return ConfigError(f"{what}: {reason or f'{PROGRAM} gave no reason'}", hint=hint)


def _system_call(name: str, path: str, *arguments: object) -> None:
    """Call ``mount`` or ``umount2``, which Python does not have.

    Raises:
        OSError: The system refuses; ``EBUSY`` if files are open and ``_DETACH`` is not among the flags.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def _watcher(entry: MountEntry) -> Watcher | None:
    """The watcher that unmounts when this process dies; None if the system has no shell, as in the smallest containers."""
    try:
        return Watcher(entry, _unmount_command(entry.directory))
    except OSError as error:
        _log.warning("If this process is killed, %s will stay mounted: %s.", entry.directory, error)
        return None


def _unmount_command(path: str) -> list[str]:
    """The command by which a shell unmounts."""
    program = shutil.which(PROGRAM)
    if program is not None:
        return [program, "-u", "-z", "-q", "--", path]
    return ["umount", "-l", "--", path]
