"""Plain GETs of objects in memory: the same answers as through the front, and the same protection from clients."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trustme

from fronts import RunningFront, raw_exchange, s3_client
from penstock.cache import CacheConfig, Cached
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.config import GatewayLimits
from penstock.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server

DATA = {"d": b"0123456789" * 10, "e": b"another", "none": b"", "a b": b"1", "big": bytes(1 << 20)}


def bucket(folder: Path, name: str = "data") -> UpstreamBucket:
    """A bucket whose cache believes what it knows for an hour."""
    return UpstreamBucket(name, Cached(MemoryStore(DATA), CacheConfig(folder / "cache", 64 << 20, metadata_ttl_s=3600)))


@pytest.fixture
def front(tmp_path: Path) -> Iterator[RunningFront]:
    """A front whose objects were read once."""
    with RunningFront(bucket(tmp_path)) as running:
        warm(running)
        yield running


def warm(running: RunningFront) -> None:
    """Read every object, and wait until its bytes are in memory, because they are stored after they were sent."""
    for key in sorted(DATA.keys() - {"none"}):
        exchanged(running, head(f"GET /data/{key.replace(' ', '%20')} HTTP/1.1"))
        wait_in_memory(running, key)
    settle(running)
    running.records.clear()


def wait_in_memory(running: RunningFront, key: str) -> None:
    """Wait until the bytes of an object are in memory."""

    async def is_in_memory() -> bool:
        opened = running.front._buckets.get_nowait("data").open_nowait(key)  # type: ignore[union-attr]
        return opened is not None and opened.body is not None

    end_s = time.monotonic() + 10
    while not running.call(is_in_memory):
        assert time.monotonic() < end_s
        time.sleep(0.005)


def settle(running: RunningFront) -> None:
    """Wait until the front has read what was sent to it."""
    for _ in range(3):
        running.call(lambda: asyncio.sleep(0))


def wait_records(running: RunningFront, count: int) -> None:
    """Wait until so many requests have ended."""
    end_s = time.monotonic() + 10
    while len(running.records) < count:
        assert time.monotonic() < end_s
        time.sleep(0.005)


def by_aiohttp(running: RunningFront) -> int:
    """Number of requests that aiohttp has read so far."""
    return running.front._pool.requests_count  # type: ignore[union-attr]


def slow_client(running: RunningFront) -> socket.socket:
    """A connection whose buffer for answers is small, and which sends each request at once."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", running.port))
    return connection


def head(line: str, *headers: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([line, "Host: localhost", *headers, "", ""]).encode()


def exchanged(running: RunningFront, *sent: bytes) -> bytes:
    """What comes for requests that are sent one after the other on one connection, each after the answer to the last one."""
    found = b""
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
        for each in sent:
            connection.sendall(each)
            found += answer_of(connection)
    return found


def answer_of(connection: socket.socket) -> bytes:
    """One answer with a length, and nothing that follows it."""
    with connection.makefile("rb", buffering=0) as file:
        found = b""
        while not found.endswith(b"\r\n\r\n"):
            piece = file.read(1)
            assert piece, found
            found += piece
        length = re.search(rb"Content-Length: (\d+)", found)
        assert length, found
        body = bytearray()
        while len(body) < int(length[1]):
            body += file.read(int(length[1]) - len(body)) or pytest.fail("the body is cut off")
    return found + bytes(body)


def comparable(answer: bytes) -> tuple[set[bytes], bytes]:
    """The lines of an answer without those that differ each time, and its body."""
    start, _, body = answer.partition(b"\r\n\r\n")
    changing = (b"x-amz-request-id: ", b"Date: ", b"Connection: ")
    return {line for line in start.split(b"\r\n") if not line.startswith(changing)}, body


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        pytest.param("/data/d", [], id="whole"),
        pytest.param("/data/a%20b?x-id=GetObject", [], id="operation-in-query"),
        pytest.param("/data/d", ["Range: bytes=0-9"], id="range"),
        pytest.param("/data/d", ["Range: bytes=-3"], id="last-bytes"),
        pytest.param("/data/d", ["Range: bytes=95-"], id="open-range"),
        pytest.param("/data/d", ["Range: bytes=0-1,5-6"], id="several-ranges"),
        pytest.param("/data/d", ["x-amz-checksum-mode: ENABLED"], id="checksums"),
        pytest.param("/data/big", [], id="largest"),
    ],
)
def test_the_answer_is_that_of_the_front(front: RunningFront, target: str, headers: list[str]) -> None:
    """Status, headers, body and log are the same, whichever part answers; a request that says ``TE`` is not plain."""
    before = by_aiohttp(front)
    at_hand = exchanged(front, head(f"GET {target} HTTP/1.1", *headers))
    assert by_aiohttp(front) == before
    through_front = exchanged(front, head(f"GET {target} HTTP/1.1", *headers, "TE: trailers"))
    assert by_aiohttp(front) == before + 1
    assert comparable(at_hand) == comparable(through_front)
    wait_records(front, 2)
    first, second = front.records
    for name in ("remote", "method", "bucket", "key", "query", "status", "code", "sent_bytes", "complete"):
        assert getattr(first, name) == getattr(second, name), name


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        pytest.param("/data/missing", [], 404, id="unknown-key"),
        pytest.param("/other/d", [], 404, id="unknown-bucket"),
        pytest.param("/data/none", [], 200, id="empty-object"),
        pytest.param("/data/d?partNumber=2", [], 416, id="part"),
        pytest.param("/data/d?versionId=x", [], 404, id="version"),
        pytest.param("/data/d?acl", [], 200, id="sub-resource"),
        pytest.param("/data/d", ["Range: bytes=100-"], 416, id="unsatisfiable"),
        pytest.param("/data/d", ["If-None-Match: *"], 304, id="condition"),
        pytest.param("/data/d", ["If-Match: x"], 412, id="failed-condition"),
        pytest.param("/data/d", ["Range: bytes=0-9", 'If-Range: "x"'], 200, id="range-of-another-version"),
        pytest.param("/data/%zz", [], 400, id="broken-encoding"),
    ],
)
def test_what_needs_more_than_memory_is_answered_once(
    front: RunningFront, target: str, headers: list[str], status: int
) -> None:
    """A plain request that needs more than bytes in memory is answered without aiohttp as well, and logged once."""
    before = by_aiohttp(front)
    with socket.create_connection(("127.0.0.1", front.port), timeout=10) as connection:
        connection.sendall(head(f"GET {target} HTTP/1.1", *headers))
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert by_aiohttp(front) == before
    wait_records(front, 1)
    assert [record.status for record in front.records] == [status]


