"""Checkpoints of PyTorch programs in object storage: see README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.torch.checkpoint.lightning_io import LightningCheckpointIO as LightningCheckpointIO
    from penstock.torch.checkpoint.prefixes import BinaryPrefixes as BinaryPrefixes
    from penstock.torch.checkpoint.prefixes import HexPrefixes as HexPrefixes
    from penstock.torch.checkpoint.prefixes import PrefixStrategy as PrefixStrategy
    from penstock.torch.checkpoint.prefixes import RoundRobinPrefixes as RoundRobinPrefixes
    from penstock.torch.checkpoint.safetensors_reading import SafetensorsReader as SafetensorsReader
    from penstock.torch.checkpoint.safetensors_reading import TensorSlice as TensorSlice
    from penstock.torch.checkpoint.safetensors_reading import load_safetensors as load_safetensors
    from penstock.torch.checkpoint.safetensors_reading import open_safetensors as open_safetensors
    from penstock.torch.checkpoint.safetensors_writing import save_safetensors as save_safetensors
    from penstock.torch.checkpoint.storage_reader import StorageReader as StorageReader
    from penstock.torch.checkpoint.storage_writer import StorageWriter as StorageWriter
    from penstock.torch.checkpoint.training import Checkpoint as Checkpoint

_ORIGIN = {
    "Checkpoint": "training",
    "LightningCheckpointIO": "lightning_io",
    **dict.fromkeys(("BinaryPrefixes", "HexPrefixes", "PrefixStrategy", "RoundRobinPrefixes"), "prefixes"),
    "SafetensorsReader": "safetensors_reading",
    "TensorSlice": "safetensors_reading",
    "load_safetensors": "safetensors_reading",
    "open_safetensors": "safetensors_reading",
    "save_safetensors": "safetensors_writing",
    "StorageReader": "storage_reader",
    "StorageWriter": "storage_writer",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
