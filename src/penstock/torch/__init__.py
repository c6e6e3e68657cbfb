"""The PyTorch door, the one place that imports torch: see README.md in this folder."""

from penstock.torch.batches import Tensors, tensors
from penstock.torch.datasets import IterableDataset
from penstock.torch.ranks import rank_and_world_size

__all__ = ["IterableDataset", "Tensors", "rank_and_world_size", "tensors"]