def test_a_signature_is_verified_and_its_key_checked(tmp_path: Path) -> None:
    """A right signature reads at once; a wrong one, an unsigned request, and a key of another bucket are refused."""
    keys = AccessKeys.parse("right:right-secret:ro,other:other-secret:ro:elsewhere", source="test")
    with RunningFront(bucket(tmp_path), authenticator=SignatureAuthenticator(keys)) as running:
        right = s3_client(running.url, aws_access_key_id="right", aws_secret_access_key="right-secret")
        right.get_object(Bucket="data", Key="d")["Body"].read()
        wait_in_memory(running, "d")
        before = by_aiohttp(running)
        settle(running)
        running.records.clear()
        assert right.get_object(Bucket="data", Key="d")["Body"].read() == DATA["d"]
        url = right.generate_presigned_url("get_object", {"Bucket": "data", "Key": "d"}).removeprefix(running.url)
        assert exchanged(running, head(f"GET {url} HTTP/1.1").replace(b"localhost", running.url[7:].encode())).endswith(
            DATA["d"]
        )
        assert by_aiohttp(running) == before
        for key, secret in (("right", "wrong-secret"), ("other", "other-secret"), ("nobody", "right-secret")):
            client = s3_client(running.url, aws_access_key_id=key, aws_secret_access_key=secret)
            with pytest.raises(client.exceptions.ClientError) as caught:
                client.get_object(Bucket="data", Key="d")
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        assert b" 403 " in exchanged(running, head("GET /data/d HTTP/1.1"))[:20]
        assert [record.access_key for record in running.records[:2]] == ["right", "right"]


def test_the_end_of_a_request_in_pieces_is_not_a_request(front: RunningFront) -> None:
    """Bytes that look like a plain request but continue another one, in a header or in a body, are never answered."""
    inner = head("GET /data/e HTTP/1.1")
    for begin in (
        b"GET /data/d HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        b"GET /data/d HTTP/1.1\r\nHost: localhost\r\nX-A",
        b"POST /data?delete HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner),
        b"GET /data/d HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(inner),
        head("GET /data/d HTTP/1.1") + b"GET /data/d HTTP/1.1\r\nX-A: ",
    ):
        front.records.clear()
        with socket.create_connection(("127.0.0.1", front.port), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(begin)
            settle(front)  # so that the rest comes as a piece of its own
            found = b""
            with suppress(ConnectionError):  # a refusal closes it, and may do so before the rest has come
                connection.sendall(inner)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    found += piece
        assert DATA["e"] not in found
        assert "e" not in [record.key for record in front.records]


def test_one_connection_may_change_between_both(front: RunningFront) -> None:
    """Plain requests, refused ones and others follow each other on one connection, and each gets its own answer."""
    plain, missing = head("GET /data/d HTTP/1.1"), head("GET /data/missing HTTP/1.1")
    put = b"PUT /data/d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
    before = by_aiohttp(front)
    answer = exchanged(front, plain, missing, plain, plain)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404", b"200", b"200"]
    assert by_aiohttp(front) == before
    answer = raw_exchange(front.port, plain + plain + put)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"403"]


