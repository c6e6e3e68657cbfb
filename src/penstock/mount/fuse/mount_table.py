"""The table of what is mounted, as ``/proc/self/mountinfo`` shows it. Reading it touches no file system but ``/proc``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

KIND = "fuse.penstock"
"""What the table shows as the type of our file systems."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")
_TABLE = Path("/proc/self/mountinfo")


class MountEntry(NamedTuple):
    """A line of the table.

    Attributes:
        mount_id: Number of the mount; it is used again after the mount is gone.
        device: Numbers of the device, ``major:minor``.
        directory: Path that it is mounted on.
        kind: Type of the file system.
        source: Name of what it shows, as in the table of mounts.
    """

    mount_id: int
    device: str
    directory: str
    kind: str
    source: str


def read_mount_table() -> list[MountEntry]:
    """Return everything that is mounted, in the order of the table: what hides another mount comes after it."""
    return parse_mount_table(_TABLE.read_bytes())


def parse_mount_table(table: bytes) -> list[MountEntry]:
    """Return the entries of a table; lines that are not as expected are left out."""
    entries = []
    for line in table.split(b"\n"):
        fields = line.split(b" ")
        try:
            end = fields.index(b"-", 6)
            number, device, directory, kind, source = (
                int(fields[0]),
                fields[2],
                fields[4],
                fields[end + 1],
                fields[end + 2],
            )
        except (ValueError, IndexError):
            continue
        entries.append(MountEntry(number, *(_text(field) for field in (device, directory, kind, source))))
    return entries


def find_mount(directory: str) -> MountEntry | None:
    """Return what is mounted on a directory, given by its real path; of several mounts the one that hides the others."""
    return next((entry for entry in reversed(read_mount_table()) if entry.directory == directory), None)


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 255]), field))
