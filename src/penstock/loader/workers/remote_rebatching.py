"""Stages that change the number of samples, with worker processes: the workers decode, the loader makes batches.

How many outputs the samples of a lane become is known only after they have gone through the stages. So workers are assigned
blocks of the rank's samples, and return for each sample the list of its outputs; the loader's reader thread takes these
lists in the order of the samples and makes batches of them, as it does without processes. The state is the same: a position
in the rank's samples, and the number of outputs after it that were handed out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.loader.batches.rebatching import Rebatcher, TransformOutput
from penstock.loader.batches.threads import ThreadBackend
from penstock.loader.position import REBATCHED_SAMPLES_MAX, IndexPosition, RebatchedPosition, StreamPosition
from penstock.loader.workers.messages import RemoteError
from penstock.pipeline import Batch
from penstock.pipeline.fields import OBJECT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.formats import Sample
    from penstock.loader.options import BatchPlan
    from penstock.loader.position import FeedPosition
    from penstock.loader.statistics import Meter
    from penstock.loader.workers.process_run import ProcessBackend
    from penstock.order import Batches
    from penstock.pipeline import Spec
    from penstock.samples.columns import Layout
    from penstock.samples.decoding import SampleRandom
    from penstock.samples.transform import SampleTransform

BLOCKS_AHEAD = 3
OUTPUTS = "__outputs__"
"""Name of the column that holds the list of outputs of each sample."""


def block_plan(plan: BatchPlan) -> BatchPlan:
    """The settings by which workers make blocks, if `plan` says how the loader makes batches of them."""
    transforms: Any = tuple(map(ListTransform, plan.transforms))
    return plan._replace(
        transforms=transforms,
        batch=Batch(size=REBATCHED_SAMPLES_MAX),
        batch_size=REBATCHED_SAMPLES_MAX,
        drop_last=False,
        prefetch_batches=BLOCKS_AHEAD,
        prefetch_bytes=0,
    )


class ListTransform:
    """Gives each sample one field: the list of its outputs in ``SampleTransform``, or the error.

    The error waits in its row, so that the outputs ahead of it are handed out before it is raised.
    """

    def __init__(self, transform: SampleTransform) -> None:
        self._transform = transform
        self.tolerance = transform.tolerance

    def specs(self) -> dict[str, Spec]:
        """The one column."""
        return {OUTPUTS: OBJECT}

    def write(
        self,
        sample: Sample,
        layout: Layout,
        batch: dict[str, Any],
        row: int,
        *,
        shard: str,
        position: int,
        random: SampleRandom,
    ) -> bool:
        """Write the outputs of a sample into its row; none is dropped."""
        found: Any
        try:
            found = self._transform(sample, shard=shard, position=position, random=random)
        except Exception as error:
            found = RemoteError.of(error)
        if not isinstance(found, list | RemoteError):
            found = [] if found is None else [found]
        batch[OUTPUTS][row] = found
        return True


class Blocks:
    """The blocks of an epoch in order, each with the position before it.

    Args:
        run: Run of the workers.
        batches: Positions of the samples of each block; None if they are known only after reading.
        begin: Position before the first block.
    """

    def __init__(self, run: ProcessBackend, *, batches: Batches | None, begin: FeedPosition) -> None:
        self._run = run
        self._batches = batches
        self._position = begin
        self._count = 0
        self._closing = threading.Lock()  # the reader thread closes the run as it ends, and so does Loader.close()

    def next(self) -> tuple[FeedPosition, Mapping[str, Any], int] | None:
        """The position before a block, its columns, and the number of its rows; None at the end. Blocks.

        Raises:
            PenstockError: For the same reasons as ``ProcessBackend.next_batch``.
        """
        delivery = self._run.next_batch()
        if delivery is None:
            return None
        before = self._position
        if self._batches is not None:
            self._position = IndexPosition(self._batches.position_after(self._count))
        else:
            assert isinstance(delivery.position, StreamPosition)
            self._position = delivery.position
        self._count += 1
        return before, delivery.values, delivery.rows

    def close(self) -> None:
        """End the run of the workers; idempotent. May be called from any thread."""
        with self._closing:
            self._run.close()


class RemoteRebatcher(Rebatcher):
    """Rebatches what worker processes made; there is nothing to decode in this process.

    Args:
        run: Run whose batches this builder makes.
        blocks: Blocks of outputs, in order.
        begin: Position at which the batches go on.
    """

    def __init__(self, run: ThreadBackend, blocks: Blocks, *, begin: RebatchedPosition) -> None:
        super().__init__(run, begin=begin)
        self._blocks = blocks

    def _outputs(self) -> Iterator[TransformOutput]:
        while (block := self._blocks.next()) is not None:
            position, values, rows_count = block
            positions, count = values["__position__"].tolist(), 0
            for row in range(rows_count):
                found = values[OUTPUTS][row]
                if isinstance(found, RemoteError):
                    raise found.revived("a worker process")
                for each in found:
                    count += 1
                    after = RebatchedPosition(position, count)
                    yield TransformOutput(each, values["__key__"][row], values["__shard__"][row], positions[row], after)


def rebatching_backend(plan: BatchPlan, blocks: Blocks, *, begin: RebatchedPosition, meter: Meter) -> ThreadBackend:
    """The run in the training process: a reader thread that rebatches, and no decode threads."""
    return ThreadBackend(
        plan._replace(threads_count=0),
        reads=blocks,
        builder=lambda run: RemoteRebatcher(run, blocks, begin=begin),
        meter=meter,
    )
