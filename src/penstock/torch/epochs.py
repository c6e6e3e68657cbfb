"""The epoch numbers of iterations, on which the worker processes of a DataLoader agree without talking to each other.

A worker that is forked or spawned for each epoch cannot count epochs, and the process that iterates the DataLoader does not
call the dataset. Therefore the dataset has a few bytes of memory that all its workers share. The first worker of an
iteration takes the next number, and the others find it there. Iterations are distinguished by the seed that DataLoader draws
for each of them and passes to all its workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import weakref
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data

from penstock.system.locks import process_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


_BYTES_MAX = 1 << 16
_ITERATIONS_KEPT = 16  # iterations under way or ended; each takes some tens of bytes


class Worker(NamedTuple):
    """A worker process: its number, from 0, the number of workers, and the seed of the iteration that they share."""

    number: int
    workers_count: int
    seed: int


class EpochTable(MemoryFile):
    """The next epoch's number, shared with worker processes.

    If it is pickled for another purpose, the copy is a new table that begins with epoch 0.
    """

    def take(self, worker: Worker | None) -> int:
        """Return the epoch of an iteration that begins in `worker`, or in this process if `worker` is None."""
        owner = _owner(worker)
        with self._opened() as table:
            if worker is not None:
                for entry in reversed(table["iterations"]):
                    if entry["of"] == [owner, worker.seed] and worker.number not in entry["workers"]:
                        entry["workers"].append(worker.number)
                        return int(entry["epoch"])
            epoch = table["next"].get(str(owner), 0)
            table["next"][str(owner)] = epoch + 1
            table["in_workers"][str(owner)] = worker is not None
            if worker is not None:
                table["iterations"].append({"of": [owner, worker.seed], "epoch": epoch, "workers": [worker.number]})
                del table["iterations"][:-_ITERATIONS_KEPT]
            return int(epoch)

    def set_next(self, epoch: int, *, worker: Worker | None = None) -> None:
        """Set the epoch of the next iteration."""
        with self._opened() as table:
            table["next"][str(_owner(worker))] = epoch
            table["in_workers"][str(_owner(worker))] = worker is not None

    def next(self, worker: Worker | None = None) -> int:
        """Return the epoch of the next iteration without taking it."""
        with self._opened() as table:
            return int(table["next"].get(str(_owner(worker)), 0))

    def is_in_workers(self) -> bool:
        """Whether the last iteration that this process began is running in worker processes."""
        with self._opened() as table:
            return bool(table["in_workers"].get(str(os.getpid()), False))

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Yield the table, locked against other processes, and store changes to it."""
        with process_lock(self._descriptor):
            text = os.pread(self._descriptor, _BYTES_MAX, 0)
            table = json.loads(text) if text else {"next": {}, "in_workers": {}, "iterations": []}
            yield table
            written = json.dumps(table).encode()
            os.pwrite(self._descriptor, written, 0)
            os.ftruncate(self._descriptor, len(written))


def worker_here() -> Worker | None:
    """Return the DataLoader worker that this process is, or None if it is not one."""
    info = torch.utils.data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers, info.seed - info.id)


def _owner(worker: Worker | None) -> int:
    """Return the process that iterates, so that ranks that were forked with one dataset count separately."""
    parent = multiprocessing.parent_process() if worker is not None else None
    return os.getpid() if parent is None or parent.pid is None else parent.pid
