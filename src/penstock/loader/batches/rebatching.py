"""Builders of batches where stages change the number of samples, such as ``flat_map``, ``token_blocks`` and ``batch_by_size``.

The row of a sample is not known before all samples ahead of it have been decoded. So the decode threads return lists of
values, and the reader thread puts these values into rows, in order. What does not fit into a batch goes into the next one.
A state therefore consists of a position of the feed and the number of outputs after it that were handed out already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DecodeError
from penstock.loader.batches.run import OpenBatch
from penstock.loader.batches.token_blocks import TransformOutput, cut_blocks
from penstock.loader.position import RebatchedPosition
from penstock.pipeline import BatchBySize
from penstock.samples.columns import Layout
from penstock.samples.context import ThreadRandom
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.loader.batches.run import EpochRun
    from penstock.loader.lanes.feed import Feed, SampleBlock
    from penstock.loader.position import FeedPosition
    from penstock.pipeline.batching import SizeBudget

TASK_SAMPLES_MAX = 16
TASKS_PER_THREAD = 3


class _Task:
    """Samples for one decode thread, and the outputs that it made of them."""

    __slots__ = ("base", "block", "done", "error", "found")

    def __init__(self, block: SampleBlock, base: FeedPosition) -> None:
        self.block = block
        self.base = base
        # values of each output, and the index in the block of the sample that they were made of
        self.found: list[tuple[Mapping[str, Any], int]] = []
        self.error: BaseException | None = None
        self.done = False


class Rebatcher(ABC):
    """Builds batches of what comes out of the stages, whatever number of outputs that is.

    Args:
        run: Run whose batches this builder makes.
        begin: Position at which the batches go on; None is the beginning of the epoch.
    """

    def __init__(self, run: EpochRun, *, begin: RebatchedPosition | None) -> None:
        self._run = run
        self._skip_count, self._skip_tokens = (0, 0) if begin is None else begin[1:]
        self._layout: Layout | None = None
        self._by_size = run.plan.batch if isinstance(run.plan.batch, BatchBySize) else None

    @abstractmethod
    def _outputs(self) -> Iterator[TransformOutput]:
        """All outputs in order."""

    def build(self) -> None:
        """Make all batches, in the reader thread."""
        held: list[TransformOutput] = []
        size = self._run.plan.batch_size
        budget = self._by_size.budget() if self._by_size is not None else None
        before: RebatchedPosition | None = None
        outputs: Iterator[TransformOutput] = islice(self._outputs(), self._skip_count, None)
        if self._run.plan.token_blocks is not None:
            outputs = cut_blocks(outputs, self._run.plan.token_blocks, skip_tokens=self._skip_tokens)
        for output in outputs:
            if self._run.stopping:
                return
            if budget is None:
                held.append(output)
                if len(held) == size:
                    self._close(held, output.after)
                    held = []
                continue
            verdict = self._verdict(budget, output)
            if verdict == "drop":
                self._run.meter.oversize_count += 1
                continue
            if verdict == "new" and before is not None:
                self._close(held, before)
                held = []
            held.append(output)
            before = output.after
        if held and not self._run.plan.drop_last and not self._run.stopping:
            self._close(held, held[-1].after)

    def _verdict(self, budget: SizeBudget, output: TransformOutput) -> str:
        assert self._by_size is not None
        try:
            return budget.add(self._by_size.size_of(output.values))
        except Exception as error:
            where: dict[str, Any] = {"stage": "batch_by_size", "sample_key": output.key, "shard": output.url}
            if callable(self._by_size.size):
                raise failed(self._by_size.size, error, **where) from error
            raise DecodeError(f"no batch can take it: {type(error).__name__}: {error}", **where) from error

    def _close(self, held: list[TransformOutput], position: RebatchedPosition) -> None:
        """Make a batch of these outputs and append it to the queue of the run."""
        if self._layout is None:
            self._layout = Layout(held[0].values, self._run.plan.batch)
        rows_count = len(held)
        values = self._layout.allocate(rows_count)
        for row, output in enumerate(held):
            self._layout.put(values, row, output.values, key=output.key, shard=output.url)
        values["__key__"] = [output.key for output in held]
        values["__shard__"] = [output.url for output in held]
        values["__position__"] = np.array([output.position for output in held], dtype=np.int64)
        batch = OpenBatch(values, self._layout)
        batch.rows = rows_count
        batch.sealed = True
        batch.position = position
        self._run.append(batch)


class LocalRebatcher(Rebatcher):
    """Rebatches what the decode threads of this process make.

    Args:
        run: Run whose batches this builder makes.
        feed: Samples of the epoch.
        epoch: Epoch number, from 0. With the seed and the position it determines a sample's random numbers.
        begin: Position at which the batches go on; None is the beginning of the epoch.
    """

    def __init__(self, run: EpochRun, feed: Feed, *, epoch: int, begin: RebatchedPosition | None) -> None:
        super().__init__(run, begin=begin)
        self._feed = feed
        self._random = ThreadRandom(seed=run.plan.seed, epoch=epoch)

    def _decode(self, task: _Task) -> None:
        """Decode the samples of one task, in a decode thread."""
        block, random = task.block, self._random.random
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
        """All outputs in the order of their samples, whichever thread was first."""
        run, feed = self._run, self._feed
        tasks: deque[_Task] = deque()
        tasks_max = TASKS_PER_THREAD * run.plan.threads_count
        goes_on = True
        while not run.stopping:
            while goes_on and len(tasks) < tasks_max:
                base = feed.position()
                block = feed.take(TASK_SAMPLES_MAX)
                if block is None:
                    goes_on = False
                else:
                    tasks.append(_Task(block, base))
                    run.tasks.put(partial(self._decode, tasks[-1]))
            if not tasks:
                return
            task = tasks.popleft()
            with run.changed:
                run.changed.wait_for(lambda task=task: task.done or run.stopping)  # type: ignore[misc]
            if not task.done:
                return
            block = task.block
            for count, (values, index) in enumerate(task.found, 1):
                sample, segment = block.samples[index], block.segments[index]
                after = RebatchedPosition(task.base, count)
                yield TransformOutput(values, sample.key, segment.url, int(block.positions[index]), after)
            if task.error is not None:
                raise task.error
