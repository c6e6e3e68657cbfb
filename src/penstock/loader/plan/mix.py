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
    from penstock.samples.transform import SampleTransform

SEEN_MIN = 200
"""Samples of each source with a filter from which its yield is known well enough."""

SHARE_RATIO_MAX = 1.5
"""Largest ratio of a source's share before and after filters about which users are not warned."""


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


def filtered_shares(order: object, transforms: Sequence[SampleTransform]) -> str | None:
    """Return what to tell users whose filters change the shares of a mix by more than ``SHARE_RATIO_MAX``.

    Args:
        order: Order of epoch 0, so far.
        transforms: Transform of the samples of each source, which count what their filters leave out.

    Returns:
        A warning, or an empty text if the shares are near the weights; None while too few samples were seen.
    """
    if not isinstance(order, MixOrder) or any(each.has_filter and each.seen_count < SEEN_MIN for each in transforms):
        return None
    shares = list(map(float, order.history[-1].shares([True] * len(transforms))))
    yields = [1 - each.filtered_count / max(1, each.seen_count) for each in transforms]
    left = [share * each for share, each in zip(shares, yields, strict=True)]
    left = [each / (sum(left) or 1) for each in left]
    if all(SHARE_RATIO_MAX * min(pair) >= max(pair) for pair in zip(shares, left, strict=True)):
        return ""
    needed = [share / each if each else 0.0 for share, each in zip(shares, yields, strict=True)]
    return (
        f"weights of a mix hold before filters, which leave {_percent(left)} of shares {_percent(shares)}. Hint: weights "
        f"{_percent(needed)} make up for them; .pick() chooses samples before they are mixed"
    )


def _percent(shares: Sequence[float]) -> str:
    return " : ".join(f"{share / (sum(shares) or 1):.1%}" for share in shares)


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
