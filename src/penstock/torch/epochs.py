"""Which epoch an iteration is, where DataLoader's worker processes must agree on it without talking to each other.

A worker that is forked or spawned anew for each epoch cannot count epochs, and nothing of the dataset is called in the
process that iterates the DataLoader. So the dataset carries a few bytes of memory that all its workers share: whoever
of an iteration's workers comes first takes the next number, and the others find it. What tells iterations apart is the
seed that DataLoader draws for each and gives to all its workers.
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

from penstock.locks import process_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

_BYTES_MAX = 1 << 16
_ITERATIONS_KEPT = 16  # of those under way at once, and of those that ended; each is some tens of bytes


class Worker(NamedTuple):
    """One of the processes that share an iteration: `number` of `workers_count`; `seed` is the iteration's."""

    number: int
    workers_count: int
    seed: int


class EpochTable:
    """The next epoch's number, shared with the worker processes that this object is given to as they start.

    Pickled in any other way it is a new table, at epoch 0. Cost: one file descriptor, of memory.
    """

    def __init__(self) -> None:
        self._attach(os.memfd_create("penstock-epochs"))

    def take(self, worker: Worker | None) -> int:
        """The epoch of an iteration that begins: in `worker`, or where it is None, in this process alone."""
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
        """Make `epoch` the number of the iteration that begins next."""
        with self._opened() as table:
            table["next"][str(_owner(worker))] = epoch
            table["in_workers"][str(_owner(worker))] = worker is not None

    def next(self, worker: Worker | None = None) -> int:
        """The number of the iteration that begins next, without taking it."""
        with self._opened() as table:
            return int(table["next"].get(str(_owner(worker)), 0))

    def is_in_workers(self) -> bool:
        """Whether the last iteration that this process began runs in worker processes."""
        with self._opened() as table:
            return bool(table["in_workers"].get(str(os.getpid()), False))

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return EpochTable, ()
        return _attached, (DupFd(self._descriptor),)

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """The table, locked against other processes; changes to it are kept."""
        with process_lock(self._descriptor):
            text = os.pread(self._descriptor, _BYTES_MAX, 0)
            table = json.loads(text) if text else {"next": {}, "in_workers": {}, "iterations": []}
            yield table
            written = json.dumps(table).encode()
            os.pwrite(self._descriptor, written, 0)
            os.ftruncate(self._descriptor, len(written))


def worker_here() -> Worker | None:
    """What DataLoader says of this process; None outside of its workers."""
    info = torch.utils.data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers, info.seed - info.id)


def _owner(worker: Worker | None) -> int:
    """The process that iterates: ranks that were forked with one dataset each count for themselves."""
    parent = multiprocessing.parent_process() if worker is not None else None
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def _attached(duplicate: Any) -> EpochTable:
    table = EpochTable.__new__(EpochTable)
    table._attach(duplicate.detach())
    return table
