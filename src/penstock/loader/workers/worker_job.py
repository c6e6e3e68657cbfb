"""What crosses between a loader and its worker processes besides batches: the job, and errors."""

from __future__ import annotations

import pickle
import traceback
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PenstockError
from penstock.loader.lanes.feed import Batching
from penstock.loader.plan.indexed import IndexedReadPlan
from penstock.loader.position import IndexPosition
from penstock.tracebacks import is_full

if TYPE_CHECKING:
    from penstock.loader.batches.run import RunPlan
    from penstock.loader.lanes.feed import Feed
    from penstock.loader.plan.loader_plan import ReadPlan
    from penstock.loader.position import FeedPosition
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Pipeline

CAUSES_MAX = 8


class WorkerJob(NamedTuple):
    """What a worker is told when it starts.

    Attributes:
        job: The rank's order, and how to read.
        pipeline: Its stages; what they hold (locks, tables) is made in the worker.
        plan: How to decode, without the transforms; ``batch_size`` is the whole rank's.
        epoch: Number.
        first_batch: The first that it fills.
        position: Where it begins to read; without an index, of its own lanes.
        global_size: Positions of a batch, where an index tells; else 0, and the worker says where its lanes are.
        stop: Position that ends the epoch, where an index tells.
        number: Of the worker, from 0.
        workers_count: Of this rank.
        budget_bytes: For reading.
        meter: The one that `job` counts with.
        carries: Whether it gives for each sample the list of what comes out of it: ``remote_rebatching.py``.
    """

    job: ReadPlan
    pipeline: Pipeline
    plan: RunPlan
    epoch: int
    first_batch: int
    position: FeedPosition
    global_size: int
    stop: int
    number: int
    workers_count: int
    budget_bytes: int
    meter: Meter
    carries: bool

    def behind(self, done_count: int, position: FeedPosition) -> WorkerJob:
        """What is left to do.

        Args:
            done_count: Batches of the epoch's run that are done.
            position: What the worker said last of its lanes.
        """
        if isinstance(self.position, IndexPosition):
            done = (done_count - self.first_batch) * self.global_size
            position = IndexPosition(self.position.position + done)
        return self._replace(first_batch=done_count, position=position)

    def feed(self) -> Feed:
        """The worker's samples: those of its lanes, in their order."""
        job = self.job
        bytes_max = job.reading.pinned_bytes_max // self.workers_count  # of the smaller budget, the same share
        job.reading = job.reading._replace(pinned_bytes_max=bytes_max)
        if not isinstance(job, IndexedReadPlan) or not isinstance(self.position, IndexPosition):
            return job.begin(self.epoch, self.position, batching=Batching(1, drop_last=False, take=None)).feed
        # to the order a worker is a rank of a larger world
        world_size = job.order.world_size
        own = job.divided(job.order.rank + world_size * self.number, world_size * self.workers_count)
        return own.feed_between(self.epoch, self.position.position, self.stop)


class RemoteError(NamedTuple):
    """An error on its way to another process.

    Attributes:
        error: As it can be pickled, else one that says its name and text.
        notes: Of the error: pickling may lose them.
        trace: Where it was raised, if the environment asks for whole tracebacks.
        cause: What it was raised from.
    """

    error: BaseException
    notes: list[str]
    trace: str
    cause: RemoteError | None

    @classmethod
    def of(cls, error: BaseException, *, causes_max: int = CAUSES_MAX) -> RemoteError:
        """`error`, with its notes, causes and traceback."""
        sent = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            sent = PenstockError(f"{type(error).__name__}: {error}")
        cause = error.__cause__
        told = cls.of(cause, causes_max=causes_max - 1) if cause is not None and causes_max else None
        is_told = causes_max == CAUSES_MAX and is_full()
        trace = "".join(traceback.format_exception(error)) if is_told else ""
        return cls(sent, list(getattr(error, "__notes__", ())), trace, told)

    def revived(self, where: str = "") -> BaseException:
        """The error, as if it had been raised here; `where` it was goes into a note."""
        error = self.error
        known = set(getattr(error, "__notes__", ()))
        for note in self.notes:
            if note not in known:
                error.add_note(note)
        if where:
            error.add_note(f"in {where}:\n{self.trace}" if self.trace else f"in {where}")
        if self.cause is not None:
            error.__cause__ = self.cause.revived()
        return error
