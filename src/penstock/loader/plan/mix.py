"""Changing the weights of a mix while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.order import MixOrder
from penstock.pipeline import Mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.pipeline import Pipeline


def reweighted(
    pipeline: Pipeline,
    plan: LoaderPlan,
    weights: Sequence[float] | Mapping[Pipeline, float],
    *,
    epoch: int,
    position: int,
) -> None:
    """Give the plan's order other weights from a position of an epoch on, and its facts the history of them.

    Raises:
        ConfigError: there is no mix, or the weights do not fit its parts.
    """
    order: Any = plan.read_plan.order
    if not isinstance(order, MixOrder) or not isinstance(pipeline.source, Mix):
        raise ConfigError(f"set_weights() needs a mix, this loader reads {pipeline.source!r}")
    parts = pipeline.source.parts
    if not isinstance(weights, list | tuple | Mapping):
        raise ConfigError(f"set_weights({weights!r}) must be a list of weights, or a mapping")
    given = [weights.get(part, 0.0) for part in parts] if isinstance(weights, Mapping) else list(weights)
    unknown = [part for part in weights if part not in parts] if isinstance(weights, Mapping) else []
    if unknown or len(given) != len(parts):
        raise ConfigError(
            f"set_weights() got {weights!r} for a mix of {len(parts)} parts",
            hint="a mapping of the mix's own pipelines",
        )
    entries = []
    for part, weight in zip(parts, given, strict=True):
        inner = part.flat().schedule
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"set_weights() weight {weight!r} must be a number of at least 0")
        shares = next(each for begin, each in reversed(inner) if begin <= position)
        entries += [weight * share for share in shares]
    changed = order.at_epoch(epoch).with_weights(entries, position=position)
    plan.read_plan.order = changed.at_epoch(0)
    plan.facts["weights"] = [each.as_json() for each in changed.history]
