"""Lightning's checkpoints under the connector's name."""

from penstock.compat.s3torchconnector.lightning.checkpoint import S3LightningCheckpoint

__all__ = ["S3LightningCheckpoint"]
