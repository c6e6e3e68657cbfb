"""Sizes and times as people write and read them: ``"200GB"`` to a number of bytes and back, ``"10min"`` to seconds."""

from __future__ import annotations

import re

from penstock.errors import ConfigError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?|)B?", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d|)")


def parse_bytes(text: str, *, option: str = "") -> int:
    """Return the number of bytes that a text names.

    Args:
        text: A number with an optional decimal or binary unit: ``"200GB"`` (10^9), ``"1.5 GiB"`` (2^30), ``"4096"``.
        option: Name of the option that the text was given for; error messages begin with it.

    Raises:
        ConfigError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is not a size".lstrip(), hint="e.g. 256MB, 1.5GiB, or a number of bytes")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def format_bytes(size_bytes: float) -> str:
    """Return a number of bytes with three significant digits and a binary unit: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} PiB"


def parse_seconds(text: str, *, option: str = "") -> float:
    """Return the number of seconds that a text names.

    Args:
        text: A number with an optional unit: ``"90"``, ``"1.5s"``, ``"10min"``, ``"2h"``, ``"250ms"``.
        option: Name of the option that the text was given for; error messages begin with it.

    Raises:
        ConfigError: The text is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is not a duration".lstrip(), hint="e.g. 90s, 10min, 2h, or seconds")
    return float(match[1]) * _SECONDS[match[2]]
