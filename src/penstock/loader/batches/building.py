"""Builders of batches in which each sample is one row.

Members that are not decoded are put into columns a block at a time, in the reader thread: a call per sample, or passing each
batch to another thread, would cost more than the work itself. All other samples go to the decode threads, a few rows at a
time.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.config import MIB
from penstock.errors import DecodeError
from penstock.formats import LOST, Samples
from penstock.loader.batches.threads import OpenBatch
from penstock.memory.buffers import as_bytes, is_typed
from penstock.samples.columns import Layout
from penstock.samples.decoding import ThreadRandom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.formats import Sample
    from penstock.loader.batches.threads import ThreadBackend
    from penstock.loader.lanes.feed import Feed, SampleBlock
    from penstock.loader.lanes.segments import SampleSource
    from penstock.loader.options import BatchPlan

TASK_ROWS_MAX = 32
TASK_BYTES_MAX = 4 * MIB  # a task keeps the parts alive that its samples lie in
BLOCK_ROWS_MAX = 128  # rows of a batch that are read before the first of them is decoded
BLOCK_BYTES_MAX = 16 * MIB

_KEY, _FIELDS, _URL = attrgetter("key"), attrgetter("fields"), attrgetter("url")


class RawBatchBuilder:
    """Builds batches of members as they are stored: lists of ``bytes``.

    Args:
        backend: Backend whose batches this builder makes.
        feed: Samples of the epoch.
    """

    def __init__(self, backend: ThreadBackend, feed: Feed) -> None:
        self._backend = backend
        self._feed = feed
        self._names: tuple[str, ...] | None = None
        self._typed: set[str] = set()  # members that are numbers by their format

    def build(self) -> None:
        """Make all batches, in the reader thread."""
        backend, feed, size = self._backend, self._feed, self._backend.plan.batch_size
        while not backend.stopping and (block := feed.take(size)) is not None:
            rows = len(block.samples)
            if rows < size and backend.plan.drop_last:
                return
            kept = without_lost(block)
            batch = OpenBatch(self.columns(kept) if kept.samples else {}, None)
            batch.rows = len(kept.samples)
            batch.sealed = True
            batch.position = feed.position()
            backend.append(batch)

    def columns(self, block: SampleBlock) -> dict[str, Any]:
        """The columns of a batch that holds the samples of `block`."""
        samples = block.samples
        if self._names is None:
            first = samples[0].fields
            self._names = tuple(first)
            self._typed = {name for name, value in first.items() if is_typed(value)}
        is_whole = isinstance(samples, Samples) and not any(samples.valid(name) is not None for name in samples.names)
        if is_whole and isinstance(samples, Samples) and set(samples.names) == set(self._names):
            values = {name: samples.array(name) for name in self._names}
        else:
            values = self._gathered(block, self._names)
        values["__key__"] = keys_of(samples)
        values["__shard__"] = list(map(_URL, block.segments))
        values["__position__"] = block.positions
        return values

    def _gathered(self, block: SampleBlock, names: tuple[str, ...]) -> dict[str, Any]:
        """The columns of samples that are objects of their own, not columns already."""
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
                    f"{array.dtype}{list(array.shape)}, but another sample of the batch has {first.dtype}{list(first.shape)}",
                    hint="give all the same shape and dtype in .map(), or use .batch(pad=) or .batch(ragged=)",
                    stage="batch",
                    field=name,
                    sample_key=sample.key,
                    shard=segment.url,
                )
        return np.stack(arrays)

    def _other(self, block: SampleBlock) -> DecodeError:
        """The error for the first sample whose members differ from those of the epoch's first sample."""
        names = self._names or ()
        sample, segment = next(
            (sample, segment)
            for sample, segment in zip(block.samples, block.segments, strict=True)
            if sample.fields.keys() != set(names)
        )
        return DecodeError(
            f"the sample has {sorted(sample.fields)}, but the first one had {sorted(names)}",
            hint="a null is no field: .decode() those that all samples have, or ps.Integer('cls', default=0)",
            stage="batch",
            sample_key=sample.key,
            shard=segment.url,
        )


