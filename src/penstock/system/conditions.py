"""A condition that Ctrl-C cannot break.

Python runs the handler of SIGINT between the instructions of the main thread, wherever it is. ``threading.Condition`` is
written in Python, so a KeyboardInterrupt may leave its lock held for ever, or raise RuntimeError because the lock is not held
when its ``with`` ends. Of 220 interrupts at random moments of a loop that waits for small batches, two did that.
The training loop's thread therefore waits for a ``Condition`` of this file. Threads that penstock starts never see the
interrupt, and need no such care.
"""

from __future__ import annotations

import _thread
import sys
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Condition(_thread.RLock):  # type: ignore[misc]  # CPython allows subclasses
    """A lock, and a way to wait until another thread has changed what it guards; used like ``threading.Condition``.

    The lock is taken and released by C code, within one instruction. Its holder may take it again, but not while it waits.
    """

    def __init__(self) -> None:
        self._waiters: list[SimpleQueue[None]] = []

    if sys.version_info >= (3, 14):

        def __enter__(self) -> bool:
            """Take the lock; a handler that raises just after that, but before the block begins, leaves it as it was.

            From Python 3.14 on, ``with`` calls ``__enter__`` as any function, so a handler may run when a call of C code
            ends, with the lock taken and nobody to release it. It does not run when a function written in Python returns.
            """
            held_count = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                if self._recursion_count() > held_count:
                    self.release()
                raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Release the lock, wait until ``notify_all`` is called or the time is over, and take the lock again.

        An exception of a signal handler leaves the lock held, as a ``with`` around this call expects it.
        """
        waiter: SimpleQueue[None] = SimpleQueue()
        self._waiters.append(waiter)
        try:
            self.release()
            waiter.get(timeout=timeout_s)
        except Empty:
            pass
        finally:
            # No other call stands between the wait and acquire(), because a handler may run at the end of any call.
            try:
                self.acquire()
            except BaseException:  # the handler ran while this thread waited for the lock, or just after it
                if not self._is_owned():  # type: ignore[attr-defined]
                    self.acquire()
                raise

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Wait until `is_true` returns True. It is called with the lock held, at first and after each notification."""
        while not is_true():
            self.wait()

    def notify_all(self) -> None:
        """Wake all threads that wait; the caller holds the lock."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.put(None)
