"""A child process and all its descendants: they are one process group, which ends as a whole; and the output of the group.

The kernel can kill a process together with its parent, but not the processes that the killed process has started: a program
that a transform runs would stay for ever. So a process beside this one, the guard, ends the groups if this process is killed.
A process that watches from within its own group could not remove the group's folder afterwards, and would be left as a zombie
in a container whose first process is this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.processes.starting import kill_group, use_all_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ_BYTES = 16 * 1024
PIPE_BYTES = 64 * 1024
"""Capacity of a pipe: what a process that has stopped printing can have left in it."""
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
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    cwd="/",
                    env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                    start_new_session=True,  # signals to this process's group are not meant for it
                )
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


GUARD = GroupGuard()
"""The guard of this process."""


class ProcessGroup:
    """A process group. It is used on the event loop on which it was started.

    The ended process is not waited for before `release`, so that until then its number, which is that of the group, cannot mean
    any other process.

    Args:
        command: The command.
        on_exit: Called once when the process itself has ended; others of the group may still run.
        folder: Folder that belongs to the group. It is removed if this process is killed, otherwise by its owner.
        options: Options of ``subprocess.Popen``, one of which makes the process the leader of a group.

    Attributes:
        exited: Is set when the process itself has ended.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, on_exit: Callable[[], None], folder: str = "", **options: Any
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self.exited = asyncio.Event()
        self._process = subprocess.Popen(command, **options)
        use_all_processors(self._process.pid)
        GUARD.watch(self._process.pid, folder)
        self._pid_fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pid_fd, self._note_exit)

    @property
    def process_id(self) -> int:
        """Number of the process and of the group."""
        return self._process.pid

    @property
    def is_released(self) -> bool:
        """Whether the group has ended."""
        return self._pid_fd < 0

    def exit_code(self) -> int:
        """Return the exit status of the ended process, or the negative number of a signal."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, number: int) -> None:
        """Send a signal to the process itself."""
        if not self.is_released:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the whole group; idempotent."""
        kill_group(self._process)

    async def wait_exit(self, time_s_max: float | None = None) -> None:
        """Wait until the process itself has ended, or for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(time_s_max):
                await self.exited.wait()

    def release(self) -> None:
        """Kill the group, and wait for the process itself; idempotent. It blocks until the kernel has freed its memory."""
        if self.is_released:
            return
        self.kill()
        self._process.wait()
        GUARD.release(self._process.pid)
        self._note_exit()
        os.close(self._pid_fd)
        self._pid_fd = -1

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pid_fd)
        if not self.exited.is_set():
            self.exited.set()
            self._on_exit()


class OutputPipe:
    """Reads a pipe, and hands on its lines.

    Args:
        descriptor: Reading end of the pipe; it is closed with this object.
        on_line: Called with each line, without its line feed.
        line_bytes_max: Longest line in bytes. Longer ones are cut.
        pause_s: Time after each reading of 16 KiB, in seconds. It slows down a process that floods its output.
    """

    def __init__(
        self, descriptor: int, on_line: Callable[[bytes], None], *, line_bytes_max: int, pause_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._on_line = on_line
        self._line_bytes_max = line_bytes_max
        self._pause_s = pause_s
        self._paused: asyncio.TimerHandle | None = None
        self._rest = b""
        os.set_blocking(descriptor, False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> bool:
        """Read a piece, and return whether there was one."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data or self._pause_s:
            self._loop.remove_reader(self._descriptor)
        if not data:
            return False
        if self._pause_s:
            if self._paused is not None:
                self._paused.cancel()
            self._paused = self._loop.call_later(self._pause_s, self._listen)
        self.take(data)
        return True

    def take(self, data: bytes) -> None:
        """Hand on the lines that end in this piece."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._line_bytes_max:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line[: self._line_bytes_max])

    def drain(self) -> None:
        """Hand on all that was printed so far."""
        for _ in range(PIPE_BYTES // READ_BYTES):
            if self._descriptor < 0 or not self._read():
                break
        if self._rest:
            self.take(b"\n")

    def close(self) -> None:
        """Hand on the remaining output, and stop reading; idempotent."""
        if self._descriptor < 0:
            return
        self.drain()
        self._loop.remove_reader(self._descriptor)
        if self._paused is not None:
            self._paused.cancel()
        os.close(self._descriptor)
        self._descriptor = -1
