"""Prefix strategies with the connector's names and results: what the names of a rank's files begin with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.torch.checkpoint import BinaryPrefixes, HexPrefixes, RoundRobinPrefixes
from penstock.torch.ranks import rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.torch.checkpoint import PrefixStrategy


class S3PrefixStrategyBase(ABC):
    """Chooses what the names of a rank's files begin with; a program's own strategies inherit it."""

    def __call__(self, rank: int) -> str:
        """Return what the names of the files of `rank` begin with."""
        return self.generate_prefix(rank)

    @abstractmethod
    def generate_prefix(self, rank: int) -> str:
        """Return what the names of the files of `rank` begin with; it usually ends with ``__{rank}_``."""


class DefaultPrefixStrategy(S3PrefixStrategyBase):
    """All files lie in the checkpoint's directory: ``__3_`` for rank 3."""

    def generate_prefix(self, rank: int) -> str:
        """Return what the names of the files of `rank` begin with."""
        return f"__{rank}_"


class _DirectoryStrategy(S3PrefixStrategyBase):
    """A directory for each rank, and below it one for the epoch if there is a number."""

    def __init__(self, directories: PrefixStrategy, epoch_num: int | None) -> None:
        super().__init__()
        if epoch_num is not None and (not isinstance(epoch_num, int) or isinstance(epoch_num, bool)):
            raise ConfigError(f"epoch_num={epoch_num!r} must be a whole number or None")
        self.epoch_num = epoch_num
        self._directories = directories

    def generate_prefix(self, rank: int) -> str:
        """Return what the names of the files of `rank` begin with: ``DIRECTORY/epoch_N/__RANK_``."""
        _, world_size = rank_and_world_size() or (0, 1)
        epoch = "" if self.epoch_num is None else f"epoch_{self.epoch_num}/"
        return f"{self._directories(rank, world_size)}{epoch}__{rank}_"


class NumericPrefixStrategy(_DirectoryStrategy):
    """Directories named by the digits of numbers, the lowest digit first: the base class of two bases.

    Args:
        base: 2 or 16.
        epoch_num: Number of the epoch, for a directory below; None for none.
        min_prefix_length: Least number of digits, from 1 to 64.
        prefix_count: Number of different directories; None takes the world size when a checkpoint is saved.

    Raises:
        ConfigError: A number is out of its bounds.
    """

    def __init__(
        self,
        base: int,
        epoch_num: int | None = None,
        min_prefix_length: int = 10,
        prefix_count: int | None = None,
    ) -> None:
        kinds = {2: BinaryPrefixes, 16: HexPrefixes}
        if base not in kinds:
            raise ConfigError(f"base={base!r} must be 2 or 16")
        super().__init__(kinds[base](length_min=min_prefix_length, prefixes_count=prefix_count), epoch_num)
        self.base = base


class BinaryPrefixStrategy(NumericPrefixStrategy):
    """Directories of binary digits: ``1100000000/epoch_5/__3_`` for rank 3 in epoch 5. The arguments are those of the base."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(2, epoch_num, min_prefix_length, prefix_count)


class HexPrefixStrategy(NumericPrefixStrategy):
    """Directories of hexadecimal digits: ``b000000000/__11_`` for rank 11. The arguments are those of the base."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(16, epoch_num, min_prefix_length, prefix_count)


class RoundRobinPrefixStrategy(_DirectoryStrategy):
    """The user's directories in turn: rank 0 the first, rank 1 the second, and so on.

    Args:
        user_prefixes: The directories, at least one.
        epoch_num: Number of the epoch, for a directory below; None for none.

    Raises:
        ConfigError: There are none, or one is not a name.
    """

    def __init__(self, user_prefixes: Sequence[str], epoch_num: int | None = None) -> None:
        super().__init__(RoundRobinPrefixes(user_prefixes), epoch_num)
        self.user_prefixes = user_prefixes


class RankPrefixes:
    """A strategy of the connector's kind, called as ``penstock.torch.checkpoint`` calls one.

    Args:
        strategy: The strategy, or any function of a rank.
    """

    def __init__(self, strategy: S3PrefixStrategyBase) -> None:
        self._strategy = strategy

    def __call__(self, rank: int, world_size: int, /) -> str:
        """Return the prefix of `rank` without the rank, which the names of files have anyway."""
        prefix = self._strategy(rank)
        return prefix.removesuffix(f"__{rank}_") if isinstance(prefix, str) else prefix
