"""Lanes: a lane's samples, permuted in runs.

Runs are filled while the run before is handed out, one sample in for each one out: reading stays even, and a lane never
holds more than about one run's worth of samples. Everything here works on several samples at a time; one sample at a
time cost 8 µs of Python for each, in blocks it is well under one (docs/development/experiments.md).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.buffers import is_typed
from penstock.formats import LOST, Sample, joined, reordered
from penstock.formats.typed import view_of_array
from penstock.loader.position import LANE_BEGIN, LanePosition, RunStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.loader.lanes.reading import LaneReader
    from penstock.loader.lanes.segments import ParsedSamples, SampleSource, SourcedSamples
    from penstock.order import MixOrder


FORGOTTEN_MIN = 8
"""Samples that left before they are let go of: a quarter of those that are ready, so that it costs next to nothing."""


class RunOrder(Protocol):
    """What a lane asks of an order: ``StreamOrder`` and ``IndexedOrder`` answer."""

    @property
    def shuffled(self) -> bool:
        """False: samples leave as they are stored."""

    def run_length(self, lane: int, run_index: int) -> int:
        """Samples of a run; the lane's last may be shorter, and behind it 0 may say that it was."""

    def permute_run(self, lane: int, run_index: int, count: int) -> list[int]:
        """The k-th to leave is the run's sample ``[k]``."""


class PinnedBytes:
    """Bytes of parts that waiting samples keep from being reused. Beyond the bound samples are copied out."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class _Leaving(NamedTuple):
    """A run that is ready: its start, the lane's count once all of it has left, the bytes that it pins."""

    start: RunStart
    end_count: int
    pinned_bytes: int


