"""Shared batches: memory that worker processes write rows of, and the training process maps without a copy.

Anonymous files (``memfd_create``), known by descriptor alone: there is no name in /dev/shm, and nothing is left behind
however a process ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from penstock.loader.columns import Layout

_ALIGN_BYTES = 64  # a cache line: no two columns share one


class SlotPlan:
    """Where each column of arrays lies in a slot.

    Args:
        layout: Of the batches.
        rows_count: Of a full batch.
    """

    def __init__(self, layout: Layout, rows_count: int) -> None:
        self.rows_count = rows_count
        self._arrays: list[tuple[str, Any, tuple[int, ...], int]] = []
        self._others: list[str] = []
        at = 0
        for name, column in layout.allocate(1).items():
            if not isinstance(column, np.ndarray) or column.dtype.hasobject:
                self._others.append(name)
                continue
            shape = (rows_count, *column.shape[1:])
            self._arrays.append((name, column.dtype, shape, at))
            at += -(-int(np.prod(shape, dtype=np.int64)) * column.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self.size_bytes = max(at, mmap.PAGESIZE)

    def arrays(self, buffer: Any) -> dict[str, Any]:
        """The columns of arrays that lie in a slot; dtype[rows_count, ...] each."""
        found = {}
        for name, dtype, shape, at in self._arrays:
            count = int(np.prod(shape, dtype=np.int64))
            found[name] = np.frombuffer(buffer, dtype=dtype, count=count, offset=at).reshape(shape)
        return found

    @property
    def others(self) -> list[str]:
        """Columns that are lists, and travel beside the slot."""
        return self._others


def made(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A new slot: its descriptor, and its mapping here."""
    descriptor = os.memfd_create("penstock-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
        return descriptor, mmap.mmap(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def mapped(descriptor: int, size_bytes: int) -> mmap.mmap:
    """A slot that another process made. Closes `descriptor`: the mapping keeps the memory."""
    try:
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