def test_requests_wait_for_a_client_that_takes_its_answer(front: RunningFront) -> None:
    """A client that sends requests without reading gets all answers in order, once it reads; each is logged as complete."""
    count = 30
    with slow_client(front) as connection:
        for number in range(count):
            connection.sendall(head("GET /data/big HTTP/1.1", f"Range: bytes={number}-"))
            settle(front)
        expected = sum(len(DATA["big"]) - number for number in range(count))
        found = bytearray()
        while len(found) < expected + 100 * count:
            found += connection.recv(1 << 20)
    ranges = re.findall(rb"Content-Range: bytes (\d+)-", found)
    assert ranges == [b"%d" % number for number in range(count)]
    wait_records(front, count)
    assert all(record.complete for record in front.records)


def test_a_client_that_takes_nothing_is_disconnected(tmp_path: Path) -> None:
    """The limits for slow clients hold for answers that were in memory, and their memory is given back."""
    limits = GatewayLimits(stall_s_max=0.4, bytes_per_s_min=1000)
    with RunningFront(bucket(tmp_path), limits=limits) as running:
        warm(running)
        with slow_client(running) as connection:
            sent_count = 12  # together more than the operating system buffers
            for _ in range(sent_count):
                connection.sendall(head("GET /data/big HTTP/1.1"))
                settle(running)
            end_s = time.monotonic() + 10
            while not any(not record.complete for record in running.records):
                assert time.monotonic() < end_s
                time.sleep(0.01)
        assert running.front.requests_count == 0


def test_tls_carries_answers_at_hand(tmp_path: Path) -> None:
    """Small and large answers, and a client that sends its requests in advance, get every byte by TLS too."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    targets = ["d", "big", "e", "big"] * 5
    with RunningFront(bucket(tmp_path), tls=server) as running:
        wrapped = client.wrap_socket(slow_client(running), server_hostname="127.0.0.1")
        with wrapped as connection:
            for key in targets:
                connection.sendall(head(f"GET /data/{key} HTTP/1.1"))
                assert answer_of(connection).endswith(DATA[key])
            for key in set(targets):
                wait_in_memory(running, key)
            settle(running)
            running.records.clear()
            for key in targets:
                connection.sendall(head(f"GET /data/{key} HTTP/1.1"))
                assert answer_of(connection).endswith(DATA[key])
            for key in targets:
                connection.sendall(head(f"GET /data/{key} HTTP/1.1"))
            for key in targets:
                assert answer_of(connection).endswith(DATA[key])
        wait_records(running, 2 * len(targets))
        assert all(record.complete for record in running.records)


def test_a_client_that_leaves_ends_its_answer(front: RunningFront) -> None:
    """A connection that is reset while an answer leaves is logged as incomplete, once, and nothing of it remains."""
    with slow_client(front) as connection:
        for _ in range(12):
            connection.sendall(head("GET /data/big HTTP/1.1"))
            settle(front)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end_s = time.monotonic() + 10
    while front.front.connections_count:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert [record.complete for record in front.records].count(False) == 1
    assert front.front.requests_count == 0


def test_draining_finishes_an_answer_that_is_leaving(tmp_path: Path) -> None:
    """A client that is still taking an answer gets all of it when the gateway stops, and then the end of the connection."""
    with RunningFront(bucket(tmp_path)) as running:
        warm(running)
        with slow_client(running) as connection:
            count = 0
            end_s = time.monotonic() + 10
            while not running.front.requests_count:
                assert time.monotonic() < end_s
                connection.sendall(head("GET /data/big HTTP/1.1"))
                count += 1
                settle(running)
            drained: list[bool] = []
            thread = threading.Thread(target=lambda: drained.append(running.call(lambda: running.front.drain(10))))
            thread.start()
            size = 0
            while piece := connection.recv(1 << 20):
                size += len(piece)
            thread.join()
        assert drained == [True]
        assert size > count * len(DATA["big"])


def test_a_long_answer_outlasts_the_limit_for_idle_connections(tmp_path: Path) -> None:
    """A connection whose client takes a long answer slowly is not idle, although aiohttp has no request of it."""
    data = {"long": bytes(24 << 20)}
    store = Cached(MemoryStore(data), CacheConfig(tmp_path / "cache", 64 << 20, metadata_ttl_s=3600))
    with RunningFront(UpstreamBucket("data", store), limits=GatewayLimits(idle_s_max=0.2)) as running:
        with slow_client(running) as connection:
            connection.sendall(head("GET /data/long HTTP/1.1"))
            size, slow_until_s = 0, time.monotonic() + 1
            while size < len(data["long"]):
                if time.monotonic() < slow_until_s:
                    time.sleep(0.1)
                piece = connection.recv(128 << 10)
                assert piece, f"the answer ended after {size} bytes"
                size += len(piece)
        wait_records(running, 1)
        assert by_aiohttp(running) == 0
