"""Limits the threads that read entries from the page cache at the same time to the number of processors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Check: TypeAlias = Callable[[int], None]
    ReadFunction: TypeAlias = Callable[[int, bytearray, memoryview, int, Check], bool]


_IN_MEMORY = ("tmpfs", "ramfs")


class CpuSlots:
    """A slot for each processor, held while a thread copies from memory or computes a checksum.

    Threads that read from a disk wait without a slot, since more of them keep the disk busy. Threads that copy from memory
    slow each other down once they outnumber the processors: each system call releases the interpreter, and the thread then
    queues for it behind the others. Eight threads on two processors had 5.4 context switches per block.

    Source: docs/development/measurements.md.
    """

    __slots__ = ("_can_tell", "_free", "_is_memory")

    def __init__(self) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in os.sched_getaffinity(0):
            self._free.put(None)
        self._can_tell = True
        self._is_memory = False  # known once the kernel could not tell which pages are cached

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)

    def read_cached(self, fd: int, head: bytearray, view: memoryview, offset: int, check: Check) -> bool:
        """Do the work of ``read_waiting`` for a thread that holds a slot, if all of the bytes are in memory.

        Returns:
            False if they are not; `head` and `view` may then be partly filled.

        Cost: two system calls.
        """
        if not self._fill_from_memory(fd, head, 0) or not self._fill_from_memory(fd, view, offset):
            return False
        check(len(view))
        return True

    def read_waiting(self, fd: int, head: bytearray, view: memoryview, offset: int, check: Check) -> bool:
        """Fill `head` from the start of a file and `view` from `offset`, then call `check` while holding a slot.

        `head` is read by a call of its own. After it the kernel reads the rest ahead in larger and larger folios. If one call
        read both, every page of a block would be a folio of its own, and copying it would cost twice as much each time.
        Source: docs/development/measurements.md.

        Args:
            fd: Descriptor of the file.
            head: Buffer for the header; empty to read no header.
            view: uint8[n], writable.
            offset: Position in the file of the first byte for `view`.
            check: Called with the number of bytes of `view` that were filled: fewer than n if the file ends earlier.

        Raises:
            OSError: Reading failed.
            Exception: Any error of `check`.
        """
        if head:
            os.preadv(fd, [head], 0)
        count = _read_all(fd, view, offset)
        with self:
            check(count)
        return True

    def _fill_from_memory(self, fd: int, view: bytearray | memoryview, offset: int) -> bool:
        """Fill `view` if all of its bytes are in memory."""
        if not len(view):
            return True
        if self._is_memory:
            return os.preadv(fd, [view], offset) == len(view)
        if not self._can_tell:
            return False
        try:
            return os.preadv(fd, [view], offset, os.RWF_NOWAIT) == len(view)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                return False
            self._can_tell = False  # tmpfs, network file systems
            self._is_memory = is_in_memory(fd)
            return self._is_memory and os.preadv(fd, [view], offset) == len(view)


def is_in_memory(fd: int) -> bool:
    """Whether a file lies in memory and never on a disk (tmpfs, ramfs), so that reading it waits for nothing but swapping.

    Cost: reading the table of mounts, 0.1 ms.
    """
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields, _, kind = line.partition(" - ")
                if fields.split(" ", 3)[2] == number:
                    return kind.partition(" ")[0] in _IN_MEMORY
    except OSError:  # no /proc
        pass
    return False


def _read_all(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` up to the end of the file, and return the number of bytes. Cost: normally one system call."""
    done = os.preadv(fd, [view], offset)
    while 0 < done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
