"""s3fs, as it comes but for the listings that it would keep from one turn to the next, and with connections for a batch."""

from __future__ import annotations

import s3fs
from _driver import ACCESS_KEY, REGION, SECRET_KEY, serve
from _files import FileSystemWork
from fsspec.config import conf


class S3fs(FileSystemWork):
    packages = ("s3fs", "aiobotocore", "fsspec")

    def __init__(
        self, *, url: str, bucket: str, ca: str | None, batch: int | None = None, max_concurrency: int = 10
    ) -> None:
        if batch:
            conf["gather_batch_size"] = conf["nofiles_gather_batch_size"] = batch
        files = s3fs.S3FileSystem(
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            endpoint_url=url,
            client_kwargs={"region_name": REGION},
            config_kwargs={"max_pool_connections": batch or 128, "s3": {"addressing_style": "path"}},
            use_listings_cache=False,
            max_concurrency=max_concurrency,
        )
        super().__init__(files, bucket)


if __name__ == "__main__":
    serve(S3fs)