class SampleLane(Protocol):
    """A lane: samples that leave it one after the other."""

    number: int

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; how many are, fewer only at the lane's end. Blocks for bytes."""

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, which ``prepare`` has made ready."""

    @property
    def is_waiting(self) -> bool:
        """Whether no sample can leave before more bytes have arrived."""

    def read_more(self) -> None:
        """Take in one more part. Blocks for it."""

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""


class ResumableLane(SampleLane, Protocol):
    """A lane whose position does not follow from the number of samples that left it."""

    def mark(self) -> LanePosition:
        """The position behind the samples that were taken."""


class Lane:
    """The samples of one lane in the order in which they leave it.

    Args:
        number: Of the lane.
        runs: Says how long its runs are, and permutes them.
        reader: Gives its samples in stored order, from `start` on.
        pins: Shared by all lanes of this rank.
        start: The run that is read first; None is the lane's first.
        skip_count: Samples of that run that left already.
    """

    def __init__(
        self,
        number: int,
        *,
        runs: RunOrder,
        reader: LaneReader,
        pins: PinnedBytes,
        start: RunStart | None = None,
        skip_count: int = 0,
    ) -> None:
        self.number = number
        self._runs = runs
        self._reader = reader
        self._pins = pins
        self._ended = False
        self._skip_count = skip_count
        self._pieces: deque[ParsedSamples] = deque()  # parsed, in no run yet
        self._piece_at = 0
        self._ready: Sequence[Sample] = []
        self._ready_from: list[SampleSource] = []
        self._ready_at = 0
        self._leaving: deque[_Leaving] = deque()  # runs of which samples are ready, the last one that left at least
        self._filling: Sequence[Sample] = []
        self._filling_from: list[SampleSource] = []
        self._filling_bytes = 0
        self._wanted_count = 0  # of the run being filled, by what was taken of the one before
        self._start = start or LANE_BEGIN[0]  # of the run being filled
        self._run_length = runs.run_length(number, self._start.run_index)
        self._settled_count = self.taken_count = self._start.before_count

    def prepare(self, count: int) -> int:
        """Have `count` samples ready to be taken; how many are, fewer only at the lane's end. Blocks for bytes."""
        while len(self._ready_from) - self._ready_at < count and self._turn_over():
            pass
        return len(self._ready_from) - self._ready_at

    def take(self, count: int) -> SourcedSamples:
        """The next `count` samples, for which ``prepare`` answered; as many are taken in for the next run."""
        end = self._ready_at + count
        items = self._ready[self._ready_at : end], self._ready_from[self._ready_at : end]
        self._ready_at = end
        if end >= FORGOTTEN_MIN and 4 * end >= len(
            self._ready_from
        ):  # else a lane holds two runs: one left, one filling
            self._ready, self._ready_from, self._ready_at = self._ready[end:], self._ready_from[end:], 0
        self.taken_count += count
        while len(self._leaving) > 1 and self._leaving[0].end_count <= self.taken_count:
            self._pins.held_bytes -= self._leaving.popleft().pinned_bytes
        if self._runs.shuffled:
            self._wanted_count = wanted = min(self._wanted_count + count, self._run_length)
            while len(self._filling_from) < wanted and (self._pieces or self._read()):
                self._fill(wanted)
        return items

    def mark(self) -> LanePosition:
        """The position behind the samples that were taken."""
        for leaving in self._leaving:
            if self.taken_count < leaving.end_count:
                return leaving.start, self.taken_count - leaving.start.before_count
        if self._start.segment_index is None and self._leaving:  # nothing was read of the next run
            start = self._leaving[-1].start
            return start, self.taken_count - start.before_count
        return self._start, self._skip_count

    def first(self, count: int) -> Sequence[Sample]:
        """Some samples of the run being filled."""
        return self._filling[:count]

    def close(self) -> None:
        """Cancel what is being read; from any thread, idempotent."""
        self._reader.close()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can leave before more of its run arrived."""
        return (
            self._ready_at == len(self._ready_from) and not self._ended and len(self._filling_from) < self._run_length
        )

    def read_more(self) -> None:
        """Take in one more part: lanes that wait together are filled in turn, so that all their requests are used."""
        if self._pieces or self._read():
            self._fill(self._run_length)

    def _turn_over(self) -> bool:
        """Have one more run ready; False at the lane's end."""
        if self._runs.shuffled:
            while len(self._filling_from) < self._run_length and (self._pieces or self._read()):
                self._fill(self._run_length)
        elif self._pieces or self._read():  # nothing is permuted: a piece is ready as it came
            self._run_length = len(self._pieces[0].samples) if self._pieces else 0
            self._fill(self._run_length)
        run, self._filling, self._wanted_count = self._filling, [], 0
        run_from, self._filling_from = self._filling_from, []
        if not run:
            # permuted: of a run of 0, or at the end; as stored: of a part that completed no sample, or at the end
            return not (self._ended or self._runs.shuffled)
        if self._runs.shuffled:
            order = self._runs.permute_run(self.number, self._start.run_index, len(run))
            run, run_from = reordered(run, order), [run_from[index] for index in order]
        self._settled_count += len(run)
        self._leaving.append(_Leaving(self._start, self._settled_count, self._filling_bytes))
        self._filling_bytes = 0
        run_index = self._start.run_index + 1
        self._start = RunStart(run_index, None, 0, 0, self._settled_count)
        self._run_length = self._runs.run_length(self.number, run_index)
        self._ready, self._ready_from = (
            joined(self._ready[self._ready_at :], run),
            self._ready_from[self._ready_at :] + run_from,
        )
        self._ready_at = min(self._skip_count, len(self._ready_from))  # 0, but after a state was loaded
        self._skip_count -= self._ready_at
        self.taken_count += self._ready_at
        return True

    def _read(self) -> bool:
        """Read one part; False at the lane's end."""
        pieces = self._reader.read()
        if pieces is None:
            self._ended = True
            return False
        self._pieces.extend(pieces)
        return True

    def _fill(self, length: int) -> None:
        """Move samples that are here into the run being filled, until it has `length`; those that pin nothing at once."""
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
                    etag=piece.segment.shard.etag,
                )
            self._piece_at += len(samples)
            if self._piece_at == len(piece.samples):
                self._pieces.popleft()
                self._piece_at = 0
            if self._runs.shuffled:
                samples = self._pinned(samples, piece.sample_bytes)
            self._filling = joined(self._filling, samples)
            self._filling_from += [piece.segment] * len(samples)

    def _pinned(self, samples: Sequence[Sample], sample_bytes: int) -> Sequence[Sample]:
        """`samples`, to wait in a run: as they are, or copied out where too many bytes wait already."""
        bytes_count = len(samples) * sample_bytes
        if self._pins.held_bytes + bytes_count <= self._pins.bytes_max:
            self._pins.held_bytes += bytes_count
            self._filling_bytes += bytes_count
            return samples
        return [copied(sample) for sample in samples]


