"""Reading entries from the page cache on at most as many threads at a time as there are processors."""

from __future__ import annotations

import errno
import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    Check: TypeAlias = Callable[[int], None]
    ReadFunction: TypeAlias = Callable[[int, bytearray, memoryview, int, Check], bool]


class CpuSlots:
    """A slot for each processor, held while a thread copies from memory or computes a checksum.

    Threads that read from a disk wait without a slot, since more of them keep the disk busy. Threads that copy from memory
    slow each other down once they outnumber the processors: each system call releases the interpreter, and the thread then
    queues for it behind the others. Eight threads on two processors had 5.4 context switches per block.

    Source: docs/development/experiments.md.
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
        """Do the work of ``read_waiting`` for a thread that holds a slot, if the page cache has all of the bytes.

        Returns:
            False if it does not have them; `head` and `view` may then be partly filled.

        Cost: two system calls.
        """
        if (
            not self._can_tell
            or not self._fill_from_memory(fd, head, 0)
            or not self._fill_from_memory(fd, view, offset)
        ):
            return False
        check(len(view))
        return True

    def read_waiting(self, fd: int, head: bytearray, view: memoryview, offset: int, check: Check) -> bool:
        """Fill `head` from the start of a file and `view` from `offset`, then call `check` while holding a slot.

        `head` is read by a call of its own. After it the kernel reads the rest ahead in larger and larger folios. If one call
        read both, every page of a block would be a folio of its own, and copying it would cost twice as much each time.
        Source: docs/development/experiments.md.

        Args:
            fd: Descriptor of the file.
            head: Buffer for the header; empty to read no header.
            view: uint8[n], writable.
            offset: Position in the file of the first byte for `view`.
            check: Called with the number of bytes of `view` that were filled: fewer than n if the file ends earlier.

        Raises:
            OSError: Reading failed.
            Exception: Whatever `check` raises.
        """
        if head:
            os.preadv(fd, [head], 0)
        count = _read_all(fd, view, offset)
        with self:
            check(count)
        return True

    def _fill_from_memory(self, fd: int, view: bytearray | memoryview, offset: int) -> bool:
        """Fill `view` if the page cache has all of its bytes."""
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
    """Fill `view` up to the end of the file, and return the number of bytes. Cost: normally one system call."""
    done = os.preadv(fd, [view], offset)
    while 0 < done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
