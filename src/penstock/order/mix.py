"""The order of samples of several sources that are mixed by weights, in closed form.

Every source is an ``IndexedOrder`` over the same L lanes, and mixing happens within a lane. The j-th sample (round j) of
lane l comes from the source that ``circle.py`` determines. It is the next sample of that source's own lane, so its index
there is the number of earlier rounds that the source got, which has a closed form too. No lane reads the samples of
another lane. A change of weights moves the arcs but not the counts: it neither loses nor repeats a sample.

**The end of a source** (docs/decisions/0008). ``stop`` determines what follows:

- ``"all"``: the source is over, and the others share its place. The epoch has every sample of every source once,
  whatever the weights. A lane drops a source when that source's lane is empty: all lanes do so within a few rounds.
- ``"repeat"``: the source starts again, with its shards and runs permuted anew. Each lane continues where its own part of
  the source ends, so each pass has every sample once. The epoch ends at the first multiple of L at which all sources
  with a weight above 0 have been read completely, or after ``epoch_samples``.
- ``"first"``: the epoch ends at the last multiple of L up to which every source has the samples that its weight needs.

The lanes of source s are rotated by the remainders of the sources before it: lane l of the mix holds its lane
(l - sum of N_t mod L for t < s) mod L. The samples that remain after division by L thus follow each other around the
lanes, the lanes of the whole mix differ by at most 1, and positions have no gaps up to the last.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.order.circle import CIRCLE_LANES_MAX, Circle
from penstock.order.indexed import SAMPLES_MAX, IndexedOrder, SourcePosition, counts_of
from penstock.order.laned import WORD_MAX, CountedOrder, SampleLocations, check_lane, check_ranges
from penstock.order.permutation import PASS, SOURCE, key_of

if TYPE_CHECKING:
    from fractions import Fraction

    import numpy.typing as npt

    from penstock.order.laned import Integers


@dataclass(frozen=True, slots=True)
class MixWeights:
    """The weights that hold from a position of an epoch on.

    Attributes:
        entries: The weight of each source, on any scale; a tuple once constructed.
        epoch: Epoch number, from 0.
        position: Position in that epoch, from 0; the weights hold from the next multiple of L (the number of lanes) on.

    Raises:
        ConfigError: An entry is not a finite number of at least 0, or all of them are 0.
    """

    entries: Sequence[float]
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        entries: Any = self.entries
        if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
            raise ConfigError(f"weights {entries!r} must be a list of numbers", hint="e.g. (0.7, 0.3)")
        for value in entries:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"weight {value!r} must be a finite number of at least 0")
        if not any(entries):
            raise ConfigError(f"weights {entries!r} must not all be 0")
        object.__setattr__(self, "entries", tuple(entries))
        check_ranges(("epoch", self.epoch, 0, WORD_MAX), ("position", self.position, 0, WORD_MAX))

    @property
    def sources_count(self) -> int:
        """Number of sources."""
        return len(self.entries)

    def shares(self, active: Sequence[bool]) -> list[Fraction]:
        """Return the share of each source; the shares add up to 1, and inactive sources have 0.

        Active sources that all have weight 0 get equal shares, because their samples still have to be read.

        Args:
            active: Whether each source takes part.
        """
        from fractions import Fraction

        weights = [Fraction(entry) if each else Fraction(0) for entry, each in zip(self.entries, active, strict=True)]
        if not any(weights):
            weights = [Fraction(each) for each in active]
        total = sum(weights)
        return [weight / total if total else weight for weight in weights]

    def as_json(self) -> list[Any]:
        """Return ``[epoch, position, entries]``, as a saved state holds it."""
        return [self.epoch, self.position, list(self.entries)]

    @classmethod
    def from_json(cls, value: Any) -> MixWeights:
        """Return the weights that ``as_json`` described.

        Raises:
            ConfigError: `value` is not a result of ``as_json``.
        """
        if not isinstance(value, Sequence) or len(value) != 3 or not all(type(part) is int for part in value[:2]):
            raise ConfigError(f"weights {value!r:.80} of a state must be [epoch, position, entries]")
        return cls(value[2], value[0], value[1])


MixStop = Literal["all", "repeat", "first"]
_PASSES_KEPT_PER_SOURCE = 2  # at any time, lanes are in one of two consecutive passes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedSource:
    """One source of a mix.

    Attributes:
        samples: Number of samples in each shard, in listed order; at least one sample in total.
        window: Largest number of samples that the runs of this source hold together. A mix of n sources that is shuffled
            with one window gives each source window // n, so that memory does not depend on weights, which may change.
        shuffled: Whether samples are permuted, as in ``IndexedOrder``.
    """

    samples: Sequence[int] | npt.NDArray[np.int64]
    window: int = 16384
    shuffled: bool = True


class _PlanStep(NamedTuple):
    """Rounds of a lane, from `round_index` on, in which the arcs (shares of the circle of ``circle.py``) stay the same."""

    round_index: int
    counts: tuple[int, ...]  # number of samples of each source before `round_index`
    arcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixOrder(CountedOrder):
    """The order of samples of several sources, for one epoch and one rank; the module describes it.

    The seed of each source is derived from that of the mix.

    Attributes:
        sources: The sources, at least one.
        history: The weights in ascending order of (epoch, position), from (0, 0) on: a schedule, and changes made since.
        stop: When the epoch ends, as for ``ps.mix``: ``"all"``, ``"repeat"`` or ``"first"``.
        epoch_samples: Number of positions in an epoch, only with ``"repeat"``; None: until all sources were read.

    Raises:
        ConfigError: A number is out of range, weights do not fit the sources, or the epoch would be empty.

    Cost: that of its sources (``IndexedOrder``), and a plan per lane that is used. With ``"repeat"`` and ``"first"``,
        constructing it takes 0.2 ms per lane and source.
    """

    LANES_MAX: ClassVar[int] = CIRCLE_LANES_MAX

    sources: tuple[MixedSource, ...]
    history: tuple[MixWeights, ...]
    stop: MixStop = "all"
    epoch_samples: int | None = None
    samples_count: int = field(init=False)
    """Number of positions in this epoch."""
    _circle: Circle = field(init=False, repr=False)
    _passes: dict[tuple[int, int], IndexedOrder] = field(init=False, repr=False)
    # By how many lanes the lanes of each source are rotated.
    _rotations: tuple[int, ...] = field(init=False, repr=False)
    _changes: tuple[tuple[int, MixWeights], ...] = field(init=False, repr=False)  # (round, weights), ascending
    _plans: dict[int, tuple[_PlanStep, ...]] = field(init=False, repr=False)  # by lane, made when first used

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_circle", Circle(self.lanes_count))
        object.__setattr__(self, "_plans", {})
        object.__setattr__(self, "_passes", {})
        object.__setattr__(self, "_changes", self._changes_of_epoch())
        rotations, total = [], 0
        for source in range(self.sources_count):
            rotations.append(total % self.lanes_count)
            total += self._pass(source, 0).samples_count
        object.__setattr__(self, "_rotations", tuple(rotations))
        object.__setattr__(self, "samples_count", total)
        if self.epoch_samples is not None:
            object.__setattr__(self, "samples_count", self.epoch_samples)
        elif self.stop != "all":
            object.__setattr__(self, "samples_count", self._rounds_of_epoch() * self.lanes_count)
        if not self.samples_count:
            raise ConfigError(
                f"a source of the mix has too few samples for {self.lanes_count} lanes: the epoch would be empty",
                hint='ps.mix(stop="all") or "repeat", or fewer lanes',
            )

    @property
    def sources_count(self) -> int:
        """Number of sources."""
        return len(self.sources)

    @property
    def shuffled(self) -> bool:
        """Whether the samples of a source are permuted."""
        return any(source.shuffled for source in self.sources)

    def with_weights(self, entries: Sequence[float], *, position: int) -> MixOrder:
        """Return the order with other weights from a position of this epoch on. Later changes of the schedule are dropped.

        Args:
            entries: The weight of each source.
            position: First position that they may affect, e.g. k * G for batch k; they hold from the next multiple of L
                on. The order before it does not change.

        Raises:
            ConfigError: The weights do not fit the sources.
        """
        weights = type(self.history[0])(entries, self.epoch, position)
        kept = tuple(old for old in self.history if (old.epoch, old.position) < (self.epoch, position))
        return replace(self, history=(*kept, weights))

    # ── the source of each round ───────────────────────────────────────────────────────────────────────────────────

    def sources_of(self, lane: int, round_index: int, count: int) -> Integers:
        """Return the source of each of `count` samples of `lane` from `round_index` on; int64[n], fewer at the lane's end."""
        stop = min(round_index + count, self.lane_length(lane))
        plan = self._plan(lane)
        found = [np.empty(0, np.int64)]
        for index in range(max(0, _step_at(plan, round_index)), len(plan)):
            first = max(round_index, plan[index].round_index)
            end = min(stop, plan[index + 1].round_index) if index + 1 < len(plan) else stop
            if first >= stop:
                break
            found.append(self._circle.sources(lane, first, plan[index].arcs, count=end - first))
        return np.concatenate(found)

    def taken(self, lane: int, round_index: int) -> tuple[int, ...]:
        """Return how many samples of each source leave `lane` before `round_index`. Cost: O(log M), about 10 µs per source."""
        plan = self._plan(lane)
        return self._counts(lane, plan[_step_at(plan, round_index)], round_index)

    def source_at(self, source: int, lane: int, taken: int) -> SourcePosition:
        """Return where a source continues when `taken` of its samples have left `lane`.

        The runs of the returned order are to be read; its shard indices count modulo ``len(sources[source].samples)``.
        """
        check_ranges(("source", source, 0, self.sources_count - 1))
        lane = (lane - self._rotations[source]) % self.lanes_count
        pass_index, index = 0, taken
        if self.stop == "repeat":
            pass_index, index = divmod(taken, self._pass(source, 0).lane_length(lane))
        return SourcePosition(self._pass(source, pass_index), lane, index)

    def locations(self, lane: int, first: int = 0, count: int | None = None) -> SampleLocations:
        """Return where the samples that leave a lane lie, in the order in which they leave.

        Args:
            lane: Number of the lane, in [0, ``lanes_count``).
            first: Round of the first sample, from 0.
            count: Number of samples; None, or more than remain: up to the end of the lane.

        Cost: 24 bytes per sample, and O(run) for each run that is touched.
        """
        sources = self.sources_of(lane, first, self.lane_length(lane) if count is None else count)
        shards, samples = np.empty_like(sources), np.empty_like(sources)
        for source, taken in enumerate(self.taken(lane, first)):
            offsets = np.flatnonzero(sources == source)
            done = 0
            while done < len(offsets):
                place = self.source_at(source, lane, taken + done)
                part = place.order.locations(place.lane, place.taken, len(offsets) - done)
                here = offsets[done : done + len(part.samples)]
                shards[here] = part.shards % len(self.sources[source].samples)
                samples[here] = part.samples
                done += len(here)
        return SampleLocations(sources, shards, samples)

    # ── plans ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        if not self.sources or not self.history:
            raise ConfigError("a mix needs at least one source, and weights")
        for weights in self.history:
            if weights.sources_count != self.sources_count:
                raise ConfigError(f"{weights.sources_count} weights for {self.sources_count} sources")
        at = [(weights.epoch, weights.position) for weights in self.history]
        if at[0] != (0, 0) or sorted(set(at)) != at:
            raise ConfigError(f"weights change at (epoch, position) {at}: it must ascend, starting with (0, 0)")
        if self.stop not in ("all", "repeat", "first"):
            raise ConfigError(f"stop={self.stop!r} must be 'all', 'repeat' or 'first'")
        if self.epoch_samples is not None and self.stop != "repeat":
            raise ConfigError(f"epoch_samples={self.epoch_samples} needs stop='repeat', not {self.stop!r}")
        self.check(("epoch_samples", 1 if self.epoch_samples is None else self.epoch_samples, 1, SAMPLES_MAX))

    def _pass(self, source: int, pass_index: int) -> IndexedOrder:
        kept = self._passes
        if (order := kept.get((source, pass_index))) is None:
            if len(kept) >= _PASSES_KEPT_PER_SOURCE * self.sources_count:
                for key in list(kept):
                    if key[1]:
                        kept.pop(key, None)
            order = kept[source, pass_index] = self._make_pass(source, pass_index)
        return order

    def _make_pass(self, source: int, pass_index: int) -> IndexedOrder:
        what = self.sources[source]
        samples = counts_of(what.samples)
        total = max(1, int(samples.sum()))
        if self.stop == "repeat" and total < self.lanes_count:  # every lane needs at least one sample of the source
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

    def _changes_of_epoch(self) -> tuple[tuple[int, MixWeights], ...]:
        """Return the weights of this epoch with the first round of each; rounds ascend from 0."""
        changes: dict[int, MixWeights] = {}
        for weights in self.history:
            if weights.epoch < self.epoch:
                changes = {0: weights}
            elif weights.epoch == self.epoch:
                changes[-(-weights.position // self.lanes_count)] = weights
        return tuple(changes.items())

    def _length(self, source: int, lane: int) -> int:
        return self._pass(source, 0).lane_length((lane - self._rotations[source]) % self.lanes_count)

    def _plan(self, lane: int) -> tuple[_PlanStep, ...]:
        check_lane(lane, self.lanes_count)
        if (plan := self._plans.get(lane)) is None:
            plan = self._plans[lane] = tuple(self._steps(lane))
        return plan

    def _steps(self, lane: int) -> list[_PlanStep]:
        lengths = [self._length(source, lane) for source in range(self.sources_count)]
        stops = self.stop == "all"
        step = _PlanStep(0, (0,) * self.sources_count, (0,) * (self.sources_count + 1))
        steps: list[_PlanStep] = []
        rounds = [round_index for round_index, _ in self._changes]
        while True:
            active = [not stops or step.counts[source] < length for source, length in enumerate(lengths)]
            change = bisect_right(rounds, step.round_index)
            if not any(active):
                return steps or [step]
            arcs = self._circle.arcs(self._changes[change - 1][1].shares(active))
            step = step._replace(arcs=arcs)
            steps.append(step)
            ends = [rounds[change]] if change < len(rounds) else []
            if stops:
                ends += [
                    self._circle.round_after(lane, step.round_index, (start, end), visits=length - taken)
                    for (start, end), length, taken in zip(pairwise(arcs), lengths, step.counts, strict=True)
                    if start < end
                ]
            if not ends:
                return steps
            step = _PlanStep(min(ends), self._counts(lane, step, min(ends)), step.arcs)

    def _counts(self, lane: int, step: _PlanStep, round_index: int) -> tuple[int, ...]:
        rounds = range(step.round_index, round_index)
        return tuple(
            taken + self._circle.visits(lane, rounds, start, end)
            for taken, (start, end) in zip(step.counts, pairwise(step.arcs), strict=True)
        )

    def _rounds_of_epoch(self) -> int:
        """Return the number of rounds until every source was read ("repeat"), or until one lacks a sample ("first")."""
        lanes, sources = range(self.lanes_count), range(self.sources_count)
        if self.stop == "repeat":
            return max(
                (
                    round_index
                    for source in sources
                    for lane in lanes
                    if (round_index := self._round_beyond(lane, source, 0)) is not None
                ),
                default=0,
            )
        return min(
            round_index - 1
            for source in sources
            for lane in lanes
            if (round_index := self._round_beyond(lane, source, 1)) is not None
        )

    def _round_beyond(self, lane: int, source: int, beyond: int) -> int | None:
        """Return the first round at which the lane has taken `beyond` samples more than its share of the source holds.

        It is None if the lane never does.
        """
        target = self._length(source, lane) + beyond
        plan = self._plan(lane)
        step = plan[max(0, sum(step.counts[source] < target for step in plan) - 1)]
        arc = step.arcs[source], step.arcs[source + 1]
        if step is not plan[-1] or arc[0] < arc[1]:
            return self._circle.round_after(lane, step.round_index, arc, visits=target - step.counts[source])
        return None


def _step_at(plan: Sequence[_PlanStep], round_index: int) -> int:
    return bisect_right(plan, round_index, key=lambda step: step.round_index) - 1
