"""penstock: ``ps.torch.save`` and ``ps.torch.load``."""

from __future__ import annotations

from typing import Any

import _checkpoints

import penstock as ps


class Penstock(_checkpoints.Checkpoints):
    """Saves and loads with the defaults, or with `mmap`."""

    packages = ("torch", "penstock-data")

    def __init__(self, *, mmap: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.mmap = mmap

    def save(self, key: str) -> None:
        ps.torch.save(self.state, f"s3://{self.bucket}/{key}", endpoint_url=self.url)

    def load(self, key: str) -> dict[str, Any]:
        return ps.torch.load(f"s3://{self.bucket}/{key}", mmap=self.mmap, endpoint_url=self.url)


if __name__ == "__main__":
    _checkpoints.serve(Penstock)
