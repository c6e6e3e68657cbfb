"""Lanes: sequences of samples that are read in stored order and permuted in runs; and the lanes of a mix of sources.

A run is filled while the previous run is handed out, one sample in for each sample out. So reading is even, and a lane never
holds many more samples than one run has. Everything here works on several samples at a time: a single sample takes 8 µs of
Python, a sample in a block well under 1 µs (docs/development/measurements.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.formats import LOST, Sample, joined, reordered
from penstock.formats.sample import view_of_array
from penstock.loader.position import LANE_BEGIN, LanePosition, RunStart
from penstock.memory.buffers import is_typed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.loader.lanes.lane_reader import LaneReader, SequentialLaneReader
    from penstock.loader.lanes.segments import ParsedSamples, SampleSource, SourcedSamples
    from penstock.order import IndexedOrder, MixOrder, StreamOrder


FORGOTTEN_MIN = 8
"""Smallest number of samples handed out that are let go of together. They also have to be a quarter of those that were ready,
so that it costs next to nothing."""


@dataclass(slots=True, eq=False, repr=False)
class PinnedBytes:
    """Counts the bytes of parts that samples in runs keep from being reused. Beyond the bound, samples are copied out."""

    bytes_max: int
    held_bytes: int = 0


class _Run(NamedTuple):
    """A run whose samples can be handed out.

    Attributes:
        start: Place where the run begins.
        end_count: Number of samples of the lane that are handed out once all of this run is.
        pinned_bytes: Number of bytes of parts that the run keeps from being reused.
    """

    start: RunStart
    end_count: int
    pinned_bytes: int


class SampleLane(Protocol):
    """A lane: samples that are taken from it one after the other."""

    number: int

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; returns how many are, fewer only at the end. Blocks for bytes."""

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready."""

    @property
    def is_waiting(self) -> bool:
        """Whether no sample can be taken before more bytes have arrived."""

    def read_more(self) -> None:
        """Take in one more part. Blocks for it."""

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""


class ResumableLane(SampleLane, Protocol):
    """A lane whose position does not follow from the number of samples that were taken from it."""

    def position(self) -> LanePosition:
        """The position after the samples that were taken."""


class Lane:
    """The samples of one lane, read from shards; a ``ResumableLane``.

    Args:
        number: Number of the lane.
        order: The lengths and permutations of its runs.
        reader: Reads its samples in stored order, from `start` on.
        pins: Counts pinned bytes, for all lanes of this rank.
        start: The run that is read first; None: the first of the lane.
        given_count: Number of samples of that run that were handed out before.
    """

    def __init__(
        self,
        number: int,
        *,
        order: IndexedOrder | StreamOrder,
        reader: LaneReader | SequentialLaneReader,
        pins: PinnedBytes,
        start: RunStart | None = None,
        given_count: int = 0,
    ) -> None:
        self.number = number
        self._order = order
        self._shuffled = order.shuffled  # if not, samples are handed out in stored order
        self._reader = reader
        self._pins = pins
        self._ended = False
        self._given_count = given_count
        self._pieces: deque[ParsedSamples] = deque()  # in no run yet
        self._piece_at = 0  # index in the first piece
        self._ready: Sequence[Sample] = []
        self._ready_from: list[SampleSource] = []
        self._ready_at = 0
        self._ready_runs: deque[_Run] = deque()  # at least the last one that was handed out
        self._filling: Sequence[Sample] = []
        self._filling_from: list[SampleSource] = []
        self._filling_bytes = 0
        self._wanted_count = 0  # length that the run being filled should have, by samples taken of the last one
        self._start = start or LANE_BEGIN[0]  # of the run being filled
        self._run_length = order.run_length(number, self._start.run_index)
        self._settled_count = self.taken_count = self._start.before_count

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; returns how many are, fewer only at the end. Blocks for bytes."""
        while len(self._ready_from) - self._ready_at < count and self._turn_over():
            pass
        return len(self._ready_from) - self._ready_at

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready; as many are taken in for the next run."""
        end = self._ready_at + count
        items = self._ready[self._ready_at : end], self._ready_from[self._ready_at : end]
        self._ready_at = end
        # without this a lane would hold two runs: one that was handed out, and one being filled
        if end >= FORGOTTEN_MIN and 4 * end >= len(self._ready_from):
            self._ready, self._ready_from, self._ready_at = self._ready[end:], self._ready_from[end:], 0
        self.taken_count += count
        while len(self._ready_runs) > 1 and self._ready_runs[0].end_count <= self.taken_count:
            self._pins.held_bytes -= self._ready_runs.popleft().pinned_bytes
        if self._shuffled:
            self._wanted_count = wanted = min(self._wanted_count + count, self._run_length)
            while len(self._filling_from) < wanted and (self._pieces or self._read()):
                self._fill(wanted)
        return items

    def position(self) -> LanePosition:
        """The position after the samples that were taken."""
        for run in self._ready_runs:
            if self.taken_count < run.end_count:
                return run.start, self.taken_count - run.start.before_count
        if self._start.segment_index is None and self._ready_runs:  # nothing was read of the next run
            start = self._ready_runs[-1].start
            return start, self.taken_count - start.before_count
        return self._start, self._given_count

    def first(self, count: int) -> Sequence[Sample]:
        """Up to `count` samples of the run being filled."""
        return self._filling[:count]

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        self._reader.close()

    @property
    def is_waiting(self) -> bool:
        """Whether no sample can be taken before more of its run has arrived."""
        return (
            self._ready_at == len(self._ready_from) and not self._ended and len(self._filling_from) < self._run_length
        )

    def read_more(self) -> None:
        """Take in one more part. Lanes that wait together are filled in turn, so that the requests of all are used."""
        if self._pieces or self._read():
            self._fill(self._run_length)

    def _turn_over(self) -> bool:
        """Make the run being filled ready; False at the end of the lane."""
        if self._shuffled:
            while len(self._filling_from) < self._run_length and (self._pieces or self._read()):
                self._fill(self._run_length)
        elif self._pieces or self._read():  # nothing is permuted: a piece is ready as it is
            self._run_length = len(self._pieces[0].samples) if self._pieces else 0
            self._fill(self._run_length)
        run, self._filling, self._wanted_count = self._filling, [], 0
        run_from, self._filling_from = self._filling_from, []
        if not run:
            # permuted: a run of length 0, or the end; in stored order: a part that completed no sample, or the end
            return not (self._ended or self._shuffled)
        if self._shuffled:
            order = self._order.permute_run(self.number, self._start.run_index, len(run)).tolist()
            run, run_from = reordered(run, order), [run_from[index] for index in order]
        self._settled_count += len(run)
        self._ready_runs.append(_Run(self._start, self._settled_count, self._filling_bytes))
        self._filling_bytes = 0
        run_index = self._start.run_index + 1
        self._start = RunStart(run_index, None, 0, 0, self._settled_count)
        self._run_length = self._order.run_length(self.number, run_index)
        self._ready, self._ready_from = (
            joined(self._ready[self._ready_at :], run),
            self._ready_from[self._ready_at :] + run_from,
        )
        self._ready_at = min(self._given_count, len(self._ready_from))  # 0 except after a saved position
        self._given_count -= self._ready_at
        self.taken_count += self._ready_at
        return True

    def _read(self) -> bool:
        """Read one part; False at the end of the lane."""
        pieces = self._reader.read()
        if pieces is None:
            self._ended = True
            return False
        self._pieces.extend(pieces)
        return True

    def _fill(self, length: int) -> None:
        """Move samples into the run being filled until it has `length`; samples that pin nothing may fill it up at once."""
        while self._pieces and (filled := len(self._filling_from)) < length:
            piece = self._pieces[0]
            begin = self._piece_at
            samples = piece.samples[begin : begin + (length if piece.sample_bytes else self._run_length) - filled]
            if self._start.segment_index is None:
                self._start = self._start._replace(
                    segment_index=piece.segment.index,
                    offset_bytes=samples[0].offset_bytes,
                    sample=piece.first_sample + begin,
                    format=piece.segment.format,
                    etag=piece.segment.etag,
                )
            self._piece_at += len(samples)
            if self._piece_at == len(piece.samples):
                self._pieces.popleft()
                self._piece_at = 0
            if self._shuffled:
                samples = self._pinned(samples, piece.sample_bytes)
            self._filling = joined(self._filling, samples)
            self._filling_from += [piece.segment] * len(samples)

    def _pinned(self, samples: Sequence[Sample], sample_bytes: int) -> Sequence[Sample]:
        """`samples` as they wait in a run: unchanged, or copied out if too many bytes are pinned already."""
        bytes_count = len(samples) * sample_bytes
        if self._pins.held_bytes + bytes_count <= self._pins.bytes_max:
            self._pins.held_bytes += bytes_count
            self._filling_bytes += bytes_count
            return samples
        return [copied(sample) for sample in samples]


def copied(sample: Sample) -> Sample:
    """`sample` with its values in memory of their own; types and shapes stay."""
    if sample is LOST:
        return sample
    fields = {
        name: view_of_array(np.array(value)) if is_typed(value) else memoryview(bytes(value))
        for name, value in sample.fields.items()
    }
    return Sample(sample.key, fields, sample.offset_bytes, sample.size_bytes)


TURNS_COUNT = 512
"""Number of turns that are taken from the order at once: a call costs as much as a few hundred turns."""

OpenLane: TypeAlias = "Callable[[int, int], tuple[SampleLane, int]]"
"""``open_lane(source, taken)`` returns a lane of a source after its first `taken` samples, and the number of samples from
there to the end of that pass over the source."""


class MixedLane:
    """One lane of a mix: takes samples from the lanes of its sources, in the turns that the order gives; a ``SampleLane``.

    Args:
        number: Number of the lane.
        order: Says which source's turn it is.
        round_index: Round at which the lane begins, from 0: as many of its samples were handed out before.
        open_lane: Opens the lanes of the sources.
    """

    def __init__(self, number: int, *, order: MixOrder, round_index: int, open_lane: OpenLane) -> None:
        self.number = number
        self._order = order
        self._round_index = round_index
        self._open_lane = open_lane
        # by source, the number of samples before the next lane to open
        self._opened_to = list(order.taken(number, round_index))
        self._lanes: list[deque[_SourcePass]] = [deque() for _ in self._opened_to]
        self._turns: NDArray[np.int64] = np.empty(0, np.int64)  # from `_round_index` on
        try:
            for source in np.unique(self._turns_of(TURNS_COUNT)).tolist():
                self._open(source)
        except BaseException:
            self.close()
            raise

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; returns how many are, fewer only at the end. Blocks for bytes."""
        turns = self._turns_of(count)
        for source, wanted in enumerate(np.bincount(turns, minlength=len(self._lanes)).tolist()):
            if wanted:
                self._prepare(source, wanted)
        return len(turns)

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready."""
        turns = self._turns_of(count).tolist()
        taken = {}
        for source in set(turns):
            samples, taken_from = self._take(source, turns.count(source))
            taken[source] = iter(samples), iter(taken_from)
        self._turns = self._turns[count:]
        self._round_index += count
        return [next(taken[source][0]) for source in turns], [next(taken[source][1]) for source in turns]

    @property
    def is_waiting(self) -> bool:
        """Whether a source has no sample that can be taken before more bytes have arrived."""
        return any(each.lane.is_waiting for lanes in self._lanes for each in lanes)

    def read_more(self) -> None:
        """Take in one more part for each source that waits."""
        for lanes in self._lanes:
            for each in lanes:
                if each.lane.is_waiting:
                    each.lane.read_more()

    def close(self) -> None:
        """Cancel the reads in progress; from any thread, idempotent."""
        for lanes in self._lanes:
            for each in list(lanes):
                each.lane.close()

    def _turns_of(self, count: int) -> NDArray[np.int64]:
        """The sources whose turns the next `count` are; fewer at the end of the lane."""
        if len(self._turns) < count:
            self._turns = self._order.sources_of(self.number, self._round_index, max(count, TURNS_COUNT))
        return self._turns[:count]

    def _open(self, source: int) -> None:
        lane, remaining_count = self._open_lane(source, self._opened_to[source])
        self._lanes[source].append(_SourcePass(lane, remaining_count))
        self._opened_to[source] += remaining_count

    def _prepare(self, source: int, count: int) -> None:
        """Have `count` samples of a source ready, including those of its next passes if this one ends."""
        lanes = self._lanes[source]
        index = 0
        while count:
            if index == len(lanes):
                self._open(source)
            each = lanes[index]
            here = min(count, each.remaining_count)
            each.lane.prepare(here)
            count -= here
            index += 1

    def _take(self, source: int, count: int) -> SourcedSamples:
        lanes = self._lanes[source]
        samples: list[Sample] = []
        taken_from: list[SampleSource] = []
        while count:
            each = lanes[0]
            here = min(count, each.remaining_count)
            more, more_from = each.lane.take(here)
            samples += more
            taken_from += more_from
            each.remaining_count -= here
            count -= here
            if not each.remaining_count:
                lanes.popleft().lane.close()
        return samples, taken_from


@dataclass(slots=True, eq=False, repr=False)
class _SourcePass:
    """A lane of a source in one pass over it, and the number of samples that remain in it."""

    lane: SampleLane
    remaining_count: int
