"""The Amazon S3 Connector for PyTorch: ``torch.save`` and ``torch.load`` on the files of ``S3Checkpoint``."""

from __future__ import annotations

from typing import Any

import _checkpoints
import _driver
import torch
from s3torchconnector import S3Checkpoint, S3ClientConfig


class Connector(_checkpoints.Checkpoints):
    """`throughput_target_gbps` None is the default (10); it decides how many connections the CRT opens."""

    packages = ("torch", "s3torchconnector", "s3torchconnectorclient")

    def __init__(self, *, throughput_target_gbps: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        tuned = {} if throughput_target_gbps is None else {"throughput_target_gbps": throughput_target_gbps}
        config = S3ClientConfig(force_path_style=True, **tuned)
        self.checkpoint = S3Checkpoint(region=_driver.REGION, endpoint=self.url, s3client_config=config)

    def save(self, key: str) -> None:
        with self.checkpoint.writer(f"s3://{self.bucket}/{key}") as writer:
            torch.save(self.state, writer)

    def load(self, key: str) -> dict[str, Any]:
        with self.checkpoint.reader(f"s3://{self.bucket}/{key}") as reader:
            return torch.load(reader, weights_only=True)


if __name__ == "__main__":
    _checkpoints.serve(Connector)
