"""How samples become batches where their number changes on the way: ``refill``, ``flat_map``, ``batch_by_size``.

Nobody knows a sample's row before the ones ahead of it were decoded. So decode threads give lists of values, and the
reader thread puts these, in order, into rows. What is left over at the end of a batch is carried to the next one; a
state therefore names a place in the feed, and how many of what came out behind it was handed out already.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import DecodeError
from penstock.loader.batches.run import OpenBatch
from penstock.loader.position import RebatchedPosition
from penstock.pipeline import BatchBySize
from penstock.samples.columns import Layout
from penstock.samples.context import SampleRandom
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.loader.batches.run import EpochRun
    from penstock.loader.lanes.feed import SampleBlock
    from penstock.loader.position import FeedPosition
    from penstock.pipeline.batching import SizeBudget

TASK_SAMPLES_MAX = 16
TASKS_PER_THREAD = 3


class TransformOutput(NamedTuple):
    """A sample that came out."""

    values: Mapping[str, Any]
    key: str
    url: str
    position: int
    after: RebatchedPosition


class _Task:
    """Samples for one decode thread, and what it made of them."""

    __slots__ = ("block", "done", "error", "found", "mark")

    def __init__(self, block: SampleBlock, mark: FeedPosition) -> None:
        self.block = block
        self.mark = mark
        self.found: list[tuple[Mapping[str, Any], int]] = []  # values, and which sample of the block they are of
        self.error: BaseException | None = None
        self.done = False


class Rebatcher:
    """Batches of what comes out of the stages, however much that is.

    Args:
        run: That this fills.
        epoch: With the plan's seed and the position, what a sample's random numbers depend on.
        skip_count: Samples that come out first and were handed out before.
    """

    def __init__(self, run: EpochRun, *, epoch: int, skip_count: int) -> None:
        self._run = run
        self._epoch = epoch
        self._skip_count = skip_count
        self._layout: Layout | None = None
        self._random = threading.local()
        self._by_size = run.plan.batch if isinstance(run.plan.batch, BatchBySize) else None

    def fill(self) -> None:
        """See ``BatchBuilder``."""
        held: list[TransformOutput] = []
        size = self._run.plan.batch_size
        budget = self._by_size.budget() if self._by_size is not None else None
        before: RebatchedPosition | None = None
        for out in self._outputs():
            if self._run.stopping:
                return
            if budget is None:
                held.append(out)
                if len(held) == size:
                    self._close(held, out.after)
                    held = []
                continue
            verdict = self._verdict(budget, out)
            if verdict == "drop":
                self._run.meter.oversize_count += 1
                continue
            if verdict == "new" and before is not None:
                self._close(held, before)
                held = []
            held.append(out)
            before = out.after
        if held and not self._run.plan.drop_last and not self._run.stopping:
            self._close(held, held[-1].after)

    def work(self, task: _Task) -> None:
        """See ``BatchBuilder``."""
        random = getattr(self._random, "random", None)
        if random is None:
            random = self._random.random = SampleRandom(seed=self._run.plan.seed, epoch=self._epoch)
        block = task.block
        try:
            for index, (sample, segment, position) in enumerate(
                zip(block.samples, block.segments, block.positions.tolist(), strict=True)
            ):
                transform = self._run.plan.transforms[segment.source]
                result = transform(sample, shard=segment.url, position=position, random=random)
                if isinstance(result, list):
                    task.found += [(values, index) for values in result]
                elif result is not None:
                    task.found.append((result, index))
        except BaseException as error:
            task.error = error
        with self._run.changed:
            task.done = True
            self._run.changed.notify_all()

    def _outputs(self) -> Iterator[TransformOutput]:
        """What comes out, in order, whichever thread was first in time; what was handed out before is left out."""
        run = self._run
        tasks: deque[_Task] = deque()
        tasks_max = TASKS_PER_THREAD * run.plan.threads_count
        goes_on = True
        while not run.stopping:
            while goes_on and len(tasks) < tasks_max:
                mark = run.feed.mark()
                block = run.feed.take(TASK_SAMPLES_MAX)
                if block is None:
                    goes_on = False
                else:
                    tasks.append(_Task(block, mark))
                    run.tasks.put(tasks[-1])
            if not tasks:
                return
            task = tasks.popleft()
            with run.changed:
                run.changed.wait_for(lambda task=task: task.done or run.stopping)  # type: ignore[misc]
            if not task.done:
                return
            block = task.block
            for count, (values, index) in enumerate(task.found, 1):
                if self._skip_count:
                    self._skip_count -= 1
                    continue
                sample, segment = block.samples[index], block.segments[index]
                after = RebatchedPosition(task.mark, count)
                yield TransformOutput(values, sample.key, segment.url, int(block.positions[index]), after)
            if task.error is not None:
                raise task.error

    def _verdict(self, budget: SizeBudget, out: TransformOutput) -> str:
        assert self._by_size is not None
        try:
            return budget.add(self._by_size.size_of(out.values))
        except Exception as error:
            where: dict[str, Any] = {"stage": "batch_by_size", "sample_key": out.key, "shard": out.url}
            if callable(self._by_size.size):
                raise failed(self._by_size.size, error, **where) from error
            raise DecodeError(f"no batch can take it: {type(error).__name__}: {error}", **where) from error

    def _close(self, held: list[TransformOutput], mark: RebatchedPosition) -> None:
        """Make a batch of samples, and deliver it."""
        if self._layout is None:
            self._layout = Layout(held[0].values, self._run.plan.batch)
        rows_count = len(held)
        values = self._layout.allocate(rows_count)
        for row, out in enumerate(held):
            self._layout.put(values, row, out.values, key=out.key, shard=out.url)
        values["__key__"] = [out.key for out in held]
        values["__shard__"] = [out.url for out in held]
        values["__position__"] = np.array([out.position for out in held], dtype=np.int64)
        batch = OpenBatch(values, self._layout)
        batch.rows = rows_count
        batch.sealed = True
        batch.mark = mark
        self._run.append(batch)