def keys_of(samples: Sequence[Sample]) -> list[str]:
    """The keys of samples."""
    return samples.keys if isinstance(samples, Samples) else list(map(_KEY, samples))


def without_lost(block: SampleBlock) -> SampleBlock:
    """The block without the samples that were lost to corruption."""
    if isinstance(block.samples, Samples) or not any(sample is LOST for sample in block.samples):
        return block
    rows = [row for row, sample in enumerate(block.samples) if sample is not LOST]
    return block._replace(
        samples=[block.samples[row] for row in rows],
        segments=[block.segments[row] for row in rows],
        positions=block.positions[rows],
    )


def declared_layout(plan: BatchPlan) -> Layout | None:
    """The layout that the stages of the pipeline declare; None if only the first sample tells dtypes and shapes."""
    batch = plan.batch
    declared = [transform.specs() for transform in plan.transforms]
    first = declared[0]
    if first is None or batch.collate is not None or batch.pad or batch.ragged:
        return None
    return Layout.of_specs(first) if all(specs == first for specs in declared) else None


class DecodeTask(NamedTuple):
    """Neighbouring rows of a batch, for one decode thread.

    Attributes:
        batch: The batch.
        first_row: Row of the first sample.
        samples: Samples of these rows, in order.
        segments: Source of each sample.
        positions: Position of each sample in the order of the job.
        known: Values of samples that have been decoded already, by row; None for a sample that was dropped.
    """

    batch: OpenBatch
    first_row: int
    samples: Sequence[Sample]
    segments: Sequence[SampleSource]
    positions: Sequence[int]
    known: Mapping[int, Mapping[str, Any] | None]


