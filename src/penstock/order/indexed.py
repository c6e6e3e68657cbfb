"""The order in which samples leave shards whose lengths an index knows: exact, elastic, and open to arithmetic.

**Lanes.** The epoch's shards are permuted and laid end to end, N samples. Position p lies in lane p mod L. The lanes cut
the line into L pieces: lane l has floor(N/L) samples, and one more if l < N mod L, so that the positions 0 .. N-1 are
exactly the lanes' samples, row by row. Without shuffling, the pieces lie in the order of the lanes: lane l begins at
l * floor(N/L) + min(l, N mod L). With it, which lane has which piece is permuted too (docs/decisions/0008): else each
row of L positions would sweep the line from its start to its end, and a data set of fewer samples than lanes would
come out as stored. A lane begins and ends inside a shard, wherever the cut falls.

**Runs.** Inside a lane, runs of max(1, floor(window / L)) consecutive samples are permuted. Lane l's first run is shorter
by floor(l * run / L), so that the lanes do not all turn over at once. A rank owns the lanes l with l mod W = r.

Every question has an answer in O(log shards), or O(run) where a run's permutation is part of it. Nothing is as long as
the samples are many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from penstock.errors import ConfigError
from penstock.order.bounds import RANKS_MAX, WINDOW_MAX, WORD_MAX, check_lane, check_lanes, check_ranges
from penstock.order.laned import Laned
from penstock.order.permutation import LANES, RUN, SHARDS, key_of, permutation
from penstock.order.stream import LANES_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Integers: TypeAlias = npt.NDArray[np.int64]


SAMPLES_MAX = 1 << 48
INDEXED_LANES_MAX = 1 << 20  # 16 bytes are held for each


class Segment(NamedTuple):
    """Consecutive samples of one shard: ``[first, first + samples_count)``."""

    shard: int
    first: int
    samples_count: int


class Location(NamedTuple):
    """Where a position's sample lies. `source` is 0 where there is one only; `shard` counts in its listing."""

    source: int
    shard: int
    sample: int


class Leaving(NamedTuple):
    """Samples in the order in which they leave a lane; int64[n] each."""

    sources: Integers
    shards: Integers
    samples: Integers

    def location(self, index: int) -> Location:
        """Of the `index`-th of them."""
        return Location(int(self.sources[index]), int(self.shards[index]), int(self.samples[index]))


