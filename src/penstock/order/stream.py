"""The order in which samples leave shards whose lengths nobody knows yet: no index, one pass.

The job's L *lanes* are its unit of order: they belong to the job, not to a host, so the order is the same for every
world size. The epoch's shards are permuted; the i-th goes whole to lane i mod L. A lane is the samples of its shards,
end to end. It is cut into *runs* of consecutive samples, each of which is read completely and then leaves permuted:
shuffling costs a window of samples and no more, and there is no reservoir whose content depends on timing. Lane l's
first run is shorter by floor(l * run / L), so that the lanes do not all wait for a full run at the same time.

**Positions and ranks.** The job's order goes round robin over the lanes that still have samples. Nobody knows
beforehand which those are: a rank sees its own lanes only (l mod W = r), and where the others end is known when they
have been read. So a sample's position is said in lane terms: the j-th sample that leaves lane l has position j * L + l.
It is unique, the same for every W, and known at once. Round robin over the lanes that still have samples *is* ascending
order of these numbers: a dry lane leaves holes and moves nobody. Hence each rank goes round robin over its own lanes
without asking anybody, its samples are a subsequence of the job's, and merging the ranks by position gives the order of
one rank alone. Until the first lane runs dry there are no holes. The alternative, dense positions, would need every
rank to know every lane's length: a collective, or a second pass.

**Fewer shards than lanes.** Only lanes that get a shard count: L in all formulas above is ``lanes_count`` = min(lanes,
shards). With the configured lanes instead, one shard and a window of 16 384, runs would hold 256 samples, the share of
one lane of 64, of which 63 do not exist: almost no shuffle, silently. It depends on the job alone, so all hosts agree.

What this cannot do, and an index can: balance (shards of different lengths give ranks different numbers of samples),
exact resumption at another world size, ``len()``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.errors import ConfigError
from penstock.order.bounds import LANES_MAX, RANKS_MAX, WINDOW_MAX, WORD_MAX, check_lane, check_lanes, check_ranges
from penstock.order.permutation import RUN, SHARDS, key_of, permutation

LANES_DEFAULT = 64
"""Divisible by the usual world sizes; each lane holds a run and keeps a shard open, which bounds it from above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Which sample comes when, for one epoch and one rank; see the module's text.

    Attributes:
        shards_count: Shards of the data set, in listed order.
        seed: 0 to 2**64 - 1; the same for all ranks.
        epoch: From 0.
        lanes: Of the job, a multiple of `world_size`; None: 64 when shuffled, else `world_size`.
        window: Samples that the job's runs hold together, at most (at least one per lane).
        rank: Of `world_size`.
        world_size: Data-parallel ranks.
        shuffled: False: shards in listed order, samples as stored.

    Raises:
        ConfigError: Numbers out of range, lanes that the ranks do not divide, fewer shards than ranks.

    Cost: about 40 bytes per shard.
    """

    shards_count: int
    seed: int = 0
    epoch: int = 0
    lanes: int | None = None
    window: int = 16384
    rank: int = 0
    world_size: int = 1
    shuffled: bool = True
    _shards: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        check_ranges(
            ("shards_count", self.shards_count, 1, 1 << 40),
            ("seed", self.seed, 0, WORD_MAX),
            ("epoch", self.epoch, 0, WORD_MAX),
            ("window", self.window, 1, WINDOW_MAX),
            ("world_size", self.world_size, 1, RANKS_MAX),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes_configured, 1, LANES_MAX),
        )
        world_size = self.world_size
        check_lanes(self.lanes_configured, world_size)
        if self.shards_count < world_size:
            raise ConfigError(
                f"{self.shards_count} shards are fewer than {world_size} ranks: some rank would have no data",
                hint=f"write the data as at least {world_size} shards, a multiple of it at best, or use fewer ranks",
            )
        if self.shuffled:
            shards = permutation(self.shards_count, key_of(SHARDS, self.seed, self.epoch)).tolist()
        else:
            shards = range(self.shards_count)
        object.__setattr__(self, "_shards", tuple(shards))

    @property
    def lanes_configured(self) -> int:
        """``lanes``, or what None stands for."""
        if self.lanes is not None:
            return self.lanes
        return LANES_DEFAULT if self.shuffled else self.world_size

    @property
    def lanes_count(self) -> int:
        """Lanes that have a shard: 0 to ``lanes_count`` - 1."""
        return min(self.lanes_configured, self.shards_count)

    @property
    def lanes_owned(self) -> tuple[int, ...]:
        """The rank's lanes that have a shard, ascending; at least one."""
        return tuple(range(self.rank, self.lanes_count, self.world_size))

    def shards_of(self, lane: int) -> list[int]:
        """Indices of the lane's shards in the listing, in the order in which they are read."""
        check_lane(lane, self.lanes_count)
        return list(self._shards[lane :: self.lanes_count])

    def run_length(self, lane: int, run_index: int) -> int:
        """Samples of a run, at least 1; the lane's last run may be shorter. 1 where nothing is shuffled."""
        check_lane(lane, self.lanes_count)
        if not self.shuffled:
            return 1
        run = max(1, self.window // self.lanes_count)
        return run if run_index else run - lane * run // self.lanes_count

    def permute_run(self, lane: int, run_index: int, count: int) -> list[int]:
        """The order in which the `count` samples of a run leave: the k-th is the run's sample ``[k]`` of this list.

        Args:
            lane: 0 to ``lanes_count`` - 1.
            run_index: From 0, in this lane and epoch.
            count: ``run_length(lane, run_index)``, or what was left in the lane.
        """
        if not self.shuffled:
            return list(range(count))
        order: list[int] = permutation(count, key_of(RUN, self.seed, self.epoch, lane, run_index)).tolist()
        return order

    def position(self, lane: int, index: int) -> int:
        """Position in the job's order of the `index`-th sample (from 0) that leaves `lane` in this epoch."""
        return index * self.lanes_count + lane

    def at_epoch(self, epoch: int) -> StreamOrder:
        """The same order, of another epoch."""
        return replace(self, epoch=epoch)


class RoundRobin:
    """Turns over lanes, until each has said that it is empty.

    ::

        while (lane := turns.next_lane()) is not None:
            if the lane has no sample left: turns.drop(lane)
            else: hand out its next one

    Args:
        lanes: Lane numbers, e.g. ``StreamOrder.lanes_owned``; turns go in this order.
    """

    __slots__ = ("_lanes", "_turn")

    def __init__(self, lanes: tuple[int, ...] | list[int]) -> None:
        self._lanes = list(lanes)
        self._turn = 0

    def __len__(self) -> int:
        return len(self._lanes)

    def next_lane(self) -> int | None:
        """The lane whose turn it is, and on to the next; None when all are empty."""
        lanes = self._lanes
        if not lanes:
            return None
        turn = self._turn
        self._turn = turn + 1 if turn + 1 < len(lanes) else 0
        return lanes[turn]

    def drop(self, lane: int) -> None:
        """`lane` is empty: it is never named again, and whoever is next stays next.

        Raises:
            ValueError: It is not among the lanes, or was dropped before.
        """
        index = self._lanes.index(lane)
        del self._lanes[index]
        if index < self._turn:
            self._turn -= 1
        if self._turn == len(self._lanes):
            self._turn = 0