def copied(sample: Sample) -> Sample:
    """`sample` with values in memory of their own, of the same types and shapes; a lost sample has no values."""
    if sample is LOST:
        return sample
    fields = {
        name: view_of_array(np.array(value)) if is_typed(value) else memoryview(bytes(value))
        for name, value in sample.fields.items()
    }
    return Sample(sample.key, fields, sample.offset_bytes, sample.size_bytes)


TURNS_COUNT = 512
"""Turns that are asked for at once: one answer costs as much as some hundred of them."""

OpenLane: TypeAlias = "Callable[[int, int], tuple[SampleLane, int]]"
"""``open_lane(source, taken)``: a source's own lane from its `taken`-th sample on, and how many samples it has from
there to the end of the source, or of that pass over it."""


class MixedLane:
    """One lane of a mix, from a row on.

    Args:
        number: Of the lane.
        order: Says whose turn it is.
        row: Samples of this lane that left before.
        open_lane: Opens the sources' lanes.
    """

    def __init__(self, number: int, *, order: MixOrder, row: int, open_lane: OpenLane) -> None:
        self.number = number
        self._order = order
        self._row = row
        self._open_lane = open_lane
        self._opened_to = list(order.taken(number, row))  # of each source: samples before those of lanes to be opened
        self._lanes: list[deque[_SourcePass]] = [deque() for _ in self._opened_to]
        self._turns: NDArray[np.int64] = np.empty(0, np.int64)  # from `_row` on
        try:
            for source in np.unique(self._turns_of(TURNS_COUNT)).tolist():
                self._open(source)
        except BaseException:
            self.close()
            raise

    def prepare(self, count: int) -> int:
        """As ``Lane.prepare``."""
        turns = self._turns_of(count)
        for source, wanted in enumerate(np.bincount(turns, minlength=len(self._lanes)).tolist()):
            if wanted:
                self._prepare(source, wanted)
        return len(turns)

    def take(self, count: int) -> SourcedSamples:
        """As ``Lane.take``."""
        turns = self._turns_of(count).tolist()
        taken = {}
        for source in set(turns):
            samples, taken_from = self._take(source, turns.count(source))
            taken[source] = iter(samples), iter(taken_from)
        self._turns = self._turns[count:]
        self._row += count
        return [next(taken[source][0]) for source in turns], [next(taken[source][1]) for source in turns]

    @property
    def is_waiting(self) -> bool:
        """As ``Lane.is_waiting``, of any source."""
        return any(each.lane.is_waiting for lanes in self._lanes for each in lanes)

    def read_more(self) -> None:
        """As ``Lane.read_more``, for each source that waits."""
        for lanes in self._lanes:
            for each in lanes:
                if each.lane.is_waiting:
                    each.lane.read_more()

    def close(self) -> None:
        """As ``Lane.close``."""
        for lanes in self._lanes:
            for each in list(lanes):
                each.lane.close()

    def _turns_of(self, count: int) -> NDArray[np.int64]:
        """Whose turns the next `count` are; fewer at the lane's end."""
        if len(self._turns) < count:
            self._turns = self._order.sources_of(self.number, self._row, max(count, TURNS_COUNT))
        return self._turns[:count]

    def _open(self, source: int) -> None:
        lane, left = self._open_lane(source, self._opened_to[source])
        self._lanes[source].append(_SourcePass(lane, left))
        self._opened_to[source] += left

    def _prepare(self, source: int, count: int) -> None:
        """Have `count` samples of a source ready, those of its next pass included where this one ends."""
        lanes = self._lanes[source]
        index = 0
        while count:
            if index == len(lanes):
                self._open(source)
            each = lanes[index]
            here = min(count, each.left)
            each.lane.prepare(here)
            count -= here
            index += 1

    def _take(self, source: int, count: int) -> SourcedSamples:
        lanes = self._lanes[source]
        samples: list[Sample] = []
        taken_from: list[SampleSource] = []
        while count:
            each = lanes[0]
            here = min(count, each.left)
            more, more_from = each.lane.take(here)
            samples += more
            taken_from += more_from
            each.left -= here
            count -= here
            if not each.left:
                lanes.popleft().lane.close()
        return samples, taken_from


class _SourcePass:
    """A lane of a source, in one pass over it, and what is left there."""

    __slots__ = ("lane", "left")

    def __init__(self, lane: SampleLane, left: int) -> None:
        self.lane = lane
        self.left = left
