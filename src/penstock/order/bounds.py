"""Checks that all orders share: numbers within their bounds, and a number of ranks that divides the lanes."""

from __future__ import annotations

from penstock.errors import ConfigError

WORD_MAX = (1 << 64) - 1
WINDOW_MAX = 1 << 48
LANES_MAX = RANKS_MAX = 1 << 32


def check_ranges(*bounds: tuple[str, int, int, int]) -> None:
    """Check that every value lies within its bounds.

    Args:
        *bounds: Tuples (name, value, low, high); value must lie in [low, high].

    Raises:
        ConfigError: A value is out of its bounds; the message names both.
    """
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(f"{name} {value} must be in [{low}, {high}]")


def check_lanes(lanes: int, world_size: int) -> None:
    """Check that all ranks own the same number of lanes.

    Raises:
        ConfigError: The ranks do not divide the lanes; the hint names the nearest number of lanes that they divide.
    """
    if lanes % world_size:
        below = lanes // world_size * world_size
        above = below + world_size
        nearest = below if below and lanes - below <= above - lanes else above
        raise ConfigError(
            f"world_size {world_size} does not divide lanes {lanes}",
            hint=f"to resume inside an epoch, use a number of ranks that divides {lanes}; for a new job, use lanes={nearest}",
        )


def check_lane(lane: int, lanes_count: int) -> None:
    """Check that a lane exists.

    Raises:
        ConfigError: `lane` is not in [0, `lanes_count`).
    """
    if not 0 <= lane < lanes_count:
        raise ConfigError(f"lane {lane} must be in [0, {lanes_count})")
