"""Shared batches: memory that worker processes write rows of, and the training process maps without a copy.

Anonymous files (``memfd_create``), known by descriptor alone: there is no name in /dev/shm, and nothing is left behind
however a process ends.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.buffers import lease

if TYPE_CHECKING:
    from penstock.samples.columns import Layout

_log = logging.getLogger("penstock.loader")
_ALIGN_BYTES = 64  # a cache line: no two columns share one


class SlotLayout:
    """Where each column of arrays lies in a slot.

    Args:
        layout: Of the batches.
        rows_count: Of a full batch.
    """

    def __init__(self, layout: Layout, rows_count: int) -> None:
        self.rows_count = rows_count
        self._arrays: list[tuple[str, Any, tuple[int, ...], int, int]] = []
        self._others: list[str] = []
        at = 0
        for name, column in layout.allocate(1).items():
            if not isinstance(column, np.ndarray) or column.dtype.hasobject:
                self._others.append(name)
                continue
            shape = (rows_count, *column.shape[1:])
            count = int(np.prod(shape, dtype=np.int64))
            self._arrays.append((name, column.dtype, shape, count, at))
            at += -(-count * column.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self.size_bytes = max(at, mmap.PAGESIZE)

    def arrays(self, buffer: Any) -> dict[str, Any]:
        """The columns of arrays that lie in a slot; dtype[rows_count, ...] each."""
        found = {}
        for name, dtype, shape, count, at in self._arrays:
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
    """A slot that another process made. Closes `descriptor`: the mapping keeps the memory.

    All pages at once: one by one, as they are touched, cost ten times as much, in the training loop's time.
    """
    try:
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


class Slots:
    """The slots of an epoch. Taken by one thread at a time; they come back from any.

    Args:
        layout: Of the batches.
        rows_count: Of a full batch.
        prefetch_count: Batches that wait for the training loop.
    """

    def __init__(self, layout: Layout, rows_count: int, *, prefetch_count: int) -> None:
        self._plan = SlotLayout(layout, rows_count)
        # under way, held by the training loop, and held by it while it asks for the next
        self._enough_count = prefetch_count + 3
        self._slots: list[tuple[int, mmap.mmap]] = []
        self._free: deque[int] = deque()  # appended to by leases that end: in any thread, so there is no lock

    @property
    def size_bytes(self) -> int:
        """Of each."""
        return self._plan.size_bytes

    @property
    def others(self) -> list[str]:
        """Columns that lie in none."""
        return self._plan.others

    @property
    def count(self) -> int:
        """That were made."""
        return len(self._slots)

    def take(self) -> int:
        """One that nobody uses; a new one where there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            self._slots.append(made(self.size_bytes))
        if len(self._slots) == self._enough_count + 1:
            _log.warning(
                "the training loop holds batches, more than the %d that are enough otherwise: shared memory is made for "
                "each, of %d bytes",
                self._enough_count,
                self.size_bytes,
            )
        return len(self._slots) - 1

    def descriptor(self, slot: int) -> int:
        """To be sent to another process."""
        return self._slots[slot][0]

    def lease(self, slot: int) -> memoryview:
        """Its memory; it comes back when the last reference to this goes."""
        return lease(self._slots[slot][1], partial(_give_back, self._free, slot))

    def arrays(self, memory: memoryview) -> dict[str, Any]:
        """The columns that lie in a slot."""
        return self._plan.arrays(memory)

    def close(self) -> None:
        """Close the descriptors; memory that is leased stays until it is dropped. Idempotent."""
        slots, self._slots = self._slots, []
        for descriptor, _ in slots:
            os.close(descriptor)


def _give_back(free: deque[int], slot: int, _: Any) -> None:
    free.append(slot)
