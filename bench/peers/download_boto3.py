"""Downloads a prefix with boto3: ``download_file`` of each listed object, in threads. Prints what it used."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
from botocore.config import Config


def main(url: str, bucket: str, prefix: str, folder: str, threads: int) -> None:
    config = Config(max_pool_connections=threads, s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)

    def download(key: str) -> None:
        path = Path(folder, key.removeprefix(prefix))
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(path))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(download, [item["Key"] for page in pages for item in page["Contents"]]))
    print(json.dumps({"boto3": boto3.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
