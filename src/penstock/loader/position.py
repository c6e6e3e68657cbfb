"""Positions in an epoch: where reading continues, and which later batches were already handed out.

These are plain values. Feeds and lanes make them, worker processes send them, and ``state.py`` writes them as JSON. Values
that are made for each lane or each sample are tuples, which cost less to make and to pickle than dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class IndexPosition:
    """A place in the order of an index.

    Attributes:
        position: Position of the next sample in the order of the job; the end of the epoch if there is none.
    """

    position: int


class RunStart(NamedTuple):
    """The place where a run of a lane begins: the facts that a lane needs to read the run again.

    Attributes:
        run_index: Number of the run in this lane and epoch, from 0.
        segment_index: Number, in this lane and epoch, of the segment that holds the run's first sample; None if nothing of
            the run has been read.
        offset_bytes: Offset of that sample in its shard.
        sample: Number of that sample in its shard.
        before_count: Number of samples of this lane that are handed out before the run.
        format: Format of that shard, a name in ``formats``.
        etag: ETag of that shard; None if the store did not return one.
    """

    run_index: int
    segment_index: int | None
    offset_bytes: int
    sample: int
    before_count: int
    format: str | None = None
    etag: str | None = None


LanePosition: TypeAlias = tuple[RunStart, int]
"""A place in a lane: the run that is being handed out, and the number of its samples that were given before.

A plain tuple, because one is made for each lane and batch: as a named tuple it would take three times as long to make.
"""

LANE_BEGIN: LanePosition = (RunStart(0, None, 0, 0, 0), 0)
"""The position of a lane from which nothing has been read."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A place in the order of whole shards, which no index describes.

    Attributes:
        round_count: Number of complete rounds over the lanes.
        turn: Number of lanes that have had their turn in the current round.
        remaining_count: Number of samples that may still be handed out; None if there is no limit.
        lanes: Positions of the lanes that are not empty, by lane number.
    """

    round_count: int
    turn: int
    remaining_count: int | None
    lanes: Mapping[int, LanePosition]


FeedPosition: TypeAlias = IndexPosition | StreamPosition


REBATCHED_SAMPLES_MAX = 64
"""Most samples that are passed to stages between two bases of a ``RebatchedPosition``: a run that resumes decodes at most this
number again."""


class RebatchedPosition(NamedTuple):
    """A place between two samples that stages made, where stages change the number of samples.

    Attributes:
        base: Position of the feed, before the samples that were passed to the stages.
        skip_count: Number of samples that stages made of those after `base`, and that have been handed out.
        skip_tokens: Number of tokens of the next one that have been handed out in blocks; 0 without ``token_blocks``.
    """

    base: FeedPosition
    skip_count: int
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutOfOrderPosition:
    """A place in an epoch whose batches are handed out in any order.

    Attributes:
        base: Position before the first batch that has not been handed out.
        handed_out: Numbers of the batches after `base` that have been handed out, counted from `base`, ascending.
        global_size: Number of samples in a batch of all ranks.
    """

    base: FeedPosition
    handed_out: tuple[int, ...]
    global_size: int


Position: TypeAlias = FeedPosition | RebatchedPosition | OutOfOrderPosition


def feed_position(position: Position | None) -> FeedPosition | None:
    """The position from which the feed continues; None is the beginning of the epoch."""
    return position.base if isinstance(position, RebatchedPosition | OutOfOrderPosition) else position


def rebatched_position(position: Position | None, base: FeedPosition) -> RebatchedPosition:
    """The place at which batches of what stages make go on, if the feed continues from `base`, that of `position`."""
    return position._replace(base=base) if isinstance(position, RebatchedPosition) else RebatchedPosition(base, 0)
