"""What the users of the file system share: options as they write them, and ``s3://`` in penstock's hands."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.fsspec import PenstockS3FileSystem, register
from penstock.testing.s3_server import S3Server


@pytest.fixture
def options(s3_endpoint: S3Server) -> dict[str, Any]:
    """Options in s3fs's names; ``s3://`` and ``penstock://`` are penstock's from here on."""
    register("s3")
    register("penstock")
    return {"endpoint_url": s3_endpoint.endpoint_url, "key": s3_endpoint.access_key, "secret": s3_endpoint.secret_key}


@pytest.fixture
def files(options: dict[str, Any]) -> PenstockS3FileSystem:
    """A file system on the server."""
    return PenstockS3FileSystem(**options)
