"""A process of a transform and all that it starts: they are one process group, which ends as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.gateway.processes.guard import GUARD
from penstock.gateway.processes.processors import use_all_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ProcessGroup:
    """A process group. It is used on the event loop on which it was started.

    The ended process is not waited for before `release`, so that until then its number, which is that of the group, cannot mean
    any other process.

    Args:
        command: The command.
        on_exit: Called once when the process itself has ended; others of the group may still run.
        folder: Folder that belongs to the group. It is removed if the gateway is killed, otherwise by its owner.
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
        if not self.is_released:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

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
