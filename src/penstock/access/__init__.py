"""Random access: samples by number and by key. See README.md in this folder."""

from penstock.access.dataset import PipelineDataset

__all__ = ["PipelineDataset"]
