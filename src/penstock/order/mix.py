"""Several sources mixed by weights: which sample comes when, in closed form.

Every source is an ``IndexedOrder`` over the same L lanes, and mixing happens inside a lane. The j-th sample (*row* j) of
lane l comes from the source that ``circle`` names; it is that source's next one in its own lane, so its index there is
how often the source was named before, another closed form. No lane reads another lane's samples. A change of weights
moves the arcs, not the counts: no sample is lost or repeated by it.

**The end of a source** (docs/decisions/0008). ``at_end`` says what follows:

- ``"stop"``: it is over, the others share its place; the epoch is every sample of every source, once, whatever the
  weights. A lane drops a source when that source's lane is empty: within a few rows, in all lanes.
- ``"repeat"``: it begins again, its shards and runs permuted anew. Each lane goes on where its own part of the source
  ends, so each pass has every sample once. The epoch ends at the first multiple of L at which all sources that
  still have weight have been seen completely, or after ``epoch_samples``.
- ``"first"``: the epoch ends at the last multiple of L up to which every source could give what its weight asks for.

Source s's lanes are turned by the remainders of the sources before it: mix lane l holds its lane (l - sum of N_t mod L for
t < s) mod L. So the samples that do not divide by L follow each other round the lanes, lanes of the whole mix differ by at
most 1, and positions are dense to the last.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.bounds import RANKS_MAX, WORD_MAX, check_lane, check_lanes, check_ranges
from penstock.order.circle import CIRCLE_LANES_MAX, Circle
from penstock.order.indexed import SAMPLES_MAX, IndexedOrder, Leaving, Location, SourcePlace, counts_of
from penstock.order.laned import Laned
from penstock.order.permutation import PASS, SOURCE, key_of
from penstock.order.stream import LANES_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from penstock.order.indexed import Integers
    from penstock.order.weights import Entries, Weights

AtEnd = Literal["stop", "repeat", "first"]
_PASSES_KEPT_PER_SOURCE = 2  # lanes are in one pass or the next


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One data set of a mix.

    Attributes:
        samples: Of each shard, in listed order; at least one sample in all.
        window: Samples that this source's runs hold together. A mix of n sources that is shuffled as a whole, with one
            window, gives each window // n: what is held then does not depend on weights, which may change.
        shuffled: As for ``IndexedOrder``.
    """

    samples: Sequence[int] | npt.NDArray[np.int64]
    window: int = 16384
    shuffled: bool = True


