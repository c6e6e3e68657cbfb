"""Ends process groups when the process that started them is gone: a program of its own, which needs only the standard library.

It reads the groups from standard input: a line of JSON with the number of a group, and the folder that belongs to it, or null
when the group has ended. The end of the input means that the process that started them has ended, however that happened. Then
the remaining groups are killed, and their folders are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys


def main() -> None:
    """Read until the input ends, then end the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders: dict[int, str] = {}
    for line in sys.stdin.buffer:
        group, folder = json.loads(line)
        if folder is None:
            folders.pop(group, None)
        else:
            folders[group] = folder
    for group in folders:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in filter(None, folders.values()):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
