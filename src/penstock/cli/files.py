"""One downloaded file: never half-visible, and recognised by the next run.

It is written under a temporary name beside its target and renamed when it is whole. Its modification time becomes the
object's, and its ETag an extended attribute where the file system keeps them: by size, time and ETag the next run
knows that it is there already. The temporary name follows from the target, and is locked: what a killed run left is
taken over and written anew, and two runs never write the same one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, StoreError
from penstock.locks import try_lock_file
from penstock.private import open_private
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.types import ObjectInfo

ETAG_ATTRIBUTE = b"user.penstock.etag"

FATAL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Errors of this machine that no other file would escape."""


class Download:
    """A file being written.

    Args:
        path: The target; its directories are made.
        info: The object.

    Raises:
        StoreError: a file stands where a directory is needed, or the other way round; another process writes it.
        OSError: the disk is full, ...
    """

    def __init__(self, path: Path, info: ObjectInfo) -> None:
        self.path = path
        self.info = info
        digest = hashlib.blake2b(os.fsencode(path.name), digest_size=12).hexdigest()
        self.temporary = path.with_name(f"{TEMPORARY_PREFIX}{digest}{TEMPORARY_SUFFIX}")
        refuse_special(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"{path.parent} is, or runs through, a file", hint="keys 'a' and 'a/b' cannot both become files"
            ) from error
        self._fd = self._locked()
        os.ftruncate(self._fd, 0)
        self.size_bytes = 0

    def _locked(self) -> int:
        """The temporary file, ours alone."""
        while True:
            fd = open_private(self.temporary, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                if not try_lock_file(fd):
                    os.close(fd)
                    raise StoreError(f"{self.path} is being written by another process")
                if os.path.samestat(os.fstat(fd), self.temporary.stat()):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)  # it was finished, and given its name, between our opening it and the lock

    def write(self, data: memoryview) -> None:
        """Append."""
        self.size_bytes += len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            error.filename = str(self.path)  # the system knows but the descriptor
            raise

    def commit(self) -> None:
        """Give it its name.

        Raises:
            StoreError: it has not the object's size.
        """
        if self.size_bytes != self.info.size_bytes:
            raise StoreError(f"{self.path}: {self.size_bytes} bytes arrived, not {self.info.size_bytes} as listed")
        if self.info.etag:
            with suppress(OSError):  # this file system keeps no attributes; size and time have to do
                os.setxattr(self._fd, ETAG_ATTRIBUTE, self.info.etag.encode())
        if self.info.last_modified_s is not None:
            os.utime(self._fd, (self.info.last_modified_s, self.info.last_modified_s))
        self.temporary.replace(self.path)
        os.close(self._fd)

    def abort(self) -> None:
        """Leave nothing."""
        self.temporary.unlink(missing_ok=True)  # before the lock goes with the descriptor
        os.close(self._fd)


def one_line(error: Exception) -> str:
    """What people read: ours in one line, the system's with the file it is of."""
    if isinstance(error, PenstockError) or not isinstance(error, OSError):
        return " ".join(str(error).split())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def refuse_special(path: Path) -> None:
    """Refuse a target that is neither nothing nor a file: giving a download its name would do away with a device.

    Raises:
        StoreError: `path` is a directory, a device, a pipe, ...
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        raise StoreError(f"{path} is a directory", hint="keys 'a' and 'a/b' cannot both become files")
    if not stat.S_ISREG(mode):
        raise StoreError(f"{path} is no regular file", hint="penstock cat URL > path writes to devices and pipes")


def is_there(path: Path, info: ObjectInfo) -> bool:
    """Whether `path` is a file that was downloaded from this version of the object, and was not changed since."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if info.last_modified_s is None or status.st_size != info.size_bytes:
        return False
    if int(status.st_mtime) != int(info.last_modified_s):
        return False
    try:
        return os.getxattr(path, ETAG_ATTRIBUTE) == (info.etag or "").encode()
    except OSError:
        return True
