"""Distributed checkpoints under the connector's names: the storage writer and reader, and prefix strategies."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.checkpoints import COMMIT_MARKER
from penstock.compat.s3torchconnector.readers import kind_of
from penstock.compat.s3torchconnector.stores import BucketStores, parse_uri
from penstock.config import GIB, check_names
from penstock.errors import ConfigError, ObjectExistsError, ObjectMissingError
from penstock.torch.checkpoint import BinaryPrefixes, HexPrefixes, RoundRobinPrefixes, StorageReader, StorageWriter
from penstock.torch.checkpoint.place import PlacedStorage
from penstock.torch.ranks import rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import SavePlan

    from penstock.compat.s3torchconnector.readers import ReaderConstructor
    from penstock.compat.s3torchconnector.stores import S3ClientConfig
    from penstock.torch.checkpoint import PrefixStrategy

__all__ = [
    "BinaryPrefixStrategy",
    "DefaultPrefixStrategy",
    "HexPrefixStrategy",
    "NumericPrefixStrategy",
    "RoundRobinPrefixStrategy",
    "S3PrefixStrategyBase",
    "S3StorageReader",
    "S3StorageWriter",
]

IGNORED = ("single_file_per_rank", "sync_files", "per_thread_copy_ahead", "cache_staged_state_dict")
"""Arguments of PyTorch's ``FileSystemWriter``. The first three say how it writes files, which is decided otherwise here;
``async_save`` stages the state by itself."""


class S3PrefixStrategyBase(ABC):
    """Chooses the prefix of the names of a rank's files; a program's own strategies inherit it."""

    def __call__(self, rank: int) -> str:
        """Return the prefix of the names of the files of `rank`."""
        return self.generate_prefix(rank)

    @abstractmethod
    def generate_prefix(self, rank: int) -> str:
        """Return the prefix of the names of the files of `rank`; it usually ends with ``__{rank}_``."""


class DefaultPrefixStrategy(S3PrefixStrategyBase):
    """All files lie in the checkpoint's directory: ``__3_`` for rank 3."""

    def generate_prefix(self, rank: int) -> str:
        """Return the prefix of the names of the files of `rank`."""
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
        """Return the prefix of the names of the files of `rank`: ``DIRECTORY/epoch_N/__RANK_``."""
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


def _without_rank(strategy: S3PrefixStrategyBase, rank: int, _world_size: int) -> str:
    """Return the prefix that a strategy chooses, without the rank, which the names of files have anyway."""
    prefix = strategy(rank)
    return prefix.removesuffix(f"__{rank}_") if isinstance(prefix, str) else prefix


class _UriStorage(PlacedStorage):
    """The common part of both: they lie at an ``s3://`` URI, and pickle as their arguments."""

    _made_by: Callable[[str], _UriStorage]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made_by, (self.checkpoint_id,)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is an ``s3://`` URI."""
        try:
            parse_uri(os.fspath(checkpoint_id))
        except ValueError:
            return False
        return True


class S3StorageWriter(_UriStorage, StorageWriter):
    """Writes distributed checkpoints: ``dcp.save(state_dict, storage_writer=S3StorageWriter(region, path))``.

    It is a ``penstock.torch.checkpoint.StorageWriter``: a checkpoint becomes visible only when it is complete.

    Args:
        region: Region of the bucket; if it is wrong, the store's answer corrects it.
        path: ``s3://`` URI of the checkpoint's directory.
        s3client_config: Options of the client.
        prefix_strategy: Chooses the prefix of the names of a rank's files.
        thread_count: Threads of each rank that write files, and number of files.
        endpoint: URL of an S3-compatible store; None takes the environment's, else Amazon's.
        overwrite: Whether a save replaces an earlier checkpoint of the path, as a whole.
        **file_options: Arguments of PyTorch's ``FileSystemWriter`` (``IGNORED``), which have no effect.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        region: str | None,
        path: str,
        s3client_config: S3ClientConfig | None = None,
        prefix_strategy: S3PrefixStrategyBase | None = None,
        thread_count: int = 1,
        *,
        endpoint: str | None = None,
        overwrite: bool = True,
        **file_options: Any,
    ) -> None:
        check_names("S3StorageWriter", file_options, IGNORED)
        parse_uri(os.fspath(path))
        if prefix_strategy is not None and not callable(prefix_strategy):
            raise ConfigError(f"prefix_strategy={prefix_strategy!r} must be an S3PrefixStrategyBase")
        stores = BucketStores(region=region, endpoint=endpoint, config=s3client_config)
        super().__init__(
            path,
            thread_count=thread_count,
            prefix_strategy=None if prefix_strategy is None else partial(_without_rank, prefix_strategy),
            **stores.connect_options(),
        )
        self.overwrite = overwrite
        self._made_by = partial(
            type(self), region, s3client_config=s3client_config, prefix_strategy=prefix_strategy,
            thread_count=thread_count, endpoint=endpoint, overwrite=overwrite,
        )  # fmt: skip

    @property
    def thread_count(self) -> int:
        """Threads of each rank that write files."""
        return self._thread_count

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save on the coordinator, as in the base class.

        Raises:
            ObjectExistsError: ``overwrite`` is False, and the path has a checkpoint.
            ConfigError: A prefix is not valid.
            StoreError: The store failed.

        Cost: one more request if ``overwrite`` is False.
        """
        if not self.overwrite and self._has_checkpoint():
            raise ObjectExistsError(
                "Checkpoint already exists, and overwrite=False", url=self._describe(COMMIT_MARKER),
                hint="save each step to a path of its own",
            )  # fmt: skip
        return super().prepare_global_plan(plans)

    def _has_checkpoint(self) -> bool:
        try:
            self._store().stat(self._directory + COMMIT_MARKER)
        except ObjectMissingError:
            return False
        return True


class S3StorageReader(_UriStorage, StorageReader):
    """Reads distributed checkpoints: ``dcp.load(state_dict, storage_reader=S3StorageReader(region, path))``.

    It is a ``penstock.torch.checkpoint.StorageReader``, which also reads the connector's checkpoints.

    Args:
        region: Region of the bucket; if it is wrong, the store's answer corrects it.
        path: ``s3://`` URI of the checkpoint's directory.
        s3client_config: Options of the client.
        reader_constructor: ``S3ReaderConstructor.dcp_optimized(max_gap_size=)`` sets the largest gap between two ranges that
            are read with one request. Other constructors have no effect, because the load plan decides which ranges are read.
        endpoint: URL of an S3-compatible store; None takes the environment's, else Amazon's.
        weights_only: Whether objects that are not tensors may hold only tensors and plain data. The connector's reader has no
            such argument, and runs code from the checkpoint, as with False.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        region: str | None,
        path: str | os.PathLike[str],
        s3client_config: S3ClientConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
        *,
        endpoint: str | None = None,
        weights_only: bool = True,
    ) -> None:
        parse_uri(os.fspath(path))
        options = BucketStores(region=region, endpoint=endpoint, config=s3client_config).connect_options()
        gap_size = kind_of(reader_constructor).max_gap_size
        if gap_size is not None:
            gap_bytes = int(min(gap_size, GIB))
            options["fetch"] = dataclasses.replace(options["fetch"], gap_bytes_max=gap_bytes)
        super().__init__(path, weights_only=weights_only, **options)
        self._made_by = partial(
            type(self), region, s3client_config=s3client_config, reader_constructor=reader_constructor,
            endpoint=endpoint, weights_only=weights_only,
        )  # fmt: skip
