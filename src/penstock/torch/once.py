"""What all worker processes of a DataLoader have alike: the first that needs it makes it, the others find it."""

from __future__ import annotations

import os
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

from penstock.locks import process_lock

if TYPE_CHECKING:
    from collections.abc import Callable


class Once:
    """Bytes that one process makes, shared with the worker processes that this object is given to as they start.

    Pickled in any other way it is a new, empty one. Cost: one file descriptor, of memory.
    """

    def __init__(self) -> None:
        self._attach(os.memfd_create("penstock-once"))

    def get(self, make: Callable[[], bytes]) -> bytes:
        """What the first call's ``make()`` gave; the others wait for it. One that raises leaves it to the next."""
        with process_lock(self._descriptor):
            size_bytes = os.fstat(self._descriptor).st_size
            if size_bytes:
                return _read(self._descriptor, size_bytes)
            data = make()
            view = memoryview(data)
            while view:
                view = view[os.pwrite(self._descriptor, view, len(data) - len(view)) :]
            return data

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Once, ()
        return _attached, (DupFd(self._descriptor),)

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


def _read(descriptor: int, size_bytes: int) -> bytes:
    parts, at = [], 0
    while at < size_bytes:
        parts.append(os.pread(descriptor, size_bytes - at, at))
        at += len(parts[-1])
    return b"".join(parts)


def _attached(duplicate: Any) -> Once:
    once = Once.__new__(Once)
    once._attach(duplicate.detach())
    return once
