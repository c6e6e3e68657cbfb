"""A worker process: ``python -m penstock.loader.worker DESCRIPTOR``. It fetches, parses and decodes some lanes.

To the order a worker is a rank: process w of n of rank r of W owns the lanes that rank r + W * w of W * n would own. So
it runs the same feed and the same decode threads as a loader does, and writes its rows of every batch into shared memory.
A batch's rows are positions of the order, so nobody has to be asked which row is whose.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import PenstockError
from penstock.fetch import set_process_budget
from penstock.loader.columns import Layout
from penstock.loader.filling import RowsFilling
from penstock.loader.run import EpochRun, OpenBatch
from penstock.loader.samples import Steps
from penstock.loader.slots import SlotPlan, mapped
from penstock.loader.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.indexed import IndexedJob
    from penstock.loader.run import RunPlan
    from penstock.loader.statistics import Meter
    from penstock.order import Batches
    from penstock.pipeline import Pipeline


class WorkerJob(NamedTuple):
    """What a worker is told when it starts.

    Attributes:
        job: The order as of this worker's own rank, and how to read.
        pipeline: Its stages; what they hold (locks, tables) is made here.
        plan: How to decode, without the steps; ``batch_size`` is the whole rank's.
        batches: The rank's.
        epoch: Number.
        first_batch: From which on.
        stride: Workers of this rank.
        rank: The worker's own rank, in the order of all workers.
        budget_bytes: For reading.
        meter: Counts here.
    """

    job: IndexedJob
    pipeline: Pipeline
    plan: RunPlan
    batches: Batches
    epoch: int
    first_batch: int
    stride: int
    rank: int
    budget_bytes: int
    meter: Meter


class SharedFilling(RowsFilling):
    """``RowsFilling`` whose columns are every n-th row of a shared batch.

    Args:
        run: That this fills.
        told: What to do.
        inbox: What the loader says meanwhile.
    """

    def __init__(self, run: EpochRun, *, told: WorkerJob, inbox: Inbox) -> None:
        super().__init__(run, epoch=told.epoch)
        self._told = told
        self._inbox = inbox
        self._batch_index = told.first_batch - 1
        self._slots: SlotPlan | None = None

    def _next_size(self) -> int:
        """See ``RowsFilling``. Batches in which this worker has no row are reported empty."""
        while self._batch_index + 1 < len(self._told.batches) and not self._run.stopping:
            self._batch_index += 1
            size = len(self._rows())
            if size:
                return size
            empty = OpenBatch({}, None)
            empty.sealed = True
            self._run.append(empty)
        return 0

    def _rows(self) -> range:
        """Which rows of the batch are this worker's."""
        batches, told = self._told.batches, self._told
        positions, valid_count = batches.batch(self._batch_index)
        if not valid_count:
            return range(0)
        first = int(positions[0])
        step = batches.world_size * told.stride
        begin = (told.rank - first) % step // batches.world_size
        return range(begin, valid_count, told.stride)

    def _layout_of(self, values: Mapping[str, Any]) -> Layout:
        """All workers' columns are those of one sample: the first that the loader hears of."""
        self._inbox.wire.send(("first", dict(values)))
        return Layout(self._inbox.wait_layout(), self._run.plan.batch)

    def _allocated(self, size: int) -> dict[str, Any]:
        if self._layout is None:
            return {}
        rows = self._rows()
        if self._slots is None:
            self._slots = SlotPlan(self._layout, self._run.plan.batch_size)
        arrays = self._slots.arrays(self._inbox.wait_slot(self._batch_index))
        values: dict[str, Any] = {name: array[rows.start :: rows.step][:size] for name, array in arrays.items()}
        for name, column in self._layout.allocate(size).items():
            values.setdefault(name, column)
        return values


class Inbox:
    """What the loader says, kept by a thread that receives; it ends the process when the loader is gone."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._changed = threading.Condition()
        self._layout: Mapping[str, Any] | None = None
        self._slots: dict[int, Any] = {}
        self._batches: dict[int, int] = {}
        threading.Thread(target=self._receive, name="penstock-inbox", daemon=True).start()

    def wait_layout(self) -> Mapping[str, Any]:
        """The values that fix all columns."""
        with self._changed:
            self._changed.wait_for(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def wait_slot(self, batch_index: int) -> Any:
        """The memory of a batch, once it has some."""
        with self._changed:
            self._changed.wait_for(lambda: batch_index in self._batches)
            return self._slots[self._batches.pop(batch_index)]

    def _receive(self) -> None:
        try:
            while True:
                (kind, *rest), descriptor = self.wire.receive()
                with self._changed:
                    if kind == "layout":
                        self._layout = rest[0]
                    elif kind == "slot":
                        assert descriptor is not None
                        self._slots[rest[0]] = mapped(descriptor, rest[1])
                    elif kind == "fill":
                        self._batches[rest[0]] = rest[1]
                    self._changed.notify_all()
        except (EOFError, OSError):
            os._exit(0)  # the loader closed, or its process ended; nothing here outlives it


def main(descriptor: int) -> None:
    """Run until all batches are written or the loader is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the loader decides
    wire = Wire(socket.socket(fileno=descriptor))
    try:
        told, _ = wire.receive()
    except (EOFError, OSError):
        return
    except BaseException as error:  # a module that the pipeline's functions need is not there
        wire.send(("error", _portable(error), traceback.format_exc()))
        return
    inbox = Inbox(wire)
    try:
        work(told, inbox)
    except BaseException as error:
        wire.send(("error", _portable(error), traceback.format_exc()))
    threading.Event().wait()  # until the loader says that it needs nothing more, by closing


def work(told: WorkerJob, inbox: Inbox) -> None:
    """Fill this worker's rows of every batch, and say when each is done."""
    set_process_budget(told.budget_bytes)
    position = told.batches.origin + told.first_batch * told.batches.global_size
    feed = told.job.with_meter(told.meter).feed_between(told.epoch, position, told.batches.stop)
    run = EpochRun(
        told.plan._replace(steps=tuple(Steps(leaf) for leaf in told.pipeline.flat().leaves)),
        feed=feed,
        filling=lambda run: SharedFilling(run, told=told, inbox=inbox),
        meter=told.meter,
    )
    for index in range(told.first_batch, len(told.batches)):
        delivery = run.next_batch()
        if delivery is None:
            return
        lists = {name: column for name, column in delivery.values.items() if isinstance(column, list)}
        inbox.wire.send(("done", index, lists, delivery.dropped, told.meter.sums()))


def _portable(error: BaseException) -> BaseException:
    """`error` as it can be pickled, or its name and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PenstockError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]))
