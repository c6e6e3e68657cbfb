"""What the stages of a pipeline mean for its samples and batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline import Batch, BatchBySize, Evaluate, Filter, FlatMap, Shards, Shuffle, Take, TokenBlocks
from penstock.samples.transform import SampleTransform

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


def is_plain(pipeline: Pipeline) -> bool:
    """Whether samples are not changed: batches are lists of members as they are stored."""
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    batch = pipeline.stage(Batch)
    shapes = batch is None or batch.collate is not None or batch.pad or batch.ragged
    return not shapes and all(isinstance(stage, Shuffle | Take | Evaluate | Batch) for stage in stages)


def may_drop(pipeline: Pipeline) -> bool:
    """Whether samples may be left out of their batch: filtered, failed within ``max_errors``, or corrupt."""
    leaves = pipeline.flat().leaves
    skips = any(isinstance(leaf.source, Shards) and leaf.source.on_corrupt != "raise" for leaf in leaves)
    return skips or any(SampleTransform(leaf).may_drop for leaf in leaves)


def rebatches(pipeline: Pipeline) -> bool:
    """Whether stages change the number of samples, so that what comes out of them fills the batches."""
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    return any(
        isinstance(stage, FlatMap | TokenBlocks | BatchBySize) or (isinstance(stage, Filter) and stage.refill)
        for stage in stages
    )


def row_bytes(pipeline: Pipeline) -> int | None:
    """Size of a sample in a batch, in bytes; None if the stages alone do not tell."""
    if (blocks := pipeline.stage(TokenBlocks)) is not None:
        return blocks.length * (np.dtype(blocks.dtype).itemsize + 8 * blocks.position_ids)
    specs = SampleTransform(pipeline.flat().leaves[0]).specs()
    if specs is None or any(spec.dtype == "object" for spec in specs.values()):
        return None
    return sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs.values())