class SourcePlace(NamedTuple):
    """Where a source goes on: the order of its current pass, that order's lane, and how many samples have left it."""

    order: IndexedOrder
    lane: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedOrder(Laned):
    """Which sample comes when, for one epoch and one rank; see the module's text.

    Attributes:
        samples: Samples of each shard, in listed order; zeros are fine. int64[shards] once constructed.
        seed: 0 to 2**64 - 1; the same for all ranks.
        epoch: From 0.
        lanes: Of the job, a multiple of `world_size`; None: 64 when shuffled, else `world_size`.
        window: Samples that the job's runs hold together, at most (at least one per lane).
        rank: Of `world_size`.
        world_size: Data-parallel ranks. The order of positions does not depend on it where `lanes` is given.
        shuffled: False: shards in listed order, samples as stored, lanes in order; runs only say what to read at once.

    Raises:
        ConfigError: Numbers out of range, no samples at all, lanes that the ranks do not divide.

    Cost: 24 bytes per shard and 8 per lane; 60 ns per shard to make, also for another epoch.
    """

    samples: Sequence[int] | Integers
    seed: int = 0
    epoch: int = 0
    lanes: int | None = None
    window: int = 16384
    rank: int = 0
    world_size: int = 1
    shuffled: bool = True
    _shards: Integers = field(init=False, repr=False)  # int64[shards]: in the epoch's order
    _ends: Integers = field(init=False, repr=False)  # int64[shards]: where each ends on the line
    _starts: Integers = field(init=False, repr=False)  # int64[L]: where each lane begins on the line

    def __post_init__(self) -> None:
        samples = counts_of(self.samples)
        total = int(samples.sum())
        check_ranges(
            ("samples", total, 1, SAMPLES_MAX),
            ("seed", self.seed, 0, WORD_MAX),
            ("epoch", self.epoch, 0, WORD_MAX),
            ("window", self.window, 1, WINDOW_MAX),
            ("world_size", self.world_size, 1, RANKS_MAX),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes_count, 1, INDEXED_LANES_MAX),
        )
        check_lanes(self.lanes_count, self.world_size)
        lanes = np.arange(self.lanes_count, dtype=np.int64)
        shards = np.arange(len(samples), dtype=np.int64)
        if self.shuffled:
            shards = permutation(len(samples), key_of(SHARDS, self.seed, self.epoch))
            lanes = permutation(self.lanes_count, key_of(LANES, self.seed, self.epoch))
        sizes = total // self.lanes_count + (lanes < total % self.lanes_count)
        starts = np.empty_like(lanes)
        starts[lanes] = np.cumsum(sizes) - sizes
        for name, array in (
            ("samples", samples),
            ("_shards", shards),
            ("_ends", np.cumsum(samples[shards])),
            ("_starts", starts),
        ):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def samples_count(self) -> int:
        """N: samples, and positions, of an epoch."""
        return int(self._ends[-1])

    @property
    def lanes_count(self) -> int:
        """L: ``lanes``, or what None stands for. Lanes beyond the samples are empty."""
        if self.lanes is not None:
            return self.lanes
        return LANES_DEFAULT if self.shuffled else self.world_size

    def at_epoch(self, epoch: int) -> IndexedOrder:
        """The same order, of another epoch."""
        return replace(self, epoch=epoch)

    # ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def runs_count(self, lane: int) -> int:
        """Runs in a lane; 0 where it is empty."""
        length = self.lane_length(lane)
        return self.run_at(lane, length - 1)[0] + 1 if length else 0

    def run_at(self, lane: int, index: int) -> tuple[int, int]:
        """(run, place in what leaves it) of the `index`-th sample that leaves `lane`."""
        first, run = self._first_run(lane)
        if index < first:
            return 0, index
        runs, place = divmod(index - first, run)
        return runs + 1, place

    def run_start(self, lane: int, run_index: int) -> int:
        """How many samples leave `lane` before its run `run_index` does."""
        first, run = self._first_run(lane)
        return first + (run_index - 1) * run if run_index else 0

    def run_length(self, lane: int, run_index: int) -> int:
        """Samples of a run: at least 1, and fewer at the lane's beginning and end; 0 past the end."""
        first, run = self._first_run(lane)
        left = self.lane_length(lane) - self.run_start(lane, run_index)
        return max(0, min(run if run_index else first, left))

    def segments(self, lane: int, run_index: int) -> list[Segment]:
        """What a run reads, in reading order: usually one segment, two at the end of a shard. Cost: O(log shards)."""
        return self._segments(lane, self.run_start(lane, run_index), self.run_length(lane, run_index))

    def lane_segments(self, lane: int, index: int = 0) -> list[Segment]:
        """What a lane reads from its `index`-th stored sample to its end, in reading order."""
        return self._segments(lane, index, self.lane_length(lane) - index)

    def permute_run(self, lane: int, run_index: int) -> Integers:
        """The order in which a run's samples leave; int64[run_length].

        The k-th that leaves is the run's sample ``permute_run(...)[k]``, counted along its segments.
        """
        count = self.run_length(lane, run_index)
        if not self.shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(count, key_of(RUN, self.seed, self.epoch, lane, run_index))

    def leaving(self, lane: int, first: int = 0, count: int | None = None) -> Leaving:
        """The samples that leave a lane: where the `first`-th and those that follow lie.

        Args:
            lane: 0 to ``lanes_count`` - 1.
            first: From 0.
            count: Default: to the lane's end, which also bounds it.

        Cost: 24 bytes per sample, and O(run) for each run that is touched.
        """
        length = self.lane_length(lane)
        stop = length if count is None else min(length, first + count)
        pieces = []
        while first < stop:
            run_index, place = self.run_at(lane, first)
            taken = self.permute_run(lane, run_index)[place : place + stop - first]
            pieces.append(taken + self.run_start(lane, run_index))
            first += len(taken)
        line = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        line += self._starts[lane]
        at = np.searchsorted(self._ends, line, side="right")
        shards = self._shards[at]
        samples = line - self._ends[at] + np.asarray(self.samples)[shards]
        return Leaving(np.zeros(len(line), np.int64), shards, samples)

    def locate(self, position: int) -> Location:
        """Where the sample at a position of the job's order lies.

        Raises:
            ConfigError: `position` is not in [0, ``samples_count``).

        Cost: O(log shards), and the permutation of one run.
        """
        check_ranges(("position", position, 0, self.samples_count - 1))
        index, lane = divmod(position, self.lanes_count)
        return self.leaving(lane, index, 1).location(0)

    # ── the shape of a mix, of one source ──────────────────────────────────────────────────────────────────────────

    @property
    def sources_count(self) -> int:
        """1; a ``Mix`` has more."""
        return 1

    def sources_of(self, lane: int, row: int, count: int) -> Integers:
        """As ``Mix.sources_of``: zeros."""
        check_lane(lane, self.lanes_count)
        return np.zeros(max(0, min(count, self.lane_length(lane) - row)), np.int64)

    def taken(self, lane: int, row: int) -> tuple[int, ...]:
        """As ``Mix.taken``: the row itself."""
        check_lane(lane, self.lanes_count)
        return (row,)

    def source_at(self, source: int, lane: int, taken: int) -> SourcePlace:
        """As ``Mix.source_at``: this order and lane."""
        check_ranges(("source", source, 0, 0))
        return SourcePlace(self, lane, taken)

    def _first_run(self, lane: int) -> tuple[int, int]:
        run = max(1, self.window // self.lanes_count)
        return run - lane * run // self.lanes_count, run

    def _segments(self, lane: int, index: int, count: int) -> list[Segment]:
        check_lane(lane, self.lanes_count)
        start = int(self._starts[lane]) + index
        stop = start + count
        segments = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            shard, end = int(self._shards[at]), int(self._ends[at])
            size = int(self.samples[shard])
            if size:
                taken = min(stop, end) - start
                segments.append(Segment(shard, start - (end - size), taken))
                start += taken
            at += 1
        return segments


def counts_of(samples: Any) -> Integers:
    """Samples per shard as an array of its own; int64[shards].

    Raises:
        ConfigError: Not a list of whole numbers of at least 0.
    """
    try:
        counts = np.array(samples)
        whole = counts.ndim == 1 and (counts.size == 0 or np.issubdtype(counts.dtype, np.integer))
    except ValueError:
        whole = False
    if not whole or (counts.size and int(counts.min()) < 0):
        raise ConfigError(f"samples per shard {samples!r:.80} must be a list of whole numbers of at least 0")
    return counts.astype(np.int64)
