"""Reading objects through the gateway with boto3, over real sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fronts import RunningFront, s3_client
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

LARGE = bytes(range(256)) * (11 << 12) + b"end"
OBJECTS = {"a.txt": b"hello world", "empty": b"", "large.bin": LARGE, "dir/x y+z%é.json": b"{}"}


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    """A front with one bucket in memory."""
    with RunningFront(UpstreamBucket("data", MemoryStore(OBJECTS))) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: RunningFront) -> Any:
    """A boto3 client of it."""
    return s3_client(front.url)


@pytest.mark.parametrize("key", OBJECTS)
def test_get_returns_the_object(client: Any, key: str) -> None:
    """Objects of no byte, of one part and of several parts arrive whole, with size, ETag and type."""
    answer = client.get_object(Bucket="data", Key=key)
    assert answer["Body"].read() == OBJECTS[key]
    assert answer["ContentLength"] == len(OBJECTS[key])
    head = client.head_object(Bucket="data", Key=key)
    assert (head["ETag"], head["ContentLength"]) == (answer["ETag"], len(OBJECTS[key]))


def test_list_has_all_keys(client: Any) -> None:
    """Both versions of the listing have every key, with its size."""
    for name in ("list_objects", "list_objects_v2"):
        rows = getattr(client, name)(Bucket="data")["Contents"]
        assert {row["Key"]: row["Size"] for row in rows} == {key: len(data) for key, data in OBJECTS.items()}
