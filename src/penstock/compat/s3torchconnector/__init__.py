"""The S3 Connector for PyTorch on penstock: its names, by ``import penstock.compat.s3torchconnector as s3torchconnector``."""

from penstock.compat.s3torchconnector.checkpoint import S3Checkpoint, S3Writer
from penstock.compat.s3torchconnector.datasets import S3IterableDataset, S3MapDataset
from penstock.compat.s3torchconnector.readers import S3Reader, S3ReaderConstructor
from penstock.compat.s3torchconnector.stores import S3ClientConfig
from penstock.errors import StoreError as S3Exception
from penstock.version import __version__ as __version__

__all__ = [
    "S3Checkpoint",
    "S3ClientConfig",
    "S3Exception",
    "S3IterableDataset",
    "S3MapDataset",
    "S3Reader",
    "S3ReaderConstructor",
    "S3Writer",
]
