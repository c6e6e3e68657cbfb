"""The order of samples without an index, when the lengths of the shards are not known before they are read.

The L *lanes* of the job are the unit of order. They belong to the job and not to a host, so the order is the same for
every world size. The shards of the epoch are permuted, and shard i goes to lane i mod L as a whole. A lane is the
concatenation of the samples of its shards. It is cut into *runs* of consecutive samples; each run is read completely and
then leaves the lane permuted. Shuffling thus costs one window of samples and no more, and there is no reservoir whose
content depends on timing. The first run of lane l is shorter by floor(l * run / L), so that the lanes do not all wait for
a full run at the same time.

**Positions and ranks.** The order of the job goes round robin over the lanes that still have samples. Which lanes those
are is not known in advance: a rank sees only its own lanes (l mod W = r), and where the other lanes end is known only
after they have been read. Positions are therefore defined by lane: the j-th sample that leaves lane l has position
j * L + l. It is unique, the same for every W, and known at once. Round robin over the lanes that still have samples *is*
the ascending order of these numbers: an exhausted lane leaves gaps in the numbers and shifts no other sample. Each rank
therefore goes round robin over its own lanes without communicating, its samples are a subsequence of the job's, and
merging the ranks by position gives the order of a single rank. There are no gaps until the first lane is exhausted. The
alternative, positions without gaps, would need every rank to know the length of every lane: a collective, or a second
pass.

**Fewer shards than lanes.** Only lanes that get a shard count: L in all formulas above is ``lanes_count`` = min(lanes,
shards). If L were the configured number of lanes, one shard and a window of 16 384 would give runs of 256 samples, the
share of one of 64 lanes, 63 of which do not exist: almost no shuffling, without notice. L depends only on the job, so
all hosts agree on it.

Three things need an index: balance (shards of different lengths give ranks different numbers of samples), exact
resumption at another world size, and ``len()``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.order.laned import WINDOW_MAX, LanedOrder, check_lane
from penstock.order.permutation import RUN, SHARDS, key_of, permutation

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder(LanedOrder):
    """The order of samples without an index, for one epoch and one rank; the module describes it.

    Attributes:
        shards_count: Number of shards of the data set.
        window: Largest number of samples that the runs of the job hold together; every lane holds at least one.
        shuffled: Whether shards and samples are permuted; otherwise shards come as listed and samples as stored.

    Raises:
        ConfigError: A number is out of range, `world_size` does not divide `lanes`, or there are fewer shards than ranks.

    Cost: about 40 bytes per shard.
    """

    shards_count: int
    window: int = 16384
    shuffled: bool = True
    _shards: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        self.check(("shards_count", self.shards_count, 1, 1 << 40), ("window", self.window, 1, WINDOW_MAX))
        world_size = self.world_size
        if self.shards_count < world_size:
            raise ConfigError(
                f"{self.shards_count} shards are fewer than {world_size} ranks: some rank would have no data",
                hint=f"write the data as at least {world_size} shards, preferably a multiple of it, or use fewer ranks",
            )
        if self.shuffled:
            shards = permutation(self.shards_count, key_of(SHARDS, self.seed, self.epoch)).tolist()
        else:
            shards = range(self.shards_count)
        object.__setattr__(self, "_shards", tuple(shards))

    @property
    def lanes_count(self) -> int:
        """L: number of lanes that have a shard."""
        return min(self.lanes_configured, self.shards_count)

    def shards_of(self, lane: int) -> list[int]:
        """Return the indices of the lane's shards in the listing, in reading order."""
        check_lane(lane, self.lanes_count)
        return list(self._shards[lane :: self.lanes_count])

    def run_length(self, lane: int, run_index: int) -> int:
        """Return the number of samples in a run, at least 1; the last run of a lane may be shorter. 1 without shuffling."""
        check_lane(lane, self.lanes_count)
        if not self.shuffled:
            return 1
        run = max(1, self.window // self.lanes_count)
        return run if run_index else run - lane * run // self.lanes_count

    def permute_run(self, lane: int, run_index: int, count: int) -> npt.NDArray[np.int64]:
        """Return the order in which the samples of a run leave it: entry k is the index in the run of the k-th sample.

        Args:
            lane: Number of the lane, in [0, ``lanes_count``).
            run_index: Index of the run in this lane and epoch, from 0.
            count: Number of samples in the run: ``run_length(lane, run_index)``, or fewer at the end of the lane.
        """
        if not self.shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(count, key_of(RUN, self.seed, self.epoch, lane, run_index))
