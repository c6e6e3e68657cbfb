"""The Amazon S3 Connector for PyTorch: its client in threads, or its dataset as a loop would read it."""

from __future__ import annotations

import _driver
from s3torchconnector import S3ClientConfig, S3IterableDataset
from s3torchconnector._s3client import S3Client


class Connector:
    """`throughput_target_gbps` None is the default (10); it decides how many connections the CRT opens."""

    packages = ("s3torchconnector", "s3torchconnectorclient", "torch")

    def __init__(
        self,
        *,
        url: str,
        bucket: str,
        ca: str | None,  # its TLS trusts only the system's bundle: harness.py binds ours over it
        threads: int = 64,
        threads_large: int = 1,
        throughput_target_gbps: float | None = None,
        part_bytes: int = 8 << 20,
        dataset: bool = False,
    ) -> None:
        tuned = {} if throughput_target_gbps is None else {"throughput_target_gbps": throughput_target_gbps}
        self.url, self.bucket, self.dataset = url, bucket, dataset
        self.config = S3ClientConfig(force_path_style=True, part_size=part_bytes, **tuned)
        self.client = S3Client(_driver.REGION, endpoint=url, s3client_config=self.config)
        self.threads, self.threads_large = threads, threads_large

    def _fetch(self, key: str) -> list[bytes]:
        """The pieces as the native stream gives them: without the copies that the connector's reader adds."""
        return list(self.client._get_object_stream(self.bucket, key))

    def read(self, keys: list[str], size_bytes: int, in_order: bool, take: _driver.Take) -> None:
        if self.dataset:
            uris = [f"s3://{self.bucket}/{key}" for key in keys]
            options = {"region": _driver.REGION, "endpoint": self.url, "s3client_config": self.config}
            for index, reader in enumerate(S3IterableDataset.from_objects(uris, **options)):
                take(index, reader.read())
        elif in_order:
            threads = self.threads_large if size_bytes > self.config.part_size else self.threads
            _driver.in_order(self._fetch, keys, threads, take)
        else:
            _driver.in_threads(self._fetch, keys, self.threads, take)

    def list(self) -> list[str]:
        return [info.key for page in self.client.list_objects(self.bucket) for info in page.object_info]


if __name__ == "__main__":
    _driver.serve(Connector)
