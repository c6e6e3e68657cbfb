"""Directories and files that are believed, or written over, because nobody but this user can have put them there.

A cache directory of another user can hold planted blocks and links. Its owner and mode are looked at once, when it is
opened; files in it are opened without following a link, and those that another user owns are not used, so that a
directory that is replaced later gives nothing either. Root can do all this anyway, and is trusted.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from penstock.errors import ConfigError


def is_trusted(status: os.stat_result) -> bool:
    """Whether this user, or root, owns it."""
    return status.st_uid in (os.geteuid(), 0)


def check_private(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a directory into which others could have put files.

    Args:
        path: Absolute. Where nothing is there, there is nothing to refuse.
        what: What it is to people: ``"cache"``.

    Raises:
        ConfigError: Another user owns it, group or others may write to it, or the way to it leads through a link that
            another user made.
        OSError: It cannot be looked at.

    Cost: a system call for each part of the path.
    """
    target, quoted = Path(path), shlex.quote(os.fspath(path))
    try:
        status = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    for parent in target.parents:
        link = parent.lstat()
        if stat.S_ISLNK(link.st_mode) and not is_trusted(link):
            raise ConfigError(f"the {what} directory {path} lies behind {parent}, a link that user {link.st_uid} made")
    if stat.S_ISLNK(status.st_mode):
        hint = f"name what it leads to: {shlex.quote(os.path.realpath(path))}"
        raise ConfigError(f"the {what} directory {path} is a symbolic link", hint=hint)
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if not is_trusted(status):
        raise ConfigError(
            f"the {what} directory {path} ({mode}) belongs to user {status.st_uid}, and you are user {os.geteuid()}: "
            "what lies there cannot be trusted",
            hint=f"name a directory of your own; or empty it, and as root: chown {os.geteuid()} {quoted}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the {what} directory {path} has {mode}: other users may write to it, so what lies there cannot be trusted",
            hint=f"chmod go-w {quoted}, after emptying it if somebody may have; or name a directory below it",
        )


def open_private(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file that is to be written, without following a link.

    Raises:
        PermissionError: Another user owns it, it has a second name, or it is no regular file.
        OSError: It is a link, or cannot be opened.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(fd)
        raise PermissionError(errno.EPERM, "another user's file, or one with a second name", os.fspath(path))
    return fd
