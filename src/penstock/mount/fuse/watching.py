"""Unmounts when the process that serves a mount dies, however it dies.

After ``kill -9``, the directory would answer ``ENOTCONN`` until somebody unmounts it. A shell of its own session waits for the
end of a pipe whose other end the process holds; the kernel closes that end with the process. The shell then looks whether the
mount is still the same one, and unmounts it.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from penstock.system import forks

if TYPE_CHECKING:
    from penstock.mount.fuse.mount_table import MountEntry

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
