"""``S3StorageWriter`` and ``S3StorageReader``: distributed checkpoints, with the connector's arguments."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.checkpoints import COMMIT_MARKER
from penstock.compat.s3torchconnector.dcp.prefix_strategies import RankPrefixes
from penstock.compat.s3torchconnector.readers import DcpOptimized, kind_of
from penstock.compat.s3torchconnector.stores import BucketStores, parse_uri
from penstock.config import GIB, check_names
from penstock.errors import ConfigError, ObjectExistsError, ObjectMissingError
from penstock.torch.checkpoint import StorageReader, StorageWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from penstock.compat.s3torchconnector.dcp.prefix_strategies import S3PrefixStrategyBase
    from penstock.compat.s3torchconnector.readers import ReaderConstructor
    from penstock.compat.s3torchconnector.stores import S3ClientConfig

IGNORED = ("single_file_per_rank", "sync_files", "per_thread_copy_ahead", "cache_staged_state_dict")
"""Arguments of PyTorch's ``FileSystemWriter``. The first three say how it writes files, which is decided otherwise here;
``async_save`` stages the state by itself."""


def _is_uri(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        parse_uri(os.fspath(checkpoint_id))
    except ValueError:
        return False
    return True


class S3StorageWriter(StorageWriter):
    """Writes distributed checkpoints: ``dcp.save(state_dict, storage_writer=S3StorageWriter(region, path))``.

    It is a ``penstock.torch.checkpoint.StorageWriter``: a checkpoint becomes visible only when it is complete.

    Args:
        region: Region of the bucket; if it is wrong, the store's answer corrects it.
        path: ``s3://`` URI of the checkpoint's directory.
        s3client_config: Options of the client.
        prefix_strategy: Chooses what the names of a rank's files begin with.
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
            prefix_strategy=None if prefix_strategy is None else RankPrefixes(prefix_strategy),
            **stores.connect_options(),
        )
        self.overwrite = overwrite
        self._made_by = partial(
            type(self), region, s3client_config=s3client_config, prefix_strategy=prefix_strategy,
            thread_count=thread_count, endpoint=endpoint, overwrite=overwrite,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made_by, (self.checkpoint_id,)

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
                "Checkpoint already exists, and overwrite=False", url=self._place.describe(COMMIT_MARKER),
                hint="save each step to a path of its own",
            )  # fmt: skip
        return super().prepare_global_plan(plans)

    def _has_checkpoint(self) -> bool:
        try:
            self._place.store().stat(self._place.directory + COMMIT_MARKER)
        except ObjectMissingError:
            return False
        return True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is an ``s3://`` URI."""
        return _is_uri(checkpoint_id)


class S3StorageReader(StorageReader):
    """Reads distributed checkpoints: ``dcp.load(state_dict, storage_reader=S3StorageReader(region, path))``.

    It is a ``penstock.torch.checkpoint.StorageReader``, which also reads what the connector wrote.

    Args:
        region: Region of the bucket; if it is wrong, the store's answer corrects it.
        path: ``s3://`` URI of the checkpoint's directory.
        s3client_config: Options of the client.
        reader_constructor: ``S3ReaderConstructor.dcp_optimized(max_gap_size=)`` sets the largest gap between two ranges that
            are read with one request. Other constructors have no effect, because the load plan decides what is read.
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
        kind = kind_of(reader_constructor)
        if isinstance(kind, DcpOptimized):
            gap_bytes = int(min(kind.max_gap_size, GIB))
            options["fetch"] = dataclasses.replace(options["fetch"], gap_bytes_max=gap_bytes)
        super().__init__(path, weights_only=weights_only, **options)
        self._made_by = partial(
            type(self), region, s3client_config=s3client_config, reader_constructor=reader_constructor,
            endpoint=endpoint, weights_only=weights_only,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made_by, (self.checkpoint_id,)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is an ``s3://`` URI."""
        return _is_uri(checkpoint_id)
