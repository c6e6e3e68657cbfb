"""Entries read out of the page cache: by as many threads at a time as there are processors."""

from __future__ import annotations

import errno
import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Check: TypeAlias = Callable[[int], None]
    Reader: TypeAlias = Callable[[int, bytearray, memoryview, int, Check], bool]


class Turns:
    """Turns for what needs a processor. A disk is kept busy by more threads, which wait for it without a turn.

    Threads that copy and sum from memory hold each other up beyond the number of processors: each system call lets go of
    the interpreter, and comes back to a queue of others
    (docs/development/experiments.md: 4.5 context switches a block with 8 threads).
    """

    __slots__ = ("_can_tell", "_free")

    def __init__(self) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in os.sched_getaffinity(0):
            self._free.put(None)
        self._can_tell = True

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)

    def read_cached(self, fd: int, head: bytearray, view: memoryview, offset: int, check: Check) -> bool:
        """``read_waiting`` for who has a turn; False where the page cache does not have it all. Cost: two system calls."""
        if not self._can_tell or not self._is_here(fd, head, 0) or not self._is_here(fd, view, offset):
            return False
        check(len(view))
        return True

    def read_waiting(self, fd: int, head: bytearray, view: memoryview, offset: int, check: Check) -> bool:
        """Fill `head` from the start of a file and `view` from byte `offset`, then ``check(bytes of view that were there)``.

        `head` is read by itself. What follows the first page the kernel then reads ahead in larger and larger folios; read at
        once, all pages of a block are single ones, and cost twice as much each time that they are copied
        (docs/development/experiments.md).

        Raises:
            OSError: of reading.
            Whatever `check` does.
        """
        if head:
            os.preadv(fd, [head], 0)
        count = _read_all(fd, view, offset)
        with self:
            check(count)
        return True

    def _is_here(self, fd: int, view: bytearray | memoryview, offset: int) -> bool:
        """Fill `view` if the page cache has all of it."""
        if not len(view):
            return True
        try:
            return os.preadv(fd, [view], offset, os.RWF_NOWAIT) == len(view)
        except BlockingIOError:
            return False
        except OSError as error:
            self._can_tell = error.errno != errno.EOPNOTSUPP  # tmpfs, network file systems
            return False


def _read_all(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` as far as the file goes; bytes read. One system call unless a signal cuts it short."""
    done = os.preadv(fd, [view], offset)
    while 0 < done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
