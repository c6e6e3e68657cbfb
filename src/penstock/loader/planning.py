"""Looking, once per loader: what is there, whose it is, and in which order it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.config import default_budget_bytes
from penstock.errors import ConfigError
from penstock.loader.ranks import rank_and_world_size
from penstock.loader.reading import Reading, read_ahead
from penstock.loader.state import data_digest
from penstock.loader.streaming import StreamJob
from penstock.order import StreamOrder
from penstock.pipeline import Batch, Shuffle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.feed import Feed
    from penstock.loader.options import Options
    from penstock.loader.shards import ShardFinder
    from penstock.loader.statistics import Meter
    from penstock.pipeline import Pipeline


class Job(Protocol):
    """How a rank reads its part of the data, epoch after epoch."""

    mode: str

    def feed(self, epoch: int, cursor: Mapping[str, Any] | None) -> Feed:
        """The samples of an epoch, from `cursor` on."""

    def cursor(self, mark: Any) -> dict[str, Any]:
        """A feed's mark as JSON."""


class Plan(NamedTuple):
    """What was found out.

    Attributes:
        job: What to read.
        facts: Everything that the order depends on, for the state.
        digest: Identity of the data set.
        rank: Of this process.
        world_size: Data-parallel ranks.
        rows_count: Of a batch of this rank.
    """

    job: Job
    facts: dict[str, Any]
    digest: str
    rank: int
    world_size: int
    rows_count: int


def plan(pipeline: Pipeline, *, options: Options, finder: ShardFinder, meter: Meter) -> Plan:
    """Look at the data and the job.

    Raises:
        StoreError, ConfigError: as ``Loader`` says of its first iteration.

    Cost: one listing.
    """
    rank, world_size = rank_and_world_size(options.rank, options.world_size, mesh=options.mesh)
    if world_size > 1 and options.agree is None:
        raise ConfigError(
            f"world_size={world_size}: shards without an index may give ranks different numbers of batches",
            hint="give Loader(agree=penstock.torch.agree), which asks all ranks before each batch; or run `penstock index`",
        )
    shuffle = pipeline.stage(Shuffle)
    batch = pipeline.stage(Batch)
    assert batch is not None
    shards = finder.find()
    order = StreamOrder(
        shards_count=len(shards),
        seed=shuffle.seed if shuffle else 0,
        lanes=options.lanes,
        window=shuffle.window if shuffle else 1,
        rank=rank,
        world_size=world_size,
        shuffled=shuffle is not None,
    )
    budget_bytes = (options.fetch.budget_bytes_max if options.fetch else None) or default_budget_bytes()
    reading = Reading(
        sizes=read_ahead(len(order.lanes_owned), options.fetch),
        pinned_bytes_max=budget_bytes // 8,
        on_corrupt="raise",
        meter=meter,
    )
    facts = {
        "seed": order.seed,
        "shuffled": order.shuffled,
        "window": order.window,
        "lanes": order.lanes_configured,
        "batch": batch.size,
        "rank": rank,
        "world_size": world_size,
    }
    job = StreamJob(shards, order=order, reading=reading)
    return Plan(job, facts, data_digest(shards), rank, world_size, batch.size)
