"""How a child process starts: command, environment and processors; how it is killed, and how it ends with its parent.

The threads of a Python process take turns at the interpreter. If they are on several processors, each turn wakes another
processor up, and small requests spend more time on that than on their work. On one processor, a thread goes on until it waits.
So a process of the gateway may stay on one processor; its child processes use all of them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.config import cores_count

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG = 1
_ALLOWED = sorted(os.sched_getaffinity(0))  # when the process started


def worker_command(module: str, end: socket.socket) -> list[str]:
    """Return ``python -m MODULE DESCRIPTOR PARENT``, whose arguments ``connect_to_parent`` takes.

    PARENT is the id of this process if the kernel may end the worker with it; otherwise 0. The kernel does so when the *thread*
    that started the worker ends, so only the main thread may ask for it.
    """
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    return [sys.executable, "-m", module, str(end.fileno()), str(parent)]


def python_path() -> str:
    """Return the ``PYTHONPATH`` with which another interpreter finds the modules that this process finds."""
    return os.pathsep.join(path for path in sys.path if path)


def described_end(exit_code: int) -> str:
    """Return how a process ended, for people; a negative exit code is the number of a signal."""
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


def stay_on_one_processor(number: int) -> None:
    """Keep this thread, and all that it starts, on one of the processors that this process may use.

    Args:
        number: The processors are counted from it, round and round.
    """
    cores_count()  # what depends on the number of processors, such as the number of workers, counts all of them
    os.sched_setaffinity(0, {_ALLOWED[number % len(_ALLOWED)]})


def use_all_processors(process_id: int) -> None:
    """Let a process that was just started use all processors that this process could use when it started."""
    with suppress(OSError):  # it has ended already, or its processors were taken away meanwhile
        os.sched_setaffinity(process_id, _ALLOWED)


def is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has not ended. One that has is not waited for, so that its number still means its group.

    It does not use ``poll``, which waits for an ended process, and gives None while another thread waits.
    """
    try:
        return process.returncode is None and (
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )
    except ChildProcessError:
        return False


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, and all of the group, also if the process itself has ended; idempotent.

    Once the process has been waited for, its number may mean another, and nothing is killed.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ── in the child ───────────────────────────────────────────────────────────────────────────────────────────────────────


def connect_to_parent(descriptor: str, parent: str, *, ignored: Iterable[signal.Signals]) -> socket.socket:
    """Return the socket to the process that started this one by ``worker_command``.

    Args:
        descriptor: Descriptor of the socket. Programs that this process starts do not inherit it.
        parent: Id of the parent process, with which the kernel ends this one; 0 if it must not.
        ignored: Signals that a terminal or a service manager sends to whole groups of processes: the parent decides.

    Raises:
        SystemExit: The parent has ended already.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if int(parent):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit()
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    return end


def watch_parent(end: socket.socket, then: Callable[[], object], *, grace_s: float) -> None:
    """Have a thread call `then` some time after the parent is gone, if this process has not ended by itself until then.

    Args:
        end: The socket to the parent, which may be closed meanwhile.
        then: Ends this process.
        grace_s: Time for an orderly end, in seconds.
    """
    descriptor = os.dup(end.fileno())

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        while not poll.poll():
            pass
        time.sleep(grace_s)
        then()

    threading.Thread(target=watch, name="penstock-parent", daemon=True).start()
