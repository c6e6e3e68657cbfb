"""``Mix``: several sources read as one, in proportions that may change during the epoch; and its flat form without nesting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.pipeline.pipeline import Pipeline
    from penstock.pipeline.source import Objects, Sequential, Shards

Stop: TypeAlias = Literal["all", "first", "repeat"]
Weights: TypeAlias = tuple[float, ...]

PARTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Mix:
    """Several sources and their weights.

    Attributes:
        parts: Pipelines without shuffle, take, evaluate or batch; a part may be a mix.
        weights: Weight of each part from the start of the epoch, on any positive scale.
        schedule: Pairs of a position, in samples of the whole job, and the weights from there on, in ascending order.
        stop: When the epoch ends. ``"all"``: when all parts are exhausted; the share of an exhausted part goes to the
            others. ``"first"``: as soon as any part is exhausted. ``"repeat"``: when every part has been read once; shorter
            parts are repeated until then.
    """

    parts: tuple[Pipeline, ...]
    weights: Weights
    schedule: tuple[tuple[int, Weights], ...] = ()
    stop: Stop = "all"

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= PARTS_MAX:
            raise ConfigError(f"mix() has {len(self.parts)} sources, but must have between 1 and {PARTS_MAX}")
        for weights in (self.weights, *(weights for _, weights in self.schedule)):
            _check_weights(weights, len(self.parts))
        positions = [position for position, _ in self.schedule]
        if any(not isinstance(position, int) or position < 1 for position in positions):
            raise ConfigError(f"mix(schedule=) at {positions}: positions must be whole numbers of samples, at least 1")
        if positions != sorted(set(positions)):
            raise ConfigError(f"mix(schedule=) at {positions}: positions must ascend")
        if self.stop not in ("all", "first", "repeat"):
            raise ConfigError(f"mix(stop={self.stop!r}) must be 'all', 'first' or 'repeat'")

    def weights_at(self, position: int) -> Weights:
        """Return the share of each part at a position; the shares sum to 1."""
        weights = self.weights
        for start, later in self.schedule:
            if position >= start:
                weights = later
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def __repr__(self) -> str:
        options = ""
        if self.schedule:
            entries = (f"{position}: {self._shown(weights)}" for position, weights in self.schedule)
            options = f", schedule={{{', '.join(entries)}}}"
        options += "" if self.stop == "all" else f", stop={self.stop!r}"
        return f"mix({self._shown(self.weights)}{options})"

    def _shown(self, weights: Weights) -> str:
        entries = (f"{part!r}: {weight:g}" for part, weight in zip(self.parts, weights, strict=True))
        return f"{{{', '.join(entries)}}}"


class Flat(NamedTuple):
    """A pipeline as single sources and their shares, without nested mixes.

    Attributes:
        leaves: Pipelines over ``Shards``, ``Objects`` or ``Sequential``, each with all stages that its samples pass.
        schedule: Pairs of a position and the share of each leaf from there on, in ascending order; the first position
            is 0, and shares sum to 1.
        stop: As in ``Mix``.
    """

    leaves: tuple[Pipeline, ...]
    schedule: tuple[tuple[int, Weights], ...]
    stop: Stop


def parts_of(weights: Mapping[Pipeline, float], schedule: Mapping[int, Mapping[Pipeline, float]] | None) -> tuple[
    tuple[Pipeline, ...], Weights, tuple[tuple[int, Weights], ...]
]:  # fmt: skip
    """Return the arguments of ``mix`` as the fields of ``Mix``: weights in the order of the parts, 0 for parts left out."""
    parts = tuple(weights)
    later = []
    for position, changed in sorted((schedule or {}).items()):
        if unknown := [part for part in changed if part not in weights]:
            raise ConfigError(f"mix(schedule={{{position}: ...}}) has {unknown[0]!r}, which is not in the mix")
        later.append((position, tuple(changed.get(part, 0) for part in parts)))
    return parts, tuple(weights.values()), tuple(later)


def flattened(source: Shards | Objects | Sequential | Mix, pipeline: Pipeline) -> Flat:
    """Return the single sources of `pipeline`; the share of each is the product of the shares of the mixes that contain it.

    Args:
        source: The source of `pipeline`.
        pipeline: The pipeline.

    Raises:
        ConfigError: A mix inside a mix has another `stop`.
    """
    if not isinstance(source, Mix):
        return Flat((pipeline,), ((0, (1.0,)),), "all")
    flats = [flattened(part.source, part) for part in source.parts]
    for part, flat in zip(source.parts, flats, strict=True):
        if isinstance(part.source, Mix) and flat.stop != source.stop:
            raise ConfigError(
                f"mix(stop={source.stop!r}) contains mix(stop={flat.stop!r}): both must have the same stop="
            )
    leaves = tuple(
        type(pipeline)(leaf.source, (*leaf.stages, *pipeline.stages)) for flat in flats for leaf in flat.leaves
    )
    starts = {0, *(position for position, _ in source.schedule)}
    starts |= {position for flat in flats for position, _ in flat.schedule}
    schedule = []
    for start in sorted(starts):
        outer = source.weights_at(start)
        inner = [_shares_at(flat.schedule, start) for flat in flats]
        shares = tuple(share * each for share, each_of in zip(outer, inner, strict=True) for each in each_of)
        schedule.append((start, shares))
    return Flat(leaves, tuple(schedule), source.stop)


def _shares_at(schedule: tuple[tuple[int, Weights], ...], position: int) -> Weights:
    return next(shares for start, shares in reversed(schedule) if start <= position)


def _check_weights(weights: Weights, parts_count: int) -> None:
    if len(weights) != parts_count:
        raise ConfigError(f"mix() has {parts_count} sources and {len(weights)} weights")
    for weight in weights:
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"mix() weight {weight!r} must be a number of at least 0")
    if not sum(weights):
        raise ConfigError(f"mix() weights {list(weights)} are all 0")
