"""Builders of batches where stages change the number of samples, such as ``flat_map``, ``token_blocks`` and ``batch_by_size``.

The row of a sample is not known before all samples ahead of it have been decoded. So the decode threads return lists of
values, and the reader thread puts these values into rows, in order. Values that do not fit into a batch go into the next one.
A state therefore consists of a position of the feed and the number of outputs after it that were handed out already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import DecodeError
from penstock.loader.batches.threads import OpenBatch
from penstock.loader.position import RebatchedPosition
from penstock.pipeline import BatchBySize
from penstock.samples.columns import Layout
from penstock.samples.decoding import ThreadRandom
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.loader.batches.threads import ThreadBackend
    from penstock.loader.lanes.feed import Feed, SampleBlock
    from penstock.loader.position import FeedPosition
    from penstock.pipeline import TokenBlocks
    from penstock.pipeline.batching import SizeBudget


class TransformOutput(NamedTuple):
    """One sample that came out of the stages, or a block of tokens of several.

    Attributes:
        values: Values by name.
        key: Key of the stored sample that it was made of; of a block, that of its first token.
        url: URL of the shard of that sample.
        position: Position of that sample in the order of the job.
        after: Position after this output.
    """

    values: Mapping[str, Any]
    key: str
    url: str
    position: int
    after: RebatchedPosition


def cut_blocks(
    documents: Iterable[TransformOutput], stage: TokenBlocks, *, skip_tokens: int
) -> Iterator[TransformOutput]:
    """Concatenate the tokens of `documents`, and cut them into blocks of ``stage.length``.

    Args:
        documents: Outputs of the stages before this one, in order.
        stage: Length of a block, field, separator, padding and dtype.
        skip_tokens: Number of tokens of the first document that were handed out before.

    Raises:
        DecodeError: A document has no such field, or one that is not a sequence of whole numbers that the dtype holds.
    """
    block: _OpenBlock | None = None
    after: RebatchedPosition | None = None
    for document in documents:
        tokens, at = _tokens_of(document, stage), skip_tokens
        skip_tokens, after = 0, document.after
        while at < len(tokens):
            if block is None:
                block = _OpenBlock(stage, document)
            at += block.add(tokens[at:])
            if block.is_full:
                if at < len(tokens):  # it is the document before which `after` lies, and a part of it
                    yield block.output(after._replace(skip_count=after.skip_count - 1, skip_tokens=at))
                else:
                    yield block.output(after)
                block = None
    if block is not None and after is not None and stage.pad is not None:
        block.add(np.full(stage.length, stage.pad))
        yield block.output(after)


class _OpenBlock:
    """A block that is being filled; its first token is of the document `first`."""

    def __init__(self, stage: TokenBlocks, first: TransformOutput) -> None:
        self._stage = stage
        self._first = first
        self._filled = 0
        self._tokens = np.empty(stage.length, stage.dtype)
        self._position_ids = np.empty(stage.length, np.int64) if stage.position_ids else None

    @property
    def is_full(self) -> bool:
        return self._filled == self._stage.length

    def add(self, tokens: NDArray[Any]) -> int:
        """Add as many of these tokens of one document as fit, and return their number."""
        begin, end = self._filled, min(self._stage.length, self._filled + len(tokens))
        self._tokens[begin:end] = tokens[: end - begin]
        if self._position_ids is not None:
            self._position_ids[begin:end] = np.arange(end - begin)
        self._filled = end
        return end - begin

    def output(self, after: RebatchedPosition) -> TransformOutput:
        values = (self._tokens,) if self._position_ids is None else (self._tokens, self._position_ids)
        fields = dict(zip(self._stage.names, values, strict=True))
        return TransformOutput(fields, self._first.key, self._first.url, self._first.position, after)


def _tokens_of(document: TransformOutput, stage: TokenBlocks) -> NDArray[Any]:
    """The tokens of a document, and its separator: [count], of an integer dtype. A document without tokens has none."""
    try:
        found = document.values[stage.field]
        tokens = np.asarray(found)
        if not tokens.size:
            return np.empty(0, np.int64)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(f"it is {type(found).__name__} of {tokens.dtype}{list(tokens.shape)}")
        if not np.can_cast(tokens.dtype, stage.dtype):
            bounds = np.iinfo(stage.dtype)
            if tokens.min() < bounds.min or tokens.max() > bounds.max:
                raise ValueError(f"{stage.dtype} does not hold all of {tokens.min()} to {tokens.max()}")
            tokens = tokens.astype(stage.dtype)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"the document has no such field, only {', '.join(document.values)}"
        raise DecodeError(
            missing if isinstance(error, KeyError) else f"is not a sequence of whole numbers: {error}",
            hint="a .map() before .token_blocks() that returns {'tokens': tokenizer(...)}",
            stage="token_blocks",
            field=stage.field,
            sample_key=document.key,
            shard=document.url,
        ) from error
    return tokens if stage.separator is None else np.append(tokens, np.array(stage.separator, stage.dtype))


def cu_seqlens(position_ids: Any) -> NDArray[np.int32]:
    """Return where the documents of a batch begin and end, in the form that ``flash_attn_varlen_func`` takes.

    Args:
        position_ids: ``batch["position_ids"]`` of ``token_blocks``, int64[B, length]: an array, or a tensor of the host.

    Returns:
        int32[n + 1], from 0 to B x length, for n documents and parts of documents in ``batch["tokens"].reshape(-1)``.
    """
    flat = np.asarray(position_ids).reshape(-1)
    return np.append(np.flatnonzero(flat == 0), flat.size).astype(np.int32)


TASK_SAMPLES_MAX = 16
TASKS_PER_THREAD = 3


@dataclass(slots=True, eq=False, repr=False)
class _Task:
    """Samples for one decode thread, and the outputs that it made of them."""

    block: SampleBlock
    base: FeedPosition
    # values of each output, and the index in the block of the sample that they were made of
    found: list[tuple[Mapping[str, Any], int]] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False


class Rebatcher(ABC):
    """Builds batches of the outputs of the stages, however many there are.

    Args:
        backend: Backend whose batches this builder makes.
        begin: Position at which the batches go on; None is the beginning of the epoch.
    """

    def __init__(self, backend: ThreadBackend, *, begin: RebatchedPosition | None) -> None:
        self._backend = backend
        self._skip_count, self._skip_tokens = (0, 0) if begin is None else begin[1:]
        self._layout: Layout | None = None
        self._by_size = backend.plan.batch if isinstance(backend.plan.batch, BatchBySize) else None

    @abstractmethod
    def _outputs(self) -> Iterator[TransformOutput]:
        """All outputs in order."""

    def build(self) -> None:
        """Make all batches, in the reader thread."""
        held: list[TransformOutput] = []
        size = self._backend.plan.batch_size
        budget = self._by_size.budget() if self._by_size is not None else None
        before: RebatchedPosition | None = None
        outputs: Iterator[TransformOutput] = islice(self._outputs(), self._skip_count, None)
        if self._backend.plan.token_blocks is not None:
            outputs = cut_blocks(outputs, self._backend.plan.token_blocks, skip_tokens=self._skip_tokens)
        for output in outputs:
            if self._backend.stopping:
                return
            if budget is None:
                held.append(output)
                if len(held) == size:
                    self._close(held, output.after)
                    held = []
                continue
            verdict = self._verdict(budget, output)
            if verdict == "drop":
                self._backend.meter.oversize_count += 1
                continue
            if verdict == "new" and before is not None:
                self._close(held, before)
                held = []
            held.append(output)
            before = output.after
        if held and not self._backend.plan.drop_last and not self._backend.stopping:
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
        """Make a batch of these outputs and append it to the queue of the backend."""
        if self._layout is None:
            self._layout = Layout(held[0].values, self._backend.plan.batch)
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
        self._backend.append(batch)


class LocalRebatcher(Rebatcher):
    """Rebatches the outputs of this process's decode threads.

    Args:
        backend: Backend whose batches this builder makes.
        feed: Samples of the epoch.
        epoch: Epoch number, from 0. With the seed and the position it determines a sample's random numbers.
        begin: Position at which the batches go on; None is the beginning of the epoch.
    """

    def __init__(self, backend: ThreadBackend, feed: Feed, *, epoch: int, begin: RebatchedPosition | None) -> None:
        super().__init__(backend, begin=begin)
        self._feed = feed
        self._random = ThreadRandom(seed=backend.plan.seed, epoch=epoch)

    def _decode(self, task: _Task) -> None:
        """Decode the samples of one task, in a decode thread."""
        block, random = task.block, self._random.random
        try:
            for index, (sample, segment, position) in enumerate(
                zip(block.samples, block.segments, block.positions.tolist(), strict=True)
            ):
                transform = self._backend.plan.transforms[segment.source]
                result = transform(sample, shard=segment.url, position=position, random=random)
                if isinstance(result, list):
                    task.found += [(values, index) for values in result]
                elif result is not None:
                    task.found.append((result, index))
        except BaseException as error:
            task.error = error
        with self._backend.changed:
            task.done = True
            self._backend.changed.notify_all()

    def _outputs(self) -> Iterator[TransformOutput]:
        """All outputs in the order of their samples, whichever thread was first."""
        backend, feed = self._backend, self._feed
        tasks: deque[_Task] = deque()
        tasks_max = TASKS_PER_THREAD * backend.plan.threads_count
        goes_on = True
        while not backend.stopping:
            while goes_on and len(tasks) < tasks_max:
                base = feed.position()
                block = feed.take(TASK_SAMPLES_MAX)
                if block is None:
                    goes_on = False
                else:
                    tasks.append(_Task(block, base))
                    backend.tasks.put(partial(self._decode, tasks[-1]))
            if not tasks:
                return
            task = tasks.popleft()
            with backend.changed:
                backend.changed.wait_for(lambda task=task: task.done or backend.stopping)  # type: ignore[misc]
            if not task.done:
                return
            block = task.block
            for count, (values, index) in enumerate(task.found, 1):
                sample, segment = block.samples[index], block.segments[index]
                after = RebatchedPosition(task.base, count)
                yield TransformOutput(values, sample.key, segment.url, int(block.positions[index]), after)
            if task.error is not None:
                raise task.error
