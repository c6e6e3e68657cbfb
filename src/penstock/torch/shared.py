"""Memory that all worker processes of a DataLoader share, and data in it that the first process that needs it computes."""

from __future__ import annotations

import os
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

from penstock.system.locks import process_lock

if TYPE_CHECKING:
    from collections.abc import Callable


class MemoryFile:
    """A file in memory, shared with worker processes that receive this object when they start.

    If it is pickled for another purpose, the copy is empty.

    Cost: one file descriptor for memory.
    """

    def __init__(self) -> None:
        self._attach(os.memfd_create("penstock-shared"))

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return type(self), ()
        return _attached, (type(self), DupFd(self._descriptor))

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)


def _attached(kind: type[MemoryFile], duplicate: Any) -> MemoryFile:
    file = kind.__new__(kind)
    file._attach(duplicate.detach())
    return file


class Once(MemoryFile):
    """Bytes that one process computes, shared with worker processes."""

    def get(self, make: Callable[[], bytes]) -> bytes:
        """Return what ``make()`` returned in the first call, for which others wait. If it raises, the next call tries again."""
        with process_lock(self._descriptor):
            size_bytes = os.fstat(self._descriptor).st_size
            if size_bytes:
                return _read(self._descriptor, size_bytes)
            data = make()
            view = memoryview(data)
            while view:
                view = view[os.pwrite(self._descriptor, view, len(data) - len(view)) :]
            return data


def _read(descriptor: int, size_bytes: int) -> bytes:
    parts, at = [], 0
    while at < size_bytes:
        parts.append(os.pread(descriptor, size_bytes - at, at))
        at += len(parts[-1])
    return b"".join(parts)
