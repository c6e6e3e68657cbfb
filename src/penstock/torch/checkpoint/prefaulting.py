"""Touches the pages of new memory on a thread of its own, ahead of the bytes that will arrive there.

The first touch of a page enters the kernel, which clears the page and charges it to the process: 0.3 to 0.4 s of CPU per GB.
The thread that receives would pay for it while it copies from a socket, and it is the busiest one: at 1 GB/s it ran 90% of the
time, which bounded the rate.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; older kernels refuse it. Source: madvise(2)."""
_libc = ctypes.CDLL(None)  # whose calls release the GIL


class Prefaulting:
    """Touches the pages of memory in order, while its ``with`` block runs.

    Only time depends on it: pages that it does not reach, or that the kernel refuses it, are touched by who writes to them.

    Args:
        views: The memory, each uint8[any length], writable.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-prefaulting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._views = ()

    def _run(self) -> None:
        for view in self._views:
            if self._ended.is_set() or not _populate(view):
                return


def _populate(view: memoryview) -> bool:
    """Touch the pages that lie wholly in `view`, without changing them, and return whether the kernel can do that."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length_bytes = (start + len(view)) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length_bytes <= 0:
        return True
    result: int = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length_bytes), _MADV_POPULATE_WRITE)
    return result == 0
