"""The PyTorch door, the one place that imports torch: see README.md in this folder."""

try:
    from penstock.torch.batches import Tensors, tensors
    from penstock.torch.datasets import IterableDataset
    from penstock.torch.ranks import rank_and_world_size
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    text = "penstock.torch needs PyTorch. Hint: pip install 'penstock[torch]'"
    raise ModuleNotFoundError(text, name="torch") from error  # not ConfigError: who tries imports catches ImportError

__all__ = ["IterableDataset", "Tensors", "rank_and_world_size", "tensors"]
