"""The order of samples with an index, which knows the lengths of the shards: exact, and independent of the world size.

**Lanes.** The shards of the epoch are permuted and laid end to end: a line of N samples. Position p lies in lane p mod L.
The lanes cut the line into L pieces: lane l has floor(N/L) samples, and one more if l < N mod L, so that the positions
0 .. N-1 are exactly the samples of the lanes, round by round. Without shuffling, the pieces lie in the order of the lanes:
lane l starts at l * floor(N/L) + min(l, N mod L). With shuffling, the pieces are also assigned to the lanes at random
(docs/decisions/0008): otherwise each round of L positions would sweep the line from its start to its end, and a data set
with fewer samples than lanes would come in stored order. A lane starts and ends wherever the cut falls inside a shard.

**Runs.** Within a lane, runs of max(1, floor(window / L)) consecutive samples are permuted. The first run of lane l is
shorter by floor(l * run / L), so that the lanes do not all reach the end of a run at the same time. A rank owns the lanes
l with l mod W = r.

Every method takes O(log shards), or O(run) if it includes the permutation of a run. No array has the length of the data
set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.laned import WINDOW_MAX, CountedOrder, SampleLocations, check_lane, check_ranges
from penstock.order.permutation import LANES, RUN, SHARDS, key_of, permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.order.laned import Integers


SAMPLES_MAX = 1 << 48


class Segment(NamedTuple):
    """Consecutive samples of one shard: ``[first, first + samples_count)``; `shard` is its index in the listing."""

    shard: int
    first: int
    samples_count: int


class SourcePosition(NamedTuple):
    """Where a source continues in a lane of a mix."""

    order: IndexedOrder  # the order of its current pass
    lane: int  # the lane in that order
    taken: int  # number of samples that have left that lane


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedOrder(CountedOrder):
    """The order of samples with an index, for one epoch and one rank; the module describes it.

    If `lanes` is given, the order of positions does not depend on the number of ranks.

    Attributes:
        samples: Number of samples in each shard, in listed order, at least 0. int64[shards] once constructed.
        window: Largest number of samples that the runs of the job hold together; every lane holds at least one.
        shuffled: Whether shards, lanes and samples are permuted. Otherwise they come as listed and stored, and runs only
            determine what is read at once.

    Raises:
        ConfigError: A number is out of range, there are no samples, or `world_size` does not divide `lanes`.

    Cost: 24 bytes per shard and 8 per lane; 60 ns per shard to construct, also for another epoch.
    """

    LANES_MAX: ClassVar[int] = 1 << 20  # 16 bytes are held per lane

    samples: Sequence[int] | Integers
    window: int = 16384
    shuffled: bool = True
    _shards: Integers = field(init=False, repr=False)  # int64[shards]: indices of shards, in the order of the epoch
    _ends: Integers = field(init=False, repr=False)  # int64[shards]: where each shard ends on the line
    _starts: Integers = field(init=False, repr=False)  # int64[L]: where each lane starts on the line

    def __post_init__(self) -> None:
        samples = counts_of(self.samples)
        total = int(samples.sum())
        self.check(("samples", total, 1, SAMPLES_MAX), ("window", self.window, 1, WINDOW_MAX))
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
        """N: number of samples, and of positions, in an epoch."""
        return int(self._ends[-1])

    # ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_at(self, lane: int, index: int) -> tuple[int, int]:
        """Return the run of the `index`-th sample that leaves `lane`, and its place among the samples that leave the run."""
        first, run = self._first_run(lane)
        if index < first:
            return 0, index
        runs, place = divmod(index - first, run)
        return runs + 1, place

    def run_start(self, lane: int, run_index: int) -> int:
        """Return the number of samples that leave `lane` before its run `run_index`."""
        first, run = self._first_run(lane)
        return first + (run_index - 1) * run if run_index else 0

    def run_length(self, lane: int, run_index: int) -> int:
        """Return the number of samples in a run: fewer at the start and end of a lane, but at least 1; 0 past the end."""
        first, run = self._first_run(lane)
        left = self.lane_length(lane) - self.run_start(lane, run_index)
        return max(0, min(run if run_index else first, left))

    def segments(self, lane: int, index: int, count: int) -> list[Segment]:
        """Return the segments of `count` samples of a lane from its `index`-th stored one on, in reading order.

        Cost: O(log shards), and a step for each segment.
        """
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

    def permute_run(self, lane: int, run_index: int, count: int | None = None) -> Integers:
        """Return the order in which the samples of a run leave it; int64[count].

        Entry k is the index of the k-th sample that leaves, counted along the segments of the run.

        Args:
            lane: Number of the lane, in [0, ``lanes_count``).
            run_index: Index of the run in this lane and epoch, from 0.
            count: ``run_length(lane, run_index)``, if it is known; None computes it.
        """
        count = self.run_length(lane, run_index) if count is None else count
        if not self.shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(count, key_of(RUN, self.seed, self.epoch, lane, run_index))

    def locations(self, lane: int, first: int = 0, count: int | None = None) -> SampleLocations:
        """Return where the samples that leave a lane lie, in the order in which they leave.

        Args:
            lane: Number of the lane, in [0, ``lanes_count``).
            first: Index of the first sample, from 0.
            count: Number of samples; None, or more than remain: up to the end of the lane.

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
        return SampleLocations(np.zeros(len(line), np.int64), shards, samples)

    # ── the interface of ``MixOrder``, for a single source ─────────────────────────────────────────────────────────

    @property
    def sources_count(self) -> int:
        """Number of sources: 1."""
        return 1

    def sources_of(self, lane: int, round_index: int, count: int) -> Integers:
        """Return the source of each sample, as ``MixOrder.sources_of`` does: zeros."""
        check_lane(lane, self.lanes_count)
        return np.zeros(max(0, min(count, self.lane_length(lane) - round_index)), np.int64)

    def taken(self, lane: int, round_index: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a round, as ``MixOrder.taken`` does: `round_index` itself."""
        check_lane(lane, self.lanes_count)
        return (round_index,)

    def source_at(self, source: int, lane: int, taken: int) -> SourcePosition:
        """Return where a source continues, as ``MixOrder.source_at`` does: in this order and lane."""
        check_ranges(("source", source, 0, 0))
        return SourcePosition(self, lane, taken)

    def _first_run(self, lane: int) -> tuple[int, int]:
        run = max(1, self.window // self.lanes_count)
        return run - lane * run // self.lanes_count, run


def counts_of(samples: Any) -> Integers:
    """Return a copy of the numbers of samples per shard as an array; int64[shards].

    Raises:
        ConfigError: `samples` is not a list of whole numbers of at least 0.
    """
    try:
        counts = np.array(samples)
        whole = counts.ndim == 1 and (counts.size == 0 or np.issubdtype(counts.dtype, np.integer))
    except ValueError:
        whole = False
    if not whole or (counts.size and int(counts.min()) < 0):
        raise ConfigError(f"samples per shard {samples!r:.80} must be a list of whole numbers of at least 0")
    return counts.astype(np.int64)
