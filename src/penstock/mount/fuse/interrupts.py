"""Lets programs die that are killed while they wait for a reply.

The kernel sends INTERRUPT, once for each request, when a signal reaches the thread that waits. Whatever the signal, the thread
then waits on until the reply comes. Only a fatal signal should end the wait, because programs do not expect ``EINTR`` from
reads of files, and a profiler's timer or the end of a child process would give it to them. A killed program that gets no reply
is an uninterruptible process (state D), which nothing but the end of the mount removes. The kernel does not say which signal it
was, so ``/proc`` is asked whether the thread is about to end. A thread of another process namespace cannot be asked; it waits
for the reply, as if there were no interrupts.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.mount.fuse.answering import KernelReply, Outbox

CHECK_INTERVAL_MS = 100
"""Time between two looks at a thread that received a signal and lives on; the kernel does not tell of later signals."""


def _bit(number: int) -> int:
    return 1 << (number - 1)


_KILL = _bit(signal.SIGKILL)
_HARMLESS = sum(
    _bit(number)
    for number in (
        *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    )
)
_MASKS = (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")


def is_fatal(status: bytes) -> bool:
    """Whether a signal is pending that ends the thread.

    Args:
        status: Contents of the thread's ``/proc/ID/status``.
    """
    masks = {line[:7]: int(line[7:], 16) for line in status.splitlines() if line[:7] in _MASKS}
    own, shared, blocked, ignored, caught = (masks.get(name, 0) for name in _MASKS)
    pending = own | shared
    return bool(pending & _KILL or pending & ~(blocked | ignored | caught | _HARMLESS))


def is_dying(thread_id: int) -> bool:
    """Whether a thread has ended, or is about to end because of a signal; False if it cannot be seen from here."""
    if not thread_id:
        return False
    try:
        return is_fatal(Path(f"/proc/{thread_id}/status").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


class InterruptedRequests:
    """The requests whose threads have received a signal, and were still alive then. Used by the session's thread alone."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: dict[int, KernelReply] = {}
        self._next_s = 0.0

    def interrupted(self, unique: int) -> None:
        """A thread that waits for the reply to a request has received a signal."""
        reply = self._outbox.waiting.get(unique)
        if reply is not None:
            self._watched[unique] = reply
            self._look_at(unique, reply)

    def check(self) -> None:
        """Answer the requests of threads that are about to end, and forget those that were answered."""
        for unique, reply in list(self._watched.items()):
            self._look_at(unique, reply)
        self._next_s = time.monotonic() + CHECK_INTERVAL_MS / 1000

    def _look_at(self, unique: int, reply: KernelReply) -> None:
        if reply.is_waiting and is_dying(reply.thread_id):
            self._outbox.abandon(reply)
        if not reply.is_waiting:
            del self._watched[unique]

    @property
    def wait_ms(self) -> int | None:
        """Longest time until the next ``check`` in milliseconds; None if none is needed."""
        return CHECK_INTERVAL_MS if self._watched else None

    @property
    def is_due(self) -> bool:
        """Whether it is time for ``check``."""
        return bool(self._watched) and time.monotonic() >= self._next_s
