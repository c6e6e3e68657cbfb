"""Files of an earlier download become those of a channel without a copy: by hard links, or else by shared blocks."""

from __future__ import annotations

import errno
import fcntl
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FICLONE = 0x40049409
_OTHER_WAYS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def link_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or else a file of the same contents.

    Raises:
        OSError: The system failed, for example because the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _OTHER_WAYS:
            raise
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its times; file systems that can share the blocks of two files do so."""
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            shutil.copyfileobj(reader, writer, 8 << 20)
    shutil.copystat(source, target)
