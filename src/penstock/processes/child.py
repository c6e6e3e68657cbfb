"""What a child process does for its parent: it ignores signals that are meant for the parent, and ends with it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG = 1


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
