"""penstock's file system for fsspec, as it comes."""

from __future__ import annotations

from _driver import ACCESS_KEY, REGION, SECRET_KEY, serve
from _files import FileSystemWork

import penstock


class Penstock(FileSystemWork):
    packages = ("penstock-data", "fsspec")

    def __init__(self, *, url: str, bucket: str, ca: str | None) -> None:
        files = penstock.fsspec.PenstockS3FileSystem(endpoint_url=url, region=REGION, key=ACCESS_KEY, secret=SECRET_KEY)
        super().__init__(files, bucket)


if __name__ == "__main__":
    serve(Penstock)
