"""The table of mounts, and a watcher that unmounts when the process that serves a mount dies, however it dies.

After ``kill -9``, the directory would answer ``ENOTCONN`` until somebody unmounts it. A shell of its own session waits for the
end of a pipe whose other end the process holds; the kernel closes that end with the process. The shell then looks whether the
mount is still the same one, and unmounts it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from penstock.system import forks

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
        source: Name of its source, as in the table of mounts.
    """

    mount_id: int
    device: str
    directory: str
    kind: str
    source: str


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
    """Return the mount on a directory, given by its real path; of several mounts the one that hides the others."""
    return next(
        (entry for entry in reversed(parse_mount_table(_TABLE.read_bytes())) if entry.directory == directory), None
    )


def _text(field: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8) & 255]), field))


SHELL = "/bin/sh"

END_S_MAX = 10.0
"""Longest wait for the shell after it was told to end. It only has to read a line."""

_SCRIPT = """
trap '' HUP INT QUIT TERM PIPE
read -r line && exit 0
id=$1 device=$2
shift 2
while read -r mounted parent at rest; do
    if [ "$mounted $at" = "$id $device" ]; then exec "$@"; fi
done < /proc/self/mountinfo
"""


class Watcher:
    """The shell that unmounts a mount when this process is gone.

    Args:
        entry: The mount.
        command: Command that unmounts it.

    Cost: a process of 1 MB, and a descriptor.
    """

    def __init__(self, entry: MountEntry, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [SHELL, "-c", _SCRIPT, "penstock-unmount", str(entry.mount_id), entry.device, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        forks.register(self)

    def close(self) -> None:
        """End it without unmounting. Idempotent."""
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(b"\n")
            pipe.close()
        except BrokenPipeError:
            pass  # somebody killed it
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def after_fork_in_child(self) -> None:
        """Close the pipe in a forked child, which may live longer than this process."""
        pipe = self._process.stdin
        if pipe is not None:
            pipe.close()
        self._process.returncode = 0  # the shell is not this process's child, so there is nothing to wait for
