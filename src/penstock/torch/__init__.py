"""The PyTorch door, the one place that imports torch: see README.md in this folder."""

try:
    from penstock.torch.batches import Tensors, tensors
    from penstock.torch.datasets import IterableDataset
    from penstock.torch.device import Normalise, Prefetch
    from penstock.torch.map_dataset import MapDataset
    from penstock.torch.ranks import agree, rank_and_world_size, share
    from penstock.torch.writing import CheckpointWriter, writer
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    text = "penstock.torch needs PyTorch. Hint: pip install 'penstock[torch]'"
    raise ModuleNotFoundError(text, name="torch") from error  # not ConfigError: who tries imports catches ImportError

__all__ = [
    "CheckpointWriter", "IterableDataset", "MapDataset", "Normalise", "Prefetch", "Tensors", "agree", "rank_and_world_size",
    "share", "tensors", "writer",
]  # fmt: skip
