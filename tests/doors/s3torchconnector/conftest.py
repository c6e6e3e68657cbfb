"""What this suite shares: the connector and penstock in its place, and a bucket that both read."""

from __future__ import annotations

from typing import Any

import pytest
import s3torchconnector as connector

import penstock.compat.s3torchconnector as changed
from connector_behaviours import BIG, LINES, OBJECTS, Library, Place


@pytest.fixture(scope="session")
def libraries() -> tuple[Library, Library]:
    """The connector, and penstock in its place."""
    paths = {"s3client_config": connector.S3ClientConfig(force_path_style=True)}
    return Library("connector", connector, paths), Library("penstock", changed)


@pytest.fixture(scope="session")
def place(s3_endpoint: Any) -> Any:
    """A bucket with objects; the environment names its store for the whole session, as the connector's clients need it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_endpoint.environment.items():
            patch.setenv(name, value)
        bucket, client = s3_endpoint.create_bucket(), s3_endpoint.client()
        for key, data in {**OBJECTS, "lines": LINES, "big": BIG, "empty": b""}.items():
            client.put_object(Bucket=bucket, Key=f"job/{key}", Body=data)
        yield Place(f"s3://{bucket}/job", client, s3_endpoint.endpoint_url)
        client.close()


@pytest.fixture(scope="session")
def connector_writes(place: Any, libraries: Any) -> bool:
    """Whether the connector can write to this store."""
    try:
        with libraries[0].S3Checkpoint(**libraries[0].keywords()).writer(f"{place.uri}/probe") as writer:
            writer.write(b"x")
    except connector.S3Exception:
        return False
    return True
