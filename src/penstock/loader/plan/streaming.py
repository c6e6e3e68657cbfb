"""Reading without an index: whole shards in lanes, and a cursor that says where each lane is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.formats import FORMATS
from penstock.loader.lanes.feed import Begun, LanesFeed, Mark
from penstock.loader.lanes.lane import Lane, Pins, RunStart
from penstock.loader.lanes.reading import LaneReader, Segment
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.lanes.feed import Batching
    from penstock.loader.lanes.reading import Reading
    from penstock.loader.plan.memory import Holding
    from penstock.loader.shards import Shard
    from penstock.order import StreamOrder


SIZED_COUNT = 8
"""Samples of each lane from which the size of all is estimated."""


class StreamJob:
    """What this rank reads, in the order that needs no index.

    Args:
        shards: Of the data set, as listed.
        order: Of epoch 0.
        reading: How.
        holding: What that holds, once the size of samples is known.
    """

    mode = "stream"

    def __init__(self, shards: Sequence[Shard], *, order: StreamOrder, reading: Reading, holding: Holding) -> None:
        self.order = order
        self._holding = holding
        self._shards = shards
        self.reading = reading

    def begin(self, epoch: int, cursor: Mapping[str, Any] | None, *, batching: Batching) -> Begun:
        """See ``Job``.

        Raises:
            ConfigError: the cursor is none of this job's.
        """
        order = self.order.at_epoch(epoch)
        pins = Pins(self.reading.pinned_bytes_max)
        lanes: list[Lane] = []
        read: list[Segment] = []
        try:
            for number in order.lanes_owned:
                if cursor is None or str(number) in cursor["lanes"]:
                    entry = cursor["lanes"][str(number)] if cursor is not None else None
                    lanes.append(self._lane(number, order, pins, entry, read))
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        if self.reading.recording is not None:
            self.reading.recording.begin(segment.shard for segment in read)
        round_count, turn = (cursor["round"], cursor["turn"]) if cursor is not None else (0, 0)
        left_count = cursor["left"] if cursor is not None else batching.take
        feed = LanesFeed(
            lanes,
            lanes_count=order.lanes_count,
            round_count=round_count,
            turn=turn,
            count=left_count,
            window_bytes=lambda: self._checked(lanes),
        )
        return Begun(feed, None)

    def divided(self, rank: int, world_size: int) -> StreamJob:
        """See ``Job``; nothing is recorded of what it reads."""
        order = replace(self.order, rank=rank, world_size=world_size, lanes=self.order.lanes_configured)
        return StreamJob(
            self._shards, order=order, reading=self.reading._replace(recording=None), holding=self._holding
        )

    def _checked(self, lanes: Sequence[Lane]) -> int:
        """What the window of these lanes holds, now that samples are here; one that the budget cannot hold is refused."""
        samples = [sample for lane in lanes for sample in lane.first(SIZED_COUNT)]
        if not samples or not self.order.shuffled:
            return 0
        sizes = [value.nbytes for sample in samples for value in sample.fields.values()]
        plan = self._holding.plan(sum(sizes) / len(samples), self.reading.sizes)
        plan.check()
        return plan.window_bytes * len(lanes) // self._holding.readers_count

    def batches(self, epoch: int, *, batching: Batching) -> None:
        """See ``Job``; nobody knows."""

    def cursor(self, mark: Mark) -> dict[str, Any]:
        """`mark` as JSON: by lane that is not empty, where its run begins and how many samples of it have left."""
        lanes = {str(number): _entry(start, emitted) for number, (start, emitted) in mark.lanes.items()}
        return {"round": mark.round_count, "turn": mark.turn, "left": mark.left_count, "lanes": lanes}

    def _lane(
        self, number: int, order: StreamOrder, pins: Pins, entry: Mapping[str, Any] | None, read: list[Segment]
    ) -> Lane:
        """A lane; `read` grows by what it reads."""
        segments = [Segment(self._shards[shard], index) for index, shard in enumerate(order.shards_of(number))]
        start, emitted = None, 0
        if entry is not None:
            first = _segment(segments, entry)
            segments = [first, *segments[first.index + 1 :]]
            start = RunStart(entry["run"], first, entry["offset_bytes"], entry["sample"], entry["before"])
            emitted = entry["emitted"]
        read += segments
        reader = LaneReader(segments, reading=self.reading)
        return Lane(number, runs=order, reader=reader, pins=pins, start=start, skip_count=emitted)


def _entry(start: RunStart, emitted: int) -> dict[str, Any] | None:
    segment = start.segment
    if segment is None:
        return None  # nothing of the lane was read yet
    return {
        "segment": segment.index,
        "format": segment.format,
        "etag": segment.shard.etag,
        "offset_bytes": start.offset_bytes,
        "sample": start.sample,
        "run": start.run_index,
        "before": start.before_count,
        "emitted": emitted,
    }


def _segment(segments: Sequence[Segment], entry: Mapping[str, Any]) -> Segment:
    """The rest of the shard in which a run begins."""
    index = entry["segment"]
    if not 0 <= index < len(segments):
        raise ConfigError(f"the state names shard {index} of a lane that has {len(segments)}")
    shard = segments[index].shard
    shard.etag = shard.etag or strong_etag(entry["etag"])  # older states hold it as the store wrote it
    form = FORMATS[entry["format"]]
    if form.unit == "sample" and form.ranged is None:
        return Segment(
            shard,
            index,
            offset_bytes=entry["offset_bytes"],
            first_sample=entry["sample"],
            format_name=entry["format"],
        )
    # its table of contents tells where the run begins; where there is none, the shard is read from its head again
    return Segment(shard, index, skip_count=entry["sample"], format_name=entry["format"])
