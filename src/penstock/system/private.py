"""Directories and files that penstock may trust or overwrite, because no other user can have put them there.

Another user's cache directory may contain planted blocks and links. The owner and the mode of a directory are checked once,
when it is opened. Files in it are opened without following links, and files of other users are not used, so replacing the
directory later achieves nothing either. Root is trusted, as it could do all of this anyway.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from penstock.errors import ConfigError


def is_trusted(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return status.st_uid in (os.geteuid(), 0)


def others_can_read(status: os.stat_result, user_id: int | None = None) -> bool:
    """Whether a file of secrets can be read by users who should not.

    If root owns the file and this user is another one, the installation lets this user read it by the bits of the group:
    packages install ``root:service`` with mode 0640, Kubernetes mounts secrets with 0440, and systemd's ``LoadCredential=``
    adds an ACL for the user, whose mask is shown there.

    Args:
        status: Status of the file.
        user_id: The user who reads it; None for the one of this process.
    """
    is_meant = status.st_uid == 0 and (os.geteuid() if user_id is None else user_id) != 0
    return bool(status.st_mode & (stat.S_IROTH if is_meant else stat.S_IRGRP | stat.S_IROTH))


def check_private(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a directory into which other users could have put files.

    Args:
        path: Absolute path of the directory. If it does not exist, the check passes.
        what: The purpose of the directory, for messages: ``"cache"``.

    Raises:
        ConfigError: Another user owns the directory, group or others may write to it, or its path leads through a link
            that another user created.
        OSError: The directory cannot be examined.

    Cost: one system call for each part of the path.
    """
    target, quoted = Path(path), shlex.quote(os.fspath(path))
    try:
        status = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    for parent in target.parents:
        link = parent.lstat()
        if stat.S_ISLNK(link.st_mode) and not is_trusted(link):
            raise ConfigError(
                f"the {what} directory {path} lies behind {parent}, a link that user {link.st_uid} created"
            )
    if stat.S_ISLNK(status.st_mode):
        hint = f"name its target: {shlex.quote(os.path.realpath(path))}"
        raise ConfigError(f"the {what} directory {path} is a symbolic link", hint=hint)
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if not is_trusted(status):
        raise ConfigError(
            f"the {what} directory {path} ({mode}) belongs to user {status.st_uid}, and you are user {os.geteuid()}: "
            "its contents cannot be trusted",
            hint=f"name a directory of your own; or empty it, and as root: chown {os.geteuid()} {quoted}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the {what} directory {path} has {mode}: other users may write to it, so its contents cannot be trusted",
            hint=f"chmod go-w {quoted}, after emptying it if somebody may have written to it; or name a directory below it",
        )


def open_private(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file that is to be written, without following a link.

    Args:
        path: Path of the file.
        flags: Flags for ``os.open``.
        mode: Mode of the file if it is created.

    Returns:
        A file descriptor.

    Raises:
        PermissionError: Another user owns the file, it has a second name, or it is not a regular file.
        OSError: The path is a link, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(fd)
        raise PermissionError(errno.EPERM, "another user owns the file, or it has a second name", os.fspath(path))
    return fd