class _Piece(NamedTuple):
    """Rows of a lane in which the arcs stay."""

    row: int
    counts: tuple[int, ...]  # of each source, taken before `row`
    arcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix(Laned):
    """Which sample of which source comes when, for one epoch and one rank; see the module's text.

    Attributes:
        sources: At least one.
        history: The weights, ascending by (epoch, position), from (0, 0) on: a schedule, and what changed on the way.
        at_end: What follows when a source ends: ``"stop"``, ``"repeat"``, ``"first"``.
        epoch_samples: Positions of an epoch; ``"repeat"`` only.
        seed: Of the whole mix; each source's is derived from it.
        epoch: From 0.
        lanes: Of the job, a multiple of `world_size`; None: 64 when a source is shuffled, else `world_size`.
        rank: Of `world_size`.
        world_size: Data-parallel ranks.

    Raises:
        ConfigError: Numbers out of range, weights that do not fit the sources, an epoch without a sample.

    Cost: its sources' (``IndexedOrder``), a plan of the weights for each lane that is asked for; at the ends
        ``"repeat"`` and ``"first"`` 0.2 ms per lane and source to make.
    """

    sources: tuple[Source, ...]
    history: tuple[Weights, ...]
    at_end: AtEnd = "stop"
    epoch_samples: int | None = None
    seed: int = 0
    epoch: int = 0
    lanes: int | None = None
    rank: int = 0
    world_size: int = 1
    samples_count: int = field(init=False)
    """Positions of this epoch."""
    _circle: Circle = field(init=False, repr=False)
    _passes: dict[tuple[int, int], IndexedOrder] = field(init=False, repr=False)
    _turned: tuple[int, ...] = field(init=False, repr=False)  # by how many lanes each source's lanes are
    _changes: tuple[tuple[int, Weights], ...] = field(init=False, repr=False)  # (row, weights), ascending
    _plans: dict[int, tuple[_Piece, ...]] = field(init=False, repr=False)  # by lane, made when asked for

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_circle", Circle(self.lanes_count))
        object.__setattr__(self, "_plans", {})
        object.__setattr__(self, "_passes", {})
        object.__setattr__(self, "_changes", self._changes_of_epoch())
        turned, total = [], 0
        for source in range(self.sources_count):
            turned.append(total % self.lanes_count)
            total += self._pass(source, 0).samples_count
        object.__setattr__(self, "_turned", tuple(turned))
        object.__setattr__(self, "samples_count", total)
        if self.epoch_samples is not None:
            object.__setattr__(self, "samples_count", self.epoch_samples)
        elif self.at_end != "stop":
            object.__setattr__(self, "samples_count", self._rows_of_epoch() * self.lanes_count)
        if not self.samples_count:
            raise ConfigError(
                f"a source of the mix has too few samples for {self.lanes_count} lanes: the epoch would be empty",
                hint='at_end="stop" or "repeat", or fewer lanes',
            )

    @property
    def sources_count(self) -> int:
        """How many sources there are, those of nested mixes included."""
        return len(self.sources)

    @property
    def lanes_count(self) -> int:
        """L: ``lanes``, or what None stands for."""
        if self.lanes is not None:
            return self.lanes
        return LANES_DEFAULT if any(source.shuffled for source in self.sources) else self.world_size

    def at_epoch(self, epoch: int) -> Mix:
        """The same mix, of another epoch."""
        return replace(self, epoch=epoch)

    def with_weights(self, entries: Entries, *, position: int) -> Mix:
        """The same mix, with other weights from a position of this epoch on; what was to come after it is dropped.

        Args:
            entries: See ``weights``.
            position: The first that they may decide, e.g. k * G for "from batch k"; they hold from the next multiple
                of L on. What lies before it is as it was.

        Raises:
            ConfigError: Weights that do not fit the sources.
        """
        weights = type(self.history[0])(entries, self.epoch, position)
        kept = tuple(old for old in self.history if (old.epoch, old.position) < (self.epoch, position))
        return replace(self, history=(*kept, weights))

    # ── which source, how often ────────────────────────────────────────────────────────────────────────────────────

    def sources_of(self, lane: int, row: int, count: int) -> Integers:
        """The sources of up to `count` samples that leave `lane` from `row` on; int64[n], fewer at the lane's end."""
        stop = min(row + count, self.lane_length(lane))
        plan = self._plan(lane)
        found = [np.empty(0, np.int64)]
        for index in range(max(0, _piece_at(plan, row)), len(plan)):
            first = max(row, plan[index].row)
            end = min(stop, plan[index + 1].row) if index + 1 < len(plan) else stop
            if first >= stop:
                break
            found.append(self._circle.sources(lane, first, plan[index].arcs, count=end - first))
        return np.concatenate(found)

    def taken(self, lane: int, row: int) -> tuple[int, ...]:
        """How many samples of each source leave `lane` before `row`. Cost: O(log), about 10 us per source."""
        plan = self._plan(lane)
        return self._counts(lane, plan[_piece_at(plan, row)], row)

    def source_at(self, source: int, lane: int, taken: int) -> SourcePlace:
        """Where a source goes on when `taken` of its samples have left this lane.

        The order's runs are what to read; shards count modulo ``len(sources[source].samples)``.
        """
        check_ranges(("source", source, 0, self.sources_count - 1))
        lane = (lane - self._turned[source]) % self.lanes_count
        pass_index, index = 0, taken
        if self.at_end == "repeat":
            pass_index, index = divmod(taken, self._pass(source, 0).lane_length(lane))
        return SourcePlace(self._pass(source, pass_index), lane, index)

    def leaving(self, lane: int, first: int = 0, count: int | None = None) -> Leaving:
        """The samples that leave a lane: where the `first`-th and those that follow lie.

        Args:
            lane: 0 to ``lanes_count`` - 1.
            first: Row, from 0.
            count: Default: to the lane's end, which also bounds it.

        Cost: 24 bytes per sample, and O(run) for each run that is touched.
        """
        sources = self.sources_of(lane, first, self.lane_length(lane) if count is None else count)
        shards, samples = np.empty_like(sources), np.empty_like(sources)
        for source, taken in enumerate(self.taken(lane, first)):
            rows = np.flatnonzero(sources == source)
            done = 0
            while done < len(rows):
                place = self.source_at(source, lane, taken + done)
                part = place.order.leaving(place.lane, place.taken, len(rows) - done)
                here = rows[done : done + len(part.samples)]
                shards[here] = part.shards % len(self.sources[source].samples)
                samples[here] = part.samples
                done += len(here)
        return Leaving(sources, shards, samples)

    def locate(self, position: int) -> Location:
        """Where the sample at a position of the job's order lies.

        Raises:
            ConfigError: `position` is not in [0, ``samples_count``).

        Cost: O(log shards), 10 us per source, and the permutation of one run.
        """
        check_ranges(("position", position, 0, self.samples_count - 1))
        row, lane = divmod(position, self.lanes_count)
        return self.leaving(lane, row, 1).location(0)

    # ── plans ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        if not self.sources or not self.history:
            raise ConfigError("a mix needs at least one source and its weights")
        for weights in self.history:
            if weights.sources_count != self.sources_count:
                raise ConfigError(f"{weights.sources_count} weights for {self.sources_count} sources")
        at = [(weights.epoch, weights.position) for weights in self.history]
        if at[0] != (0, 0) or sorted(set(at)) != at:
            raise ConfigError(f"weights change at (epoch, position) {at}: it must ascend, from (0, 0) on")
        if self.at_end not in ("stop", "repeat", "first"):
            raise ConfigError(f"at_end {self.at_end!r} must be 'stop', 'repeat' or 'first'")
        if self.epoch_samples is not None and self.at_end != "repeat":
            raise ConfigError(f"epoch_samples {self.epoch_samples} needs at_end='repeat', not {self.at_end!r}")
        check_ranges(
            ("seed", self.seed, 0, WORD_MAX),
            ("epoch", self.epoch, 0, WORD_MAX),
            ("world_size", self.world_size, 1, RANKS_MAX),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes_count, 1, CIRCLE_LANES_MAX),
            ("epoch_samples", 1 if self.epoch_samples is None else self.epoch_samples, 1, SAMPLES_MAX),
        )
        check_lanes(self.lanes_count, self.world_size)

    def _pass(self, source: int, pass_index: int) -> IndexedOrder:
        kept = self._passes
        if (order := kept.get((source, pass_index))) is None:
            if len(kept) >= _PASSES_KEPT_PER_SOURCE * self.sources_count:
                for key in list(kept):
                    if key[1]:
                        kept.pop(key, None)
            order = kept[source, pass_index] = self._made(source, pass_index)
        return order

    def _made(self, source: int, pass_index: int) -> IndexedOrder:
        what = self.sources[source]
        samples = counts_of(what.samples)
        total = max(1, int(samples.sum()))
        if self.at_end == "repeat" and total < self.lanes_count:  # every lane needs one of its samples
            samples = np.tile(samples, -(-self.lanes_count // total))
        seed = key_of(SOURCE, self.seed, source)
        return IndexedOrder(
            samples=samples,
            seed=key_of(PASS, seed, pass_index) if pass_index else seed,
            epoch=self.epoch,
            lanes=self.lanes_count,
            window=what.window,
            shuffled=what.shuffled,
        )

    def _changes_of_epoch(self) -> tuple[tuple[int, Weights], ...]:
        """(row from which on, weights) in this epoch; rows ascend from 0."""
        changes: dict[int, Weights] = {}
        for weights in self.history:
            if weights.epoch < self.epoch:
                changes = {0: weights}
            elif weights.epoch == self.epoch:
                changes[-(-weights.position // self.lanes_count)] = weights
        return tuple(changes.items())

    def _length(self, source: int, lane: int) -> int:
        return self._pass(source, 0).lane_length((lane - self._turned[source]) % self.lanes_count)

    def _plan(self, lane: int) -> tuple[_Piece, ...]:
        check_lane(lane, self.lanes_count)
        if (plan := self._plans.get(lane)) is None:
            plan = self._plans[lane] = tuple(self._pieces(lane))
        return plan

    def _pieces(self, lane: int) -> list[_Piece]:
        lengths = [self._length(source, lane) for source in range(self.sources_count)]
        stops = self.at_end == "stop"
        piece = _Piece(0, (0,) * self.sources_count, (0,) * (self.sources_count + 1))
        pieces: list[_Piece] = []
        rows = [row for row, _ in self._changes]
        while True:
            active = [not stops or piece.counts[source] < length for source, length in enumerate(lengths)]
            change = bisect_right(rows, piece.row)
            if not any(active):
                return pieces or [piece]
            arcs = self._circle.arcs(self._changes[change - 1][1].shares(active))
            piece = piece._replace(arcs=arcs)
            pieces.append(piece)
            ends = [rows[change]] if change < len(rows) else []
            if stops:
                ends += [
                    self._circle.row_after(lane, piece.row, (start, end), visits=length - taken)
                    for (start, end), length, taken in zip(pairwise(arcs), lengths, piece.counts, strict=True)
                    if start < end
                ]
            if not ends:
                return pieces
            piece = _Piece(min(ends), self._counts(lane, piece, min(ends)), piece.arcs)

    def _counts(self, lane: int, piece: _Piece, row: int) -> tuple[int, ...]:
        rows = range(piece.row, row)
        return tuple(
            taken + self._circle.visits(lane, rows, start, end)
            for taken, (start, end) in zip(piece.counts, pairwise(piece.arcs), strict=True)
        )

    def _rows_of_epoch(self) -> int:
        """Rows until every source was seen ("repeat"), or until one lacks a sample ("first")."""
        lanes, sources = range(self.lanes_count), range(self.sources_count)
        if self.at_end == "repeat":
            return max(
                (row for source in sources for lane in lanes if (row := self._row(lane, source, 0)) is not None),
                default=0,
            )
        return min(row - 1 for source in sources for lane in lanes if (row := self._row(lane, source, 1)) is not None)

    def _row(self, lane: int, source: int, beyond: int) -> int | None:
        """The first row before which a lane's part of the source was taken, and `beyond` more; None: never."""
        target = self._length(source, lane) + beyond
        plan = self._plan(lane)
        piece = plan[max(0, sum(piece.counts[source] < target for piece in plan) - 1)]
        arc = piece.arcs[source], piece.arcs[source + 1]
        if piece is not plan[-1] or arc[0] < arc[1]:
            return self._circle.row_after(lane, piece.row, arc, visits=target - piece.counts[source])
        return None


def _piece_at(plan: Sequence[_Piece], row: int) -> int:
    return bisect_right(plan, row, key=lambda piece: piece.row) - 1
