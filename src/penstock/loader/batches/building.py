"""How samples become rows of batches, where each sample is one row.

Members that nobody decodes are put into columns by the block, in the reader thread: a call per sample, or a hand-over
between threads per batch, costs more than the work. Everything else goes to the decode threads, some rows at a time.
"""

from __future__ import annotations

import threading
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.buffers import as_bytes, is_typed
from penstock.config import MIB
from penstock.errors import DecodeError
from penstock.formats import LOST, Samples
from penstock.loader.batches.run import OpenBatch
from penstock.samples.columns import Layout
from penstock.samples.context import SampleRandom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.formats import Sample
    from penstock.loader.batches.run import EpochRun, RunPlan
    from penstock.loader.lanes.feed import SampleBlock
    from penstock.loader.lanes.segments import SampleSource

TASK_ROWS_MAX = 32
TASK_BYTES_MAX = 4 * MIB  # a task pins the parts that its samples lie in
BLOCK_ROWS_MAX = 128  # of a batch, that are read before the first of them is decoded
BLOCK_BYTES_MAX = 16 * MIB

_KEY, _FIELDS, _URL = attrgetter("key"), attrgetter("fields"), attrgetter("url")


class RawBatchBuilder:
    """Batches of members as they are stored: lists of ``bytes``.

    Args:
        run: That this fills.
    """

    def __init__(self, run: EpochRun) -> None:
        self._run = run
        self._names: tuple[str, ...] | None = None
        self._typed: set[str] = set()  # members that the format itself says are numbers

    def fill(self) -> None:
        """See ``BatchBuilder``."""
        run, size = self._run, self._run.plan.batch_size
        while not run.stopping and (block := run.feed.take(size)) is not None:
            rows = len(block.samples)
            if rows < size and run.plan.drop_last:
                return
            kept = without_lost(block)
            batch = OpenBatch(self.columns(kept) if kept.samples else {}, None)
            batch.rows = len(kept.samples)
            batch.sealed = True
            batch.mark = run.feed.mark()
            run.append(batch)

    def work(self, task: Any) -> None:
        """See ``BatchBuilder``; there are no tasks."""

    def columns(self, block: SampleBlock) -> dict[str, Any]:
        """A block as a batch."""
        samples = block.samples
        if self._names is None:
            first = samples[0].fields
            self._names = tuple(first)
            self._typed = {name for name, value in first.items() if is_typed(value)}
        if isinstance(samples, Samples) and set(samples.names) == set(self._names):
            values = {name: samples.array(name) for name in self._names}
            keys = samples.keys
        else:
            values = self._gathered(block, self._names)
            keys = list(map(_KEY, samples))
        values["__key__"] = keys
        values["__shard__"] = list(map(_URL, block.segments))
        values["__position__"] = block.positions
        return values

    def _gathered(self, block: SampleBlock, names: tuple[str, ...]) -> dict[str, Any]:
        """The columns of samples that come one by one."""
        fields = list(map(_FIELDS, block.samples))
        try:
            values: dict[str, Any] = {name: self._column(name, fields, block) for name in names}
        except KeyError:
            raise self._other(block) from None
        if sum(map(len, fields)) != len(fields) * len(names):
            raise self._other(block)
        return values

    def _column(self, name: str, fields: list[dict[str, memoryview]], block: SampleBlock) -> Any:
        members = map(itemgetter(name), fields)
        if name not in self._typed:
            return list(map(as_bytes, members))
        arrays = list(map(np.asarray, members))
        first = arrays[0]
        for array, sample, segment in zip(arrays, block.samples, block.segments, strict=True):
            if array.shape != first.shape or array.dtype != first.dtype:
                raise DecodeError(
                    f"{array.dtype}{list(array.shape)}, another sample of the batch has {first.dtype}{list(first.shape)}",
                    hint="make all alike in .map(), or .batch(pad=) or .batch(ragged=) them",
                    stage="batch",
                    field=name,
                    sample_key=sample.key,
                    shard=segment.url,
                )
        return np.stack(arrays)

    def _other(self, block: SampleBlock) -> DecodeError:
        """The error for the first sample with other members than the epoch's first one."""
        names = self._names or ()
        sample, segment = next(
            (sample, segment)
            for sample, segment in zip(block.samples, block.segments, strict=True)
            if sample.fields.keys() != set(names)
        )
        return DecodeError(
            f"the sample has {sorted(sample.fields)}, the first one had {sorted(names)}",
            hint="name what every sample has: .decode(ps.Image('jpg'), ...)",
            stage="batch",
            sample_key=sample.key,
            shard=segment.url,
        )


