"""Prefix strategies: they choose the text with which the names of a rank's data files begin.

Stores that shard their keys by prefix, as S3 does, serve more requests if the ranks' files have different prefixes. The prefix
comes right after the checkpoint's URL, so it helps most if that URL is short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.config import check_whole
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX_CHARACTERS_MAX = 512


class PrefixStrategy(Protocol):
    """Chooses the prefix of each rank; a function will do."""

    def __call__(self, rank: int, world_size: int, /) -> str:
        """Return the prefix of the names of the files of `rank`, such as ``"ab/"``; it may be empty."""


class RoundRobinPrefixes:
    """Gives the ranks the same few prefixes in turn: rank 0 the first, rank 1 the second, and so on.

    Args:
        prefixes: The prefixes; each becomes a directory.

    Raises:
        ConfigError: There are none, or one is not a name.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        if isinstance(prefixes, str) or not prefixes:
            raise ConfigError(f"prefixes={prefixes!r} must be a list of at least one prefix", hint='["a", "b"]')
        self._prefixes = tuple([checked_prefix(f"{prefix}/") for prefix in prefixes])

    def __call__(self, rank: int, world_size: int, /) -> str:
        """Return the prefix of `rank`."""
        return self._prefixes[rank % len(self._prefixes)]


class _DigitPrefixes:
    base: int
    digits: str

    def __init__(self, *, length_min: int = 10, prefixes_count: int | None = None) -> None:
        check_whole("length_min", length_min, 1, 64)
        if prefixes_count is not None:
            check_whole("prefixes_count", prefixes_count, 1)
        self._length_min = length_min
        self._prefixes_count = prefixes_count

    def __call__(self, rank: int, world_size: int, /) -> str:
        """Return the prefix of `rank`: its number's digits, the lowest first, so that neighbours differ early."""
        count = self._prefixes_count or world_size
        number = rank % count
        length, digits = 0, ""
        while len(digits) < self._length_min or self.base**length < count:
            number, digit = divmod(number, self.base)
            digits += self.digits[digit]
            length += 1
        return digits + "/"


class BinaryPrefixes(_DigitPrefixes):
    """Gives each rank a prefix of binary digits: ``0000000000/``, ``1000000000/``, ``0100000000/``, ...

    Args:
        length_min: Least number of digits.
        prefixes_count: Number of different prefixes; None takes the number of ranks.

    Raises:
        ConfigError: A number is out of its bounds.
    """

    base, digits = 2, "01"


class HexPrefixes(_DigitPrefixes):
    """Gives each rank a prefix of hexadecimal digits: ``0000000000/``, ``1000000000/``, ..., ``f000000000/``, ``0100000000/``.

    Args:
        length_min: Least number of digits.
        prefixes_count: Number of different prefixes; None takes the number of ranks.

    Raises:
        ConfigError: A number is out of its bounds.
    """

    base, digits = 16, "0123456789abcdef"


def checked_prefix(prefix: object) -> str:
    """Return `prefix`, as a prefix strategy gave it.

    Raises:
        ConfigError: It is not text, is too long, or its segments are not names: empty, ``.`` or ``..``.
    """
    if not isinstance(prefix, str) or len(prefix) > PREFIX_CHARACTERS_MAX:
        raise ConfigError(f"the prefix {prefix!r} must be text of at most {PREFIX_CHARACTERS_MAX} characters")
    directories = prefix.split("/")[:-1]
    if {"", ".", ".."} & set(directories):
        raise ConfigError(f"the prefix {prefix!r} must not have an empty segment, '.' or '..'", hint='"ab/"')
    return prefix
