"""What every order checks: numbers inside their bounds, ranks that divide the lanes."""

from __future__ import annotations

from penstock.errors import ConfigError

WORD_MAX = (1 << 64) - 1
WINDOW_MAX = 1 << 48
LANES_MAX = RANKS_MAX = 1 << 32


def check_ranges(*bounds: tuple[str, int, int, int]) -> None:
    """Refuse the first (name, value, low, high) whose value lies outside [low, high].

    Raises:
        ConfigError: It names the value and its bounds.
    """
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(f"{name} {value} must be in [{low}, {high}]")


def check_lanes(lanes: int, world_size: int) -> None:
    """Refuse ranks that would own different numbers of lanes.

    Raises:
        ConfigError: It names the nearest number of lanes that the ranks divide.
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
    """Refuse a lane number that does not exist.

    Raises:
        ConfigError: `lane` is not in [0, `lanes_count`).
    """
    if not 0 <= lane < lanes_count:
        raise ConfigError(f"lane {lane} must be in [0, {lanes_count})")
