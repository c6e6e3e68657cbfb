"""boto3: ``torch.save`` to memory and ``upload_fileobj``; ``download_fileobj`` to memory and ``torch.load``."""

from __future__ import annotations

import io
from typing import Any

import _checkpoints
import _driver
import boto3
import torch
from botocore.config import Config


class Boto3(_checkpoints.Checkpoints):
    """Transfers with their defaults: 10 threads, parts of 8 MiB."""

    packages = ("torch", "boto3", "botocore")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = Config(s3={"addressing_style": "path"}, max_pool_connections=32)
        keys = {"aws_access_key_id": _driver.ACCESS_KEY, "aws_secret_access_key": _driver.SECRET_KEY}
        self.client = boto3.client("s3", endpoint_url=self.url, region_name=_driver.REGION, config=config, **keys)

    def save(self, key: str) -> None:
        file = io.BytesIO()
        torch.save(self.state, file)
        file.seek(0)
        self.client.upload_fileobj(file, self.bucket, key)

    def load(self, key: str) -> dict[str, Any]:
        file = io.BytesIO()
        self.client.download_fileobj(self.bucket, key, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


if __name__ == "__main__":
    _checkpoints.serve(Boto3)
