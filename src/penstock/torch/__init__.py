"""The interface to PyTorch. No other part of penstock imports torch."""

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr
from penstock.version import install_hint

try:
    from penstock.torch import checkpoint
    from penstock.torch.batches import Tensors, as_tensors
    from penstock.torch.checkpoint.serialization import load, save
    from penstock.torch.datasets import IterableDataset, MapDataset
    from penstock.torch.device import Normalize, Prefetch
    from penstock.torch.ranks import agree, rank_and_world_size, share
    from penstock.torch.writing import CheckpointWriter, checkpoint_writer
    from penstock.transfer.directories import download_directory, upload_directory
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    text = f"penstock.torch needs PyTorch. Hint: {install_hint('torch')}"
    # Not ConfigError: code that tries imports catches ImportError.
    raise ModuleNotFoundError(text, name="torch") from error

if TYPE_CHECKING:
    from penstock.torch.checkpoint.training import Checkpoint as Checkpoint
else:  # its import of torch.distributed.checkpoint takes a second
    __getattr__ = lazy_getattr(__name__, {"Checkpoint": "checkpoint.training"})

Normalise, writer = Normalize, checkpoint_writer  # earlier names of these two

__all__ = [
    "Checkpoint", "CheckpointWriter", "IterableDataset", "MapDataset", "Normalise", "Normalize", "Prefetch", "Tensors",
    "agree", "as_tensors", "checkpoint", "checkpoint_writer", "download_directory", "load", "rank_and_world_size", "save",
    "share", "upload_directory", "writer",
]  # fmt: skip
