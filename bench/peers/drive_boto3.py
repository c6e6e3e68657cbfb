"""boto3 in threads, and its paginator."""

from __future__ import annotations

import _driver
import boto3
from botocore.config import Config


class Boto3:
    packages = ("boto3", "botocore", "urllib3")

    def __init__(self, *, url: str, bucket: str, ca: str | None, threads: int = 16, threads_large: int = 8) -> None:
        self.bucket, self.threads, self.threads_large = bucket, threads, threads_large
        config = Config(max_pool_connections=max(threads, threads_large), s3={"addressing_style": "path"})
        self.client = boto3.client("s3", endpoint_url=url, region_name=_driver.REGION, verify=ca, config=config)

    def _fetch(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def read(self, keys: list[str], size_bytes: int, in_order: bool, take: _driver.Take) -> None:
        if in_order:
            threads = self.threads_large if size_bytes > 8 << 20 else self.threads
            _driver.in_order(self._fetch, keys, threads, take)
        else:
            _driver.in_threads(self._fetch, keys, self.threads, take)

    def list(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [item["Key"] for page in pages for item in page["Contents"]]


if __name__ == "__main__":
    _driver.serve(Boto3)
