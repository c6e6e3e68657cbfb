"""What a pass-through bucket keeps of the objects of its store, and what that costs in requests."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from fronts import RunningFront, raw_exchange, s3_client
from penstock.cache import CacheConfig, Cached
from penstock.compose import connect
from penstock.fetch import Budget
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store import MemoryStore
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
def source(user: Any, bucket: str) -> Counting:
    """A store on a bucket with one described object of one part, and one of several."""
    client = user.client()
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


def test_a_version_that_was_replaced_is_not_the_clients_problem(
    source: Counting, tmp_path: Path, s3_endpoint: Any, bucket: str
) -> None:
    """If a believed version was replaced before its bytes were read, the client gets the new one and no error."""
    config = CacheConfig(tmp_path / "cache", 64 << 20, metadata_ttl_s=3600)
    with RunningFront(UpstreamBucket("data", Cached(source, config))) as front:
        client = s3_client(front.url)
        client.head_object(Bucket="data", Key="small.tar")
        s3_endpoint.client().put_object(Bucket=bucket, Key="small.tar", Body=b"new", ContentType="text/new")
        answer = client.get_object(Bucket="data", Key="small.tar")
        assert (answer["ContentType"], answer["Body"].read()) == ("text/new", b"new")


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


def test_checksums_are_sent_to_those_who_ask(source: Counting, s3_endpoint: Any, bucket: str, tmp_path: Path) -> None:
    """The store's checksum is sent with the whole object on request, cold and from the cache, and never with a part."""
    s3_endpoint.client().put_object(Bucket=bucket, Key="sum", Body=b"123456789", ChecksumAlgorithm="CRC32C")
    config = CacheConfig(tmp_path / "cache", 64 << 20, metadata_ttl_s=3600)
    with RunningFront(UpstreamBucket("data", Cached(source, config))) as front:
        client = s3_client(front.url, config={"response_checksum_validation": "when_required"})
        for _ in range(2):
            asked = client.get_object(Bucket="data", Key="sum", ChecksumMode="ENABLED")
            assert asked["ChecksumCRC32C"] == "4waSgw=="
            assert asked["Body"].read() == b"123456789"
            assert "ChecksumCRC32C" not in client.get_object(Bucket="data", Key="sum")
            part = client.get_object(Bucket="data", Key="sum", ChecksumMode="ENABLED", Range="bytes=0-1")
            assert "ChecksumCRC32C" not in part
        head = client.head_object(Bucket="data", Key="sum", ChecksumMode="ENABLED")
        assert head["ChecksumCRC32C"] == "4waSgw=="


def test_a_client_that_leaves_gives_everything_back() -> None:
    """Clients that stop in the midst of a long object leave no byte in the budget and no task."""
    budget = Budget(64 << 20)

    class Budgeted(MemoryStore):
        """A store with a budget of its own."""

        @property
        def budget(self) -> Budget:
            """The budget."""
            return budget

    store = Budgeted({"long": bytes(100 << 20)})
    with RunningFront(UpstreamBucket("data", store)) as front:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", front.port)) as connection:
                connection.sendall(b"GET /data/long HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for _ in range(1000):
            statistics = budget.statistics()
            if len(front.records) == 3 and statistics.used_bytes == statistics.free_bytes:
                break
            gc.collect()
            front.call(one_turn)
        assert statistics.used_bytes == statistics.free_bytes
        assert not any(record.complete for record in front.records)


async def one_turn() -> None:
    """Let the loop do something else for a moment."""
    await asyncio.sleep(0.01)


def test_objects_of_a_store_that_tells_no_length() -> None:
    """An upstream that answers in chunks, also without a length to HEAD, is read, described and cut into ranges."""

    class Chunked(BaseHTTPRequestHandler):
        """Sends every object in chunks."""

        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            """Send the head."""
            self.send_response(200)
            self.send_header("ETag", '"v"')
            self.send_header("Content-Type", "text/made")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def do_GET(self) -> None:
            """Send the head and the body."""
            self.do_HEAD()
            self.wfile.write(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Chunked) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            store = connect(f"http://127.0.0.1:{server.server_port}/")
            with RunningFront(UpstreamBucket("data", store)) as front:
                client = s3_client(front.url)
                answer = client.get_object(Bucket="data", Key="k")
                assert (answer["Body"].read(), answer["ContentLength"], answer["ETag"]) == (b"hello world", 11, '"v"')
                assert client.head_object(Bucket="data", Key="k")["ContentLength"] == 11
                assert client.get_object(Bucket="data", Key="k", Range="bytes=-5")["Body"].read() == b"world"
                assert client.get_object(Bucket="data", Key="k", Range="bytes=0-4")["Body"].read() == b"hello"
                assert client.get_object(Bucket="data", Key="k", Range="bytes=3-6")["Body"].read() == b"lo w"
                client.close()
        finally:
            server.shutdown()
            thread.join()


def test_own_routes_come_first() -> None:
    """Handlers of exact paths and of prefixes get requests that no bucket sees."""

    async def hello(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=f"own {request.method}")

    routes = {"/WriteGetObjectResponse": hello, "/-/": hello}
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": b"1"})), extra_routes=routes) as front:
        for target, expected in (
            ("/WriteGetObjectResponse?a=1", b"own GET"),
            ("/-/health", b"own GET"),
            ("/data/d", b"1"),
        ):
            sent = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            assert raw_exchange(front.port, sent).endswith(b"\r\n\r\n" + expected)