class RowBatchBuilder:
    """Builds batches of decoded values; the row of each sample is known before the sample is decoded.

    Args:
        backend: Backend whose batches this builder makes.
        feed: Samples of the epoch.
        epoch: Epoch number, from 0. With the seed and the position it determines a sample's random numbers.
    """

    def __init__(self, backend: ThreadBackend, feed: Feed, *, epoch: int) -> None:
        self._backend = backend
        self._feed = feed
        self._layout = declared_layout(backend.plan)
        self._size = 0  # rows of the batch that is open
        self._random = ThreadRandom(seed=backend.plan.seed, epoch=epoch)
        self._task_rows_max = min(TASK_ROWS_MAX, max(1, backend.plan.batch_size // (2 * backend.plan.threads_count)))
        self._sample_bytes = BLOCK_BYTES_MAX // 8  # size of a sample of the last block: it bounds the next block
        self._rows_max = BLOCK_ROWS_MAX

    def build(self) -> None:
        """Make all batches, in the reader thread."""
        backend, feed = self._backend, self._feed
        batch: OpenBatch | None = None
        while not backend.stopping:
            if batch is None:
                self._size = self._next_size()
                if not self._size:
                    break
            size = self._size
            wanted = min(size - (batch.rows if batch else 0), self._rows_max, BLOCK_BYTES_MAX // self._sample_bytes)
            block = feed.take(max(1, wanted))
            if block is None:
                break
            self._sample_bytes = max(1, sum(memoryview(value).nbytes for value in block.samples[-1].fields.values()))
            known = self._fix_layout(block, batch) if self._layout is None else {}
            if batch is None:
                batch = self._open()
            filled = batch.rows + len(block.samples) == size
            if filled:
                batch.position = feed.position()
            self._hand_out(batch, block, known, seal=filled)
            batch = None if filled else batch
        if batch is not None and not backend.plan.drop_last and not backend.stopping:
            batch.position = feed.position()
            with backend.changed:
                batch.sealed = True
                backend.changed.notify_all()

    def _decode(self, task: DecodeTask) -> None:
        """Fill the rows of one task, in a decode thread."""
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
        """The layout of batches whose first sample has these values."""
        return Layout(values, self._backend.plan.batch)

    def _write(self, task: DecodeTask, row: int, sample: Sample, segment: SampleSource, position: int) -> bool:
        """Fill a row; False if the sample is dropped."""
        layout = self._layout
        if row in task.known:
            values = task.known[row]
            if values is not None and layout is not None:
                layout.put(task.batch.values, row, values, key=sample.key, shard=segment.url)
            return values is not None
        assert layout is not None
        return self._backend.plan.transforms[segment.source].write(
            sample,
            layout,
            task.batch.values,
            row,
            shard=segment.url,
            position=position,
            random=self._random.random,
        )

    def _fix_layout(self, block: SampleBlock, batch: OpenBatch | None) -> dict[int, Mapping[str, Any] | None]:
        """Take dtypes and shapes from the first sample that is kept. Returns the values that were decoded for it, by row."""
        known: dict[int, Mapping[str, Any] | None] = {}
        row = batch.rows if batch is not None else 0
        for sample, segment, position in zip(block.samples, block.segments, block.positions.tolist(), strict=True):
            values: Mapping[str, Any] | None = self._backend.plan.transforms[segment.source](
                sample, shard=segment.url, position=position, random=self._random.random
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
        """Number of rows of the next batch; 0 if there is none."""
        return self._backend.plan.batch_size

    def _allocated(self, size: int) -> dict[str, Any]:
        """Memory for those columns of a new batch that are already known."""
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
        """Append a new batch to the queue of the backend, while it is still being filled."""
        self._backend.append(batch)

    def _hand_out(
        self, batch: OpenBatch, block: SampleBlock, known: Mapping[int, Mapping[str, Any] | None], *, seal: bool
    ) -> None:
        """Give the samples of a block their rows, and hand them to the decode threads as tasks."""
        backend, first_row, count = self._backend, batch.rows, len(block.samples)
        batch.values["__key__"][first_row : first_row + count] = keys_of(block.samples)
        batch.values["__shard__"][first_row : first_row + count] = map(_URL, block.segments)
        batch.values["__position__"][first_row : first_row + count] = block.positions
        if self._put_columns(batch, block):
            self._rows_max = self._size  # no thread waits for rows to decode
            with backend.changed:
                batch.rows += count
                batch.sealed = seal
                backend.changed.notify_all()
            return
        positions = block.positions.tolist()
        step = min(self._task_rows_max, max(1, TASK_BYTES_MAX // self._sample_bytes))
        with backend.changed:
            batch.rows += count
            batch.missing += count
            batch.sealed = seal
        for begin in range(0, count, step):
            end = begin + step
            task = DecodeTask(
                batch,
                first_row + begin,
                block.samples[begin:end],
                block.segments[begin:end],
                positions[begin:end],
                known,
            )
            backend.tasks.put(partial(self._decode, task))

    def _put_columns(self, batch: OpenBatch, block: SampleBlock) -> bool:
        """Fill the rows of a block here, if its samples can be decoded in columns."""
        transforms = self._backend.plan.transforms
        if self._layout is None or len(transforms) > 1 or not isinstance(block.samples, Samples):
            return False
        columns = transforms[0].columns(block.samples) if transforms[0].takes_columns else None
        return columns is not None and self._layout.put_columns(batch.values, batch.rows, columns)

    def _finish(
        self, batch: OpenBatch, rows_count: int, dropped: list[int], *, error: BaseException | None, row: int
    ) -> None:
        backend = self._backend
        with backend.changed:
            batch.missing -= rows_count
            batch.dropped += dropped
            if error is not None and (batch.error is None or row < batch.error_row):
                batch.error, batch.error_row = error, row  # the first row in order, whichever thread failed first
            if batch.sealed and not batch.missing:
                backend.changed.notify_all()
