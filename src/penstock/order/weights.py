"""The weights of a mix: a tree of numbers, in which a mix may contain a mix, and which may change at positions of an epoch.

An entry is a number, or ``(number, entries)`` for a mix inside the mix: ``(0.5, (0.5, (1, 3)))`` gives sources 0, 1, 2
the shares 1/2, 1/8, 3/8. Sources are numbered from left to right. A nested mix has no circle of its own (``circle.py``):
its shares are multiplied into one circle, which holds all proportions exactly, and the arcs of a nested mix are
neighbours, so its own share is as exact. Two circles would round twice, and the inner circle of a lane would have to
count the turns of the outer one. The tree is kept because the share of an exhausted source goes to its own mix first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import ConfigError
from penstock.order.bounds import WORD_MAX, check_ranges

if TYPE_CHECKING:
    from fractions import Fraction

Entries: TypeAlias = Sequence[Any]
"""A sequence of numbers and ``(number, Entries)`` pairs; pairs are lists when they come from JSON."""


@dataclass(frozen=True, slots=True)
class MixWeights:
    """The weights that hold from a position of an epoch on.

    Attributes:
        entries: The tree of weights that the module describes; nested tuples once constructed.
        epoch: Epoch number, from 0.
        position: Position in that epoch, from 0; the weights hold from the next multiple of L (the number of lanes) on.

    Raises:
        ConfigError: An entry is not a finite number of at least 0, or all entries of a mix are 0.
    """

    entries: Entries
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", _checked(self.entries))
        check_ranges(("epoch", self.epoch, 0, WORD_MAX), ("position", self.position, 0, WORD_MAX))

    @property
    def sources_count(self) -> int:
        """Number of sources: the leaves of the tree."""
        return _leaves(self.entries)

    def shares(self, active: Sequence[bool]) -> list[Fraction]:
        """Return the share of each source; the shares add up to 1, and inactive sources have 0.

        Active sources of a mix that all have weight 0 get equal shares, because their samples still have to be read.

        Args:
            active: Whether each source takes part.
        """
        from fractions import Fraction

        shares = [Fraction(0)] * len(active)
        if any(active):
            _share(self.entries, active, 0, Fraction(1), shares)
        return shares

    def as_json(self) -> list[Any]:
        """Return ``[epoch, position, entries]``, as a saved state holds it."""
        return [self.epoch, self.position, _listed(self.entries)]

    @classmethod
    def from_json(cls, value: Any) -> MixWeights:
        """Return the weights that ``as_json`` described.

        Raises:
            ConfigError: `value` is not a result of ``as_json``.
        """
        if not isinstance(value, Sequence) or len(value) != 3 or not all(type(part) is int for part in value[:2]):
            raise ConfigError(f"weights {value!r:.80} of a state must be [epoch, position, entries]")
        return cls(value[2], value[0], value[1])


def _checked(entries: Any) -> tuple[Any, ...]:
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        raise ConfigError(f"weights {entries!r} must be a list of numbers", hint="e.g. (0.7, 0.3)")
    checked = tuple((_number(entry[0]), _checked(entry[1])) if _is_mix(entry) else _number(entry) for entry in entries)
    if not any(_weight(entry) for entry in checked):
        raise ConfigError(f"weights {entries!r} must not all be 0")
    return checked


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"weight {value!r} must be a finite number of at least 0")
    return value


def _is_mix(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2


def _weight(entry: Any) -> float:
    weight: float = entry[0] if isinstance(entry, tuple) else entry
    return weight


def _leaves(entries: Entries) -> int:
    return sum(_leaves(entry[1]) if isinstance(entry, tuple) else 1 for entry in entries)


def _share(entries: Entries, active: Sequence[bool], first: int, share: Fraction, shares: list[Fraction]) -> None:
    from fractions import Fraction

    alive = []  # (weight, first leaf, entry) of entries with an active source
    for entry in entries:
        leaves = _leaves(entry[1]) if isinstance(entry, tuple) else 1
        if any(active[first : first + leaves]):
            alive.append((Fraction(_weight(entry)), first, entry))
        first += leaves
    total = sum(weight for weight, _, _ in alive)
    for weight, leaf, entry in alive:
        part = share * weight / total if total else share / len(alive)
        if isinstance(entry, tuple):
            _share(entry[1], active, leaf, part, shares)
        else:
            shares[leaf] = part


def _listed(entries: Entries) -> list[Any]:
    return [[entry[0], _listed(entry[1])] if isinstance(entry, tuple) else entry for entry in entries]