def without_lost(block: SampleBlock) -> SampleBlock:
    """Those of its samples that are there."""
    if isinstance(block.samples, Samples) or not any(sample is LOST for sample in block.samples):
        return block
    rows = [row for row, sample in enumerate(block.samples) if sample is not LOST]
    return block._replace(
        samples=[block.samples[row] for row in rows],
        segments=[block.segments[row] for row in rows],
        positions=block.positions[rows],
    )


def declared_layout(plan: RunPlan) -> Layout | None:
    """What the pipeline itself says of dtypes and shapes; None: the first sample tells."""
    batch = plan.batch
    said = [transform.specs() for transform in plan.transforms]
    if batch.collate is not None or batch.pad or batch.ragged or any(specs != said[0] for specs in said):
        return None
    return Layout.of_specs(said[0]) if said[0] is not None else None


class DecodeTask(NamedTuple):
    """Neighbouring rows of a batch, for one decode thread; `known`: values by row where they were decoded already."""

    batch: OpenBatch
    first_row: int
    samples: Sequence[Sample]
    segments: Sequence[SampleSource]
    positions: Sequence[int]
    known: Mapping[int, Mapping[str, Any] | None]


class RowBatchBuilder:
    """Batches of decoded values, each sample in a row that is known before it is decoded.

    Args:
        run: That this fills.
        epoch: With the plan's seed and the position, what a sample's random numbers depend on.
    """

    def __init__(self, run: EpochRun, *, epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._layout = declared_layout(run.plan)
        self._size = 0  # of the batch that is open
        self._random = threading.local()
        self._task_rows_max = min(TASK_ROWS_MAX, max(1, run.plan.batch_size // (2 * run.plan.threads_count)))
        self._sample_bytes = BLOCK_BYTES_MAX // 8  # of the block before: bounds the next one

    def fill(self) -> None:
        """See ``BatchBuilder``."""
        run = self._run
        batch: OpenBatch | None = None
        while not run.stopping:
            if batch is None:
                self._size = self._next_size()
                if not self._size:
                    break
            size = self._size
            wanted = min(size - (batch.rows if batch else 0), BLOCK_ROWS_MAX, BLOCK_BYTES_MAX // self._sample_bytes)
            block = run.feed.take(max(1, wanted))
            if block is None:
                break
            self._sample_bytes = max(1, sum(memoryview(value).nbytes for value in block.samples[-1].fields.values()))
            known = self._fix_layout(block, batch) if self._layout is None else {}
            if batch is None:
                batch = self._open()
            filled = batch.rows + len(block.samples) == size
            if filled:
                batch.mark = run.feed.mark()
            self._hand_out(batch, block, known, seal=filled)
            batch = None if filled else batch
        if batch is not None and not run.plan.drop_last and not run.stopping:
            batch.mark = run.feed.mark()
            with run.changed:
                batch.sealed = True
                run.changed.notify_all()

    def work(self, task: DecodeTask) -> None:
        """See ``BatchBuilder``."""
        row = task.first_row
        error: BaseException | None = None
        dropped: list[int] = []
        try:
            for row, (sample, segment, position) in enumerate(
                zip(task.samples, task.segments, task.positions, strict=True), task.first_row
            ):
                if not self._write(task, row, sample, segment, position):
                    dropped.append(row)
        except BaseException as failure:
            error = failure
        self._finish(task.batch, len(task.samples), dropped, error=error, row=row)

    def _layout_of(self, values: Mapping[str, Any]) -> Layout:
        """The columns, where the first sample has these values."""
        return Layout(values, self._run.plan.batch)

    def _write(self, task: DecodeTask, row: int, sample: Sample, segment: SampleSource, position: int) -> bool:
        """Fill a row; False where the sample is dropped."""
        layout = self._layout
        if row in task.known:
            values = task.known[row]
            if values is not None and layout is not None:
                layout.put(task.batch.values, row, values, key=sample.key, shard=segment.url)
            return values is not None
        assert layout is not None
        return self._run.plan.transforms[segment.source].write(
            sample,
            layout,
            task.batch.values,
            row,
            shard=segment.url,
            position=position,
            random=self._thread_random(),
        )

    def _thread_random(self) -> SampleRandom:
        random: SampleRandom | None = getattr(self._random, "random", None)
        if random is None:
            random = self._random.random = SampleRandom(seed=self._run.plan.seed, epoch=self._epoch)
        return random

    def _fix_layout(self, block: SampleBlock, batch: OpenBatch | None) -> dict[int, Mapping[str, Any] | None]:
        """Take dtypes and shapes from the epoch's first sample that is kept; what was decoded for that, by row."""
        known: dict[int, Mapping[str, Any] | None] = {}
        row = batch.rows if batch is not None else 0
        for sample, segment, position in zip(block.samples, block.segments, block.positions.tolist(), strict=True):
            values: Mapping[str, Any] | None = self._run.plan.transforms[segment.source](
                sample, shard=segment.url, position=position, random=self._thread_random()
            )
            known[row] = values
            row += 1
            if values is not None:
                self._layout = self._layout_of(values)
                if batch is not None:
                    batch.layout = self._layout
                    batch.values.update(self._allocated(self._size))
                break
        return known

    def _next_size(self) -> int:
        """Rows of the batch that is opened next; 0: there is none."""
        return self._run.plan.batch_size

    def _allocated(self, size: int) -> dict[str, Any]:
        """Room for the columns of the batch that is opened now, as far as they are known."""
        return self._layout.allocate(size) if self._layout is not None else {}

    def _open(self) -> OpenBatch:
        size = self._size
        values = self._allocated(size)
        values["__key__"] = [None] * size
        values["__shard__"] = [None] * size
        values["__position__"] = np.empty(size, dtype=np.int64)
        batch = OpenBatch(values, self._layout)
        self._queue(batch)
        return batch

    def _queue(self, batch: OpenBatch) -> None:
        """A batch is begun: it will be given after those before it."""
        self._run.append(batch)

    def _hand_out(
        self, batch: OpenBatch, block: SampleBlock, known: Mapping[int, Mapping[str, Any] | None], *, seal: bool
    ) -> None:
        """Give the block its rows, and the decode threads some of them each."""
        run, first_row, count = self._run, batch.rows, len(block.samples)
        batch.values["__key__"][first_row : first_row + count] = map(_KEY, block.samples)
        batch.values["__shard__"][first_row : first_row + count] = map(_URL, block.segments)
        batch.values["__position__"][first_row : first_row + count] = block.positions
        positions = block.positions.tolist()
        step = min(self._task_rows_max, max(1, TASK_BYTES_MAX // self._sample_bytes))
        with run.changed:
            batch.rows += count
            batch.missing += count
            batch.sealed = seal
        for begin in range(0, count, step):
            end = begin + step
            run.tasks.put(
                DecodeTask(
                    batch,
                    first_row + begin,
                    block.samples[begin:end],
                    block.segments[begin:end],
                    positions[begin:end],
                    known,
                )
            )

    def _finish(
        self, batch: OpenBatch, rows_count: int, dropped: list[int], *, error: BaseException | None, row: int
    ) -> None:
        run = self._run
        with run.changed:
            batch.missing -= rows_count
            batch.dropped += dropped
            if error is not None and (batch.error is None or row < batch.error_row):
                batch.error, batch.error_row = error, row  # the first in order, whichever thread was first in time
            if batch.sealed and not batch.missing:
                run.changed.notify_all()
