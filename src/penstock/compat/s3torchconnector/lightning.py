"""``S3LightningCheckpoint``: how Lightning saves and loads checkpoints, with the connector's arguments."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from penstock.compat.s3torchconnector.checkpoint import object_uri
from penstock.compat.s3torchconnector.stores import BucketStores
from penstock.torch.checkpoint import LightningCheckpointIO

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock.compat.s3torchconnector.stores import S3ClientConfig


__all__ = ["S3LightningCheckpoint"]


class S3LightningCheckpoint(LightningCheckpointIO):
    """Saves and loads Lightning's checkpoints in S3: ``lightning.Trainer(plugins=[S3LightningCheckpoint(region)])``.

    It is a ``penstock.torch.checkpoint.LightningCheckpointIO`` that takes only ``s3://`` URIs.

    Args:
        region: Region of the buckets; if it is wrong, the store's answer corrects it.
        s3client_config: Options of the client.
        endpoint: URL of an S3-compatible store; None takes the environment's, else Amazon's.
    """

    def __init__(
        self,
        region: str | None,
        s3client_config: S3ClientConfig | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.region = region
        self._stores = BucketStores(region=region, endpoint=endpoint, config=s3client_config)
        super().__init__(**self._stores.connect_options())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint; an earlier one of this path remains until the new one is whole.

        Args:
            checkpoint: Dict that Lightning saves.
            path: ``s3://`` URI of the object, a str.
            storage_options: Options of ``penstock.connect`` for this save.

        Raises:
            TypeError: `path` is not a str.
            ConfigError: `path` is not the URI of an object.
            StoreError: Writing failed.
        """
        super().save_checkpoint(checkpoint, _checked_path(path), storage_options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: ``s3://`` URI of the object, a str.
            map_location: Device of the tensors, as for ``torch.load``; None is the CPU.
            weights_only: Whether to refuse anything but tensors and plain values. None is PyTorch's default, and False with a
                Lightning before 2.6, as in the connector.

        Raises:
            TypeError: `path` is not a str.
            ConfigError: `path` is not the URI of an object.
            StoreError: Reading failed.
        """
        if weights_only is None and _lightning_version() < (2, 6):
            weights_only = False
        return super().load_checkpoint(_checked_path(path), map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the object; a missing one is no error.

        Raises:
            TypeError: `path` is not a str.
            ConfigError: `path` is not the URI of an object.
            StoreError: Removing failed.
        """
        bucket, key = object_uri(_checked_path(path))
        self._stores.store(bucket).delete(key)


def _checked_path(path: object) -> str:
    if not isinstance(path, str):
        raise TypeError(f"the path {path!r} must be a str: the s3:// URI of an object")
    object_uri(path)
    return path


def _lightning_version() -> tuple[int, ...]:
    """Return major and minor version of Lightning, by whichever of its names it is installed."""
    for name in ("lightning", "pytorch-lightning"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return tuple(map(int, re.findall(r"\d+", found)[:2]))
    return (2, 6)
