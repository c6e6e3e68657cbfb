"""Checkpoints of PyTorch programs in object storage: see README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.torch.checkpoint.lightning_io import LightningCheckpointIO as LightningCheckpointIO
    from penstock.torch.checkpoint.safetensors_reading import SafetensorsReader as SafetensorsReader
    from penstock.torch.checkpoint.safetensors_reading import TensorSlice as TensorSlice
    from penstock.torch.checkpoint.safetensors_reading import load_safetensors as load_safetensors
    from penstock.torch.checkpoint.safetensors_reading import open_safetensors as open_safetensors
    from penstock.torch.checkpoint.safetensors_writing import save_safetensors as save_safetensors

_ORIGIN = {
    "LightningCheckpointIO": "lightning_io",
    "SafetensorsReader": "safetensors_reading",
    "TensorSlice": "safetensors_reading",
    "load_safetensors": "safetensors_reading",
    "open_safetensors": "safetensors_reading",
    "save_safetensors": "safetensors_writing",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
