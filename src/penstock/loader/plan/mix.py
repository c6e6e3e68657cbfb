"""The order of a mix, and changes of its weights while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.order import MixedSource, MixOrder, MixWeights
from penstock.pipeline import Mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.plan.loader_plan import OrderOptions
    from penstock.pipeline import Pipeline


def mixed_order(
    pipeline: Pipeline, counts: Sequence[Sequence[int]], options: OrderOptions, saved: Sequence[Any] | None
) -> MixOrder:
    """The order of a mix.

    Args:
        pipeline: The pipeline that mixes.
        counts: Number of samples in each shard, by source.
        options: Options that every order takes.
        saved: All weights in a saved state; those of the pipeline if None, or if the mix has other parts now: whether another
            data set is accepted is decided later.
    """
    flat = pipeline.flat()
    history = [MixWeights(shares, 0, position) for position, shares in flat.schedule]
    if saved is not None:
        kept = [MixWeights.from_json(entry) for entry in saved]
        history = kept if all(each.sources_count == len(counts) for each in kept) else history
    window = max(1, options.window // len(counts))
    return MixOrder(
        sources=tuple(MixedSource(samples=samples, window=window, shuffled=options.shuffled) for samples in counts),
        history=tuple(history),
        stop=flat.stop,
        seed=options.seed,
        lanes=options.lanes,
        rank=options.rank,
        world_size=options.world_size,
    )


def reweighted_order(
    order: object,
    pipeline: Pipeline,
    weights: Sequence[float] | Mapping[Pipeline, float],
    *,
    epoch: int,
    position: int,
) -> MixOrder:
    """The order of a mix with other weights from a position of an epoch on.

    Args:
        order: Order of epoch 0, so far.
        pipeline: The pipeline that mixes.
        weights: Weights of the parts of the mix, in its order or by pipeline.
        epoch: Epoch number, from 0.
        position: Position in this epoch from which the weights hold.

    Raises:
        ConfigError: The pipeline has no mix, or the weights do not fit its parts.
    """
    if not isinstance(order, MixOrder) or not isinstance(pipeline.source, Mix):
        raise ConfigError(f"set_weights() needs a mix, but this loader reads {pipeline.source!r}")
    parts = pipeline.source.parts
    if not isinstance(weights, list | tuple | Mapping):
        raise ConfigError(f"set_weights({weights!r}) must be a list of weights, or a mapping")
    given = [weights.get(part, 0.0) for part in parts] if isinstance(weights, Mapping) else list(weights)
    unknown = [part for part in weights if part not in parts] if isinstance(weights, Mapping) else []
    if unknown or len(given) != len(parts):
        raise ConfigError(
            f"set_weights() got {weights!r} for a mix of {len(parts)} parts",
            hint="pass a mapping whose keys are the pipelines of the mix",
        )
    shares: list[float] = []
    for part, weight in zip(parts, given, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"set_weights() weight {weight!r} must be a number of at least 0")
        schedule = part.flat().schedule
        inner = next(each for begin, each in reversed(schedule) if begin <= position)
        shares += [weight * share for share in inner]
    return order.at_epoch(epoch).with_weights(shares, position=position).at_epoch(0)
