"""Distributed checkpoints under the connector's names: the storage writer and reader, and prefix strategies."""

from penstock.compat.s3torchconnector.dcp.prefix_strategies import (
    BinaryPrefixStrategy,
    DefaultPrefixStrategy,
    HexPrefixStrategy,
    NumericPrefixStrategy,
    RoundRobinPrefixStrategy,
    S3PrefixStrategyBase,
)
from penstock.compat.s3torchconnector.dcp.storage import S3StorageReader, S3StorageWriter

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
