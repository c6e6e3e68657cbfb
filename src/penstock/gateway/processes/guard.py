"""One process beside the gateway that ends the process groups of transforms if the gateway is killed.

The kernel can kill a process together with the one that started it, but not what that process has started itself: a program
that a transform runs would stay for ever. A process that watches from within its own group could not remove the group's
folder afterwards, and would be left as a zombie in a container in which the gateway is the first process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_SCRIPT = Path(__file__).with_name("orphans.py")
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")


class GroupGuard:
    """Tells the process which groups there are; it runs as long as there are any. All methods may be called from any thread.

    Cost: a process of 10 MB, which takes 20 ms of processor time to start, once for all groups.
    """

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def watch(self, group_id: int, folder: str = "") -> None:
        """Have a process group killed, and its folder removed, when this process ends without having ended the group."""
        with self._lock:
            self._folders[group_id] = folder
            if self._process is None:
                self._process = _started()
            self._tell(group_id, folder)

    def release(self, group_id: int) -> None:
        """Forget a process group that has ended; idempotent."""
        with self._lock:
            if self._folders.pop(group_id, None) is None:
                return
            if self._folders:
                self._tell(group_id, None)
            elif self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _tell(self, group_id: int, folder: str | None) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it; then groups end as the kernel ends them
            self._process.stdin.write(json.dumps([group_id, folder]).encode() + b"\n")


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        start_new_session=True,  # signals to the gateway's group are not meant for it
    )


GUARD = GroupGuard()
"""The guard of this process."""
