"""What a pass-through bucket keeps of the objects of its store, and what that costs in requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fronts import RunningFront, s3_client
from penstock.cache import CacheConfig, Cached
from penstock.compose import connect
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store.base import Wrapper

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store import Store
    from penstock.types import Operation, Sink, Transfer

pytestmark = pytest.mark.server

DESCRIBED = {
    "ContentType": "application/x-special",
    "CacheControl": "max-age=60",
    "ContentDisposition": 'attachment; filename="a b.bin"',
    "ContentLanguage": "de",
    "Metadata": {"colour": "blue", "n": "7"},
}


class Counting(Wrapper):
    """A store that notes the operations which reach the store inside."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.names: list[str] = []

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Note the operation, and pass it on."""
        self.names.append(type(operation).__name__)
        return self.inner.submit(operation, sink)

    def taken(self) -> list[str]:
        """Return what was noted since the last call."""
        names, self.names = self.names, []
        return names


@pytest.fixture
def source(s3_endpoint: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """A store on a bucket with one described object of one part, and one of several."""
    for name, value in s3_endpoint.environment.items():
        monkeypatch.setenv(name, value)
    client = s3_endpoint.client()
    client.put_object(Bucket=bucket, Key="small.tar", Body=b"x" * 100_000, **DESCRIBED)
    client.put_object(Bucket=bucket, Key="large", Body=bytes(range(250)) * 80_000, **DESCRIBED)
    return Counting(connect(f"s3://{bucket}"))


def described(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that describes the object."""
    return {name: answer.get(name) for name in DESCRIBED}


@pytest.mark.parametrize("key", ["small.tar", "large"])
def test_described_objects_stay_described_for_one_request(source: Counting, key: str) -> None:
    """Type, metadata and content headers pass through, and a cold object of one part costs one request."""
    with RunningFront(UpstreamBucket("data", source)) as front:
        client = s3_client(front.url)
        source.taken()
        answer = client.get_object(Bucket="data", Key=key)
        assert described(answer) == DESCRIBED
        assert len(answer["Body"].read()) == answer["ContentLength"]
        operations = source.taken()
        assert operations == (["Get"] if key == "small.tar" else ["Get"] * len(operations))
        head = client.head_object(Bucket="data", Key=key)
        assert described(head) == DESCRIBED
        assert (head["ETag"], head["LastModified"]) == (answer["ETag"], answer["LastModified"])
        assert source.taken() == ["Head"]


@pytest.mark.parametrize("begins_with", ["get", "head", "list"])
def test_a_warm_cache_asks_nothing(source: Counting, tmp_path: Path, begins_with: str) -> None:
    """With a TTL, an object that was read once is read and described again without a request, by this process and the next."""
    config = CacheConfig(tmp_path / "cache", 64 << 20, metadata_ttl_s=3600)
    with RunningFront(UpstreamBucket("data", Cached(source, config))) as front:
        client = s3_client(front.url)
        if begins_with == "head":
            client.head_object(Bucket="data", Key="small.tar")
        elif begins_with == "list":
            client.list_objects_v2(Bucket="data")
        first = client.get_object(Bucket="data", Key="small.tar")
        assert described(first) == DESCRIBED
        data = first["Body"].read()
        source.taken()
        for _ in range(2):
            answer = client.get_object(Bucket="data", Key="small.tar")
            assert described(answer) == DESCRIBED
            assert answer["Body"].read() == data
            part = client.get_object(Bucket="data", Key="small.tar", Range="bytes=10-19")
            assert part["Body"].read() == data[10:20]
            assert part["ContentRange"] == f"bytes 10-19/{len(data)}"
            assert described(client.head_object(Bucket="data", Key="small.tar")) == DESCRIBED
        assert source.taken() == []
    other = Counting(source.inner)
    with RunningFront(UpstreamBucket("data", Cached(other, config))) as front:
        answer = s3_client(front.url).get_object(Bucket="data", Key="small.tar")
        assert (described(answer), answer["Body"].read()) == (DESCRIBED, data)
        assert other.taken() == []


def test_without_a_ttl_a_new_version_is_seen_at_once(
    source: Counting, tmp_path: Path, s3_endpoint: Any, bucket: str
) -> None:
    """Without a TTL each read asks for the version, and a new one brings its own description."""
    with RunningFront(UpstreamBucket("data", Cached(source, CacheConfig(tmp_path / "cache", 64 << 20)))) as front:
        client = s3_client(front.url)
        assert described(client.get_object(Bucket="data", Key="small.tar")) == DESCRIBED
        s3_endpoint.client().put_object(Bucket=bucket, Key="small.tar", Body=b"new", ContentType="text/new")
        answer = client.get_object(Bucket="data", Key="small.tar")
        assert (answer["ContentType"], answer["Metadata"], answer["Body"].read()) == ("text/new", {}, b"new")


def test_types_are_guessed_where_a_store_has_none(tmp_path: Path) -> None:
    """A directory has no types; the suffix of the key names them."""
    for name in ("a.json", "b.tar", "c"):
        (tmp_path / name).write_bytes(b"1")
    with RunningFront(UpstreamBucket("data", connect(tmp_path))) as front:
        client = s3_client(front.url)
        types = [client.head_object(Bucket="data", Key=key)["ContentType"] for key in ("a.json", "b.tar", "c")]
        assert types == ["application/json", "application/x-tar", "binary/octet-stream"]
        for odd in ("none", "a.json/x", "../up", "x//y", "dir/"):
            with pytest.raises(client.exceptions.ClientError) as caught:
                client.head_object(Bucket="data", Key=odd)
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
