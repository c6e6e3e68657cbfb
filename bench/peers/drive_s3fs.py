"""s3fs as it comes: ``cat`` of many paths at once, a batch at a time."""

from __future__ import annotations

import _driver
import s3fs


class S3fs:
    packages = ("s3fs", "aiobotocore", "fsspec")

    def __init__(self, *, url: str, bucket: str, ca: str | None, batch: int = 128) -> None:
        self.bucket, self.batch = bucket, batch
        self.files = s3fs.S3FileSystem(
            key=_driver.ACCESS_KEY,
            secret=_driver.SECRET_KEY,
            endpoint_url=url,
            client_kwargs={"region_name": _driver.REGION, "verify": ca},
            config_kwargs={"max_pool_connections": batch, "s3": {"addressing_style": "path"}},
            use_listings_cache=False,
        )

    def read(self, keys: list[str], size_bytes: int, in_order: bool, take: _driver.Take) -> None:
        step = self.batch if size_bytes < 8 << 20 else 1
        for start in range(0, len(keys), step):
            found = self.files.cat([f"{self.bucket}/{key}" for key in keys[start : start + step]])
            for offset, key in enumerate(keys[start : start + step]):
                take(start + offset, found[f"{self.bucket}/{key}"])

    def list(self) -> list[str]:
        return sorted(path.split("/", 1)[1] for path in self.files.find(self.bucket))


if __name__ == "__main__":
    _driver.serve(S3fs)
