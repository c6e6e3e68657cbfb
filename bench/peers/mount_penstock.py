"""Mounts a bucket with a byte budget, which the command has no option for: BUCKET_URL@ENDPOINT_URL DIRECTORY BYTES.

The mount ends when the standard input does.
"""

from __future__ import annotations

import sys

import penstock

if __name__ == "__main__":
    url, directory, budget = sys.argv[1:]
    bucket, endpoint_url = url.split("@")
    fetch = penstock.FetchConfig(budget_bytes_max=int(budget))
    with penstock.mount(bucket, directory, endpoint_url=endpoint_url, fetch=fetch):
        sys.stdin.read()
