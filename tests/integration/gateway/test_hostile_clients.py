"""Clients that break HTTP, are slow, or leave: each has a defined answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from fronts import RunningFront, raw_exchange, s3_client
from penstock.errors import ChecksumError, DeadlineError
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.config import GatewayLimits
from penstock.gateway.http.access_log import AccessRecord, as_json, as_line
from penstock.gateway.objects import Answer, ObjectHead, S3Error
from penstock.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.types import Buffer, ByteRange, ListPage, Page

pytestmark = pytest.mark.server

DATA = b"0123456789" * 10
BIG = bytes(64 << 20)
HOST = b"Host: localhost\r\n"
GET = b"GET /data/d HTTP/1.1"
CHUNKED = b"0\r\n\r\n"


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    """A front with small limits on heads."""
    limits = GatewayLimits(header_bytes_max=4096, body_bytes_max=1024)
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": DATA})), limits=limits) as running:
        yield running


def request(line: bytes, *headers: bytes, body: bytes = b"", close: bool = True) -> bytes:
    """A request as bytes."""
    more = b"".join(header + b"\r\n" for header in headers)
    return line + b"\r\n" + HOST + more + (b"Connection: close\r\n" if close else b"") + b"\r\n" + body


def statuses(answer: bytes) -> list[int]:
    """Statuses of all answers on a connection."""
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] ([0-9]{3}) ", answer)]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /data/d HTTP/1.1\r\n\r\n", [400]),
        (b"GET /data/d HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", [400]),
        (b"GET /data/d HTTP/1.1\nHost: localhost\n\n", [400]),
        (b"GET /data/d HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n", [400]),
        (b"GET /data/d HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n", [400]),
        (b"GET /data/d HTTP/1.1\r\nHost : localhost\r\n\r\n", [400]),
        (b"GET /data/d HTTP/9.9\r\nHost: localhost\r\n\r\n", [400]),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
        (b"NONSENSE\r\n\r\n", [400]),
        (request(b"GET /data/%zz HTTP/1.1"), [400]),
        (request(b"GET /data/%00 HTTP/1.1"), [400]),
        (request(b"GET /data/a%ff HTTP/1.1"), [400]),
        (request(b"GET /data/\xff\xfe HTTP/1.1"), [400]),
        (request(b"GET /data/../../etc/passwd HTTP/1.1"), [404]),
        (request(b"GET /../data/d HTTP/1.1"), [404]),
        (request(b"GET /data/%2e%2e/d HTTP/1.1"), [404]),
        (request(b"GET * HTTP/1.1"), [400]),
        (request(b"OPTIONS * HTTP/1.1"), [400]),
        (request(b"TRACE /data/d HTTP/1.1"), [405]),
        (request(b"PATCH /data/d HTTP/1.1"), [405]),
        (request(b"GET /data/d?" + b"a=1&" * 500 + b" HTTP/1.1"), [400]),
        (request(b"GET /data/" + b"k" * 1025 + b" HTTP/1.1"), [400]),
        (request(b"GET /data/" + b"k" * 9000 + b" HTTP/1.1"), [400]),
        (request(b"GET /data/d HTTP/1.1", b"X-Long: " + b"v" * 9000), [400]),
        (request(b"GET /data/d HTTP/1.1", *(b"X-%d: %s" % (n, b"v" * 100) for n in range(60))), [400]),
        (request(b"GET /data/d HTTP/1.1", *(b"X-%d: v" % n for n in range(200))), [400]),
        (request(b"POST /data?delete HTTP/1.1", b"Content-Length: 5", b"Content-Length: 6", body=b"12345"), [400]),
        (request(b"POST /data?delete HTTP/1.1", b"Content-Length: 5, 5", body=b"12345"), [400]),
        (request(b"POST /data?delete HTTP/1.1", b"Content-Length: -1"), [400]),
        (request(b"POST /data?delete HTTP/1.1", b"Content-Length: +5", body=b"12345"), [400]),
        (
            request(
                b"POST /data?delete HTTP/1.1",
                b"Content-Length: 4",
                b"Transfer-Encoding: chunked",
                body=b"0\r\n\r\nGET /data/d HTTP/1.1\r\nHost: localhost\r\n\r\n",
            ),
            [400],
        ),
        (
            request(
                b"POST /data?delete HTTP/1.1",
                b"Transfer-Encoding: xchunked",
                body=b"0\r\n\r\nGET /data/d HTTP/1.1\r\nHost: localhost\r\n\r\n",
            ),
            [400],
        ),
        *(
            (line + HOST + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + CHUNKED + request(GET), [400])
            for line, *headers in [
                (b"POST /data?delete HTTP/1.0\r\n", b"Transfer-Encoding: chunked", b"Connection: keep-alive"),
                (b"GET /data/d HTTP/1.0\r\n", b"Transfer-Encoding: chunked", b"Connection: keep-alive"),
                (b"POST /data?delete HTTP/1.1\r\n", b"Transfer-Encoding: identity, chunked"),
                (b"POST /data?delete HTTP/1.1\r\n", b"Transfer-Encoding: gzip, chunked"),
                (b"POST /data?delete HTTP/1.1\r\n", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
                (b"POST /data?delete HTTP/1.1\r\n", b"Transfer-Encoding:", b"Content-Length: %d" % len(CHUNKED)),
                (b"POST /data?delete HTTP/1.1\r\n", b"Transfer-Encoding:", b" chunked"),
                (b"POST /data?delete HTTP/1.1\r\n", b"X-A: a", b" Content-Length: %d" % len(CHUNKED)),
                (b"POST /data?delete HTTP/1.1\r\n", b"X-A: a\nContent-Length: %d" % len(CHUNKED)),
                (b"POST /data?delete HTTP/1.1\r\n", *[b"Content-Length: %d" % len(CHUNKED)] * 2),
            ]
        ),
        (request(b"GET /data/d HTTP/1.1", b"X-A: a\x00b"), [400]),
        (request(b"GET /data/d HTTP/1.1", b"X-A: a\rb"), [400]),
    ],
)
def test_what_is_not_a_proper_request_is_refused(front: RunningFront, sent: bytes, expected: list[int]) -> None:
    """One refusal, which is an error document with a request ID, and nothing of the rest is taken for a request."""
    answer = raw_exchange(front.port, sent)
    assert statuses(answer) == expected
    assert b"<Error><Code>" in answer
    assert b"x-amz-request-id: " in answer
    assert b"Traceback" not in answer


def test_pipelined_requests_are_answered_in_order(front: RunningFront) -> None:
    """Several requests in one packet, one of them refused, keep the connection and their order."""
    answer = raw_exchange(
        front.port,
        request(b"GET /data/d HTTP/1.1", b"Range: bytes=0-3", close=False)
        + request(b"HEAD /data/d HTTP/1.1", close=False)
        + request(b"GET /data/none HTTP/1.1", close=False)
        + request(b"GET /data/d HTTP/1.1", b"If-None-Match: *", close=False)
        + request(b"GET /data/d HTTP/1.1", b"Range: bytes=4-5"),
    )
    assert statuses(answer) == [206, 200, 404, 304, 206]
    assert answer.endswith(b"\r\n\r\n45")


def test_an_offer_of_another_protocol_is_declined(front: RunningFront) -> None:
    """The answer is that of HTTP/1.1, and the connection is closed, because aiohttp reads no further request from it."""
    answer = raw_exchange(front.port, request(GET, b"Upgrade: h2c", b"Connection: Upgrade", close=False))
    assert statuses(answer) == [200]
    assert b"Connection: close\r\n" in answer
    assert answer.endswith(DATA)


def test_http_1_0_gets_a_length(front: RunningFront) -> None:
    """A client of HTTP/1.0 needs no host, gets a length, and its connection is closed."""
    answer = raw_exchange(front.port, b"GET /data/d HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200")
    assert b"Content-Length: 100\r\n" in answer
    assert answer.endswith(DATA)


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_bodies_that_are_not_streamed_have_a_bound(front: RunningFront, coding: str) -> None:
    """A body beyond the limit is refused, whether it says its length or not."""
    taken = Taking()
    with RunningFront(taken, limits=GatewayLimits(body_bytes_max=1024)) as running:
        if coding == "length":
            sent = request(b"POST /taking?delete HTTP/1.1", b"Content-Length: 1025", body=b"x" * 1025)
        else:
            body = b"401\r\n" + b"x" * 1025 + b"\r\n0\r\n\r\n"
            sent = request(b"POST /taking?delete HTTP/1.1", b"Transfer-Encoding: chunked", body=body)
        answer = raw_exchange(running.port, sent)
    assert statuses(answer) == [400]
    assert b"MaxMessageLengthExceeded" in answer


def test_a_body_is_asked_for_only_when_it_is_wanted() -> None:
    """A client that waits for 100 Continue gets it when somebody reads; a refusal instead closes the connection."""
    expecting = (b"Expect: 100-continue", b"Content-Length: 3")
    with RunningFront(Taking(), UpstreamBucket("data", MemoryStore({}))) as running:
        for bucket, first in ((b"taking", b"HTTP/1.1 100 "), (b"data", b"HTTP/1.1 403 ")):
            with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
                connection.sendall(request(b"PUT /" + bucket + b"/k HTTP/1.1", *expecting, close=False))
                answer = connection.recv(1 << 16)
                assert answer.startswith(first)
                if bucket == b"taking":
                    connection.sendall(b"abc")
                    assert b"HTTP/1.1 200" in connection.recv(1 << 16)
                else:
                    assert b"Connection: close" in answer


class Taking:
    """A bucket that reads every body, and whose objects come in the pieces, errors and pauses in seconds that a test says."""

    name = "taking"
    created_s = 0.0

    def __init__(self, *pieces: bytes | Exception | float, size_bytes: int | None = None) -> None:
        self.pieces = pieces
        self.size_bytes = size_bytes
        self.closed = threading.Event()

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object, after it was produced."""
        size_bytes = await self.wait_size_bytes()
        return ObjectHead(key=request.key, size_bytes=size_bytes, etag='"t"', last_modified_s=0.0)

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> Taking:
        """Open an object."""
        self.head_now = ObjectHead(key=request.key, size_bytes=self.size_bytes, etag='"t"', last_modified_s=0.0)
        opened = Opened()
        opened.head, opened.taking = self.head_now, self
        return opened  # type: ignore[return-value]

    async def wait_size_bytes(self) -> int:
        """Size of all pieces."""
        return sum(len(piece) for piece in self.pieces if isinstance(piece, bytes))

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Refuse."""
        raise S3Error("NotImplemented", "no list", status=501)

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Read the body."""
        return Answer(headers={"x-length": str(sum([len(piece) async for piece in body]))})

    async def close(self) -> None:
        """Nothing to release."""


class Opened:
    """An object of ``Taking`` that is being read."""

    head: ObjectHead
    taking: Taking

    async def wait_size_bytes(self) -> int:
        """Size of all pieces."""
        size_bytes = await self.taking.wait_size_bytes()
        self.head = ObjectHead(key="k", size_bytes=size_bytes, etag='"t"', last_modified_s=0.0)
        return size_bytes

    async def read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        """Yield the pieces, or their part in a range."""
        whole = b""
        for piece in self.taking.pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            whole += piece
            if span is None:
                yield piece
                await asyncio.sleep(0)
        if span is not None:
            yield whole[span.start : span.end]

    async def close(self) -> None:
        """Tell the test."""
        self.taking.closed.set()


def received(port: int, sent: bytes) -> tuple[bytes, bool]:
    """All that came, and whether the connection was reset."""
    found = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            return bytes(found), True
    return bytes(found), False


def test_an_object_of_unknown_size_streams_in_chunks() -> None:
    """A plain GET gets chunks; ranges, HEAD and HTTP/1.0 wait for the size."""
    with RunningFront(Taking(b"abc", b"defg")) as running:
        answer = raw_exchange(running.port, request(b"GET /taking/k HTTP/1.1"))
        assert b"Transfer-Encoding: chunked" in answer
        assert answer.endswith(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        answer = raw_exchange(running.port, request(b"GET /taking/k HTTP/1.1", b"Range: bytes=-2"))
        assert b"Content-Range: bytes 5-6/7\r\n" in answer
        assert answer.endswith(b"\r\n\r\nfg")
        answer = raw_exchange(running.port, b"GET /taking/k HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b"Content-Length: 7\r\n" in answer
        assert answer.endswith(b"\r\n\r\nabcdefg")
        assert b"Content-Length: 7\r\n" in raw_exchange(running.port, request(b"HEAD /taking/k HTTP/1.1"))


@pytest.mark.parametrize(
    ("size_bytes", "error"),
    [
        (None, ChecksumError("secret path /etc/x")),
        (6, ChecksumError("secret path /etc/x")),
        (None, ValueError("secret")),
        (6, ValueError("secret")),
        (100, None),
        (4, None),
    ],
)
def test_a_failure_half_way_is_never_a_whole_answer(
    size_bytes: int | None, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first byte, an error or a wrong length resets the connection; the log says which object."""
    pieces = (b"abc", b"de") if error is None else (b"abc", error)
    with RunningFront(Taking(*pieces, size_bytes=size_bytes)) as running:
        answer, was_reset = received(running.port, request(b"GET /taking/k HTTP/1.1", close=False))
        assert was_reset
        assert not answer.endswith(b"0\r\n\r\n")
        assert not running.records[-1].complete
    assert any("taking/k" in record.getMessage() for record in caplog.records)


def test_a_failure_before_the_first_byte_is_an_error_document(caplog: pytest.LogCaptureFixture) -> None:
    """Errors have S3's codes; neither a path nor a message of the upstream reaches the client."""
    for error, status, code in (
        (DeadlineError("secret /etc/x"), 504, b"GatewayTimeout"),
        (ValueError("secret"), 500, b"InternalError"),
        (S3Error("LambdaTimeout", "too slow", status=400), 400, b"LambdaTimeout"),
    ):
        with RunningFront(Taking(error)) as running:
            answer = raw_exchange(running.port, request(b"GET /taking/k HTTP/1.1"))
            assert statuses(answer) == [status]
            assert b"<Code>" + code + b"</Code>" in answer
            assert b"secret" not in answer
            assert (running.records[0].status, running.records[0].code) == (status, code.decode())
            assert running.call(lambda front=running.front: wait_idle(front))


async def wait_idle(front: Any) -> bool:
    """Wait until no request is being answered."""
    for _ in range(1000):
        if not front.requests_count:
            return True
        await asyncio.sleep(0.01)
    return False


def test_a_client_that_leaves_ends_its_read() -> None:
    """When a client resets the connection half-way, the object is closed and the log says so."""
    bucket = Taking(*[bytes(1 << 20)] * 64)
    with RunningFront(bucket) as running:
        connection = socket.create_connection(("127.0.0.1", running.port))
        connection.sendall(request(b"GET /taking/k HTTP/1.1"))
        connection.recv(1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        assert bucket.closed.wait(10)
        assert running.call(lambda: wait_idle(running.front))
        assert not running.records[0].complete


def closes_within(connection: socket.socket, limit_s: float) -> float:
    """Seconds until the server closes a connection; what it sends meanwhile is dropped."""
    began_s = time.monotonic()
    connection.settimeout(limit_s)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began_s


def test_slow_heads_and_idle_connections_end() -> None:
    """A head that does not end, and a connection on which nothing comes, are closed after their times."""
    limits = GatewayLimits(header_s_max=0.3, idle_s_max=0.6)
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": DATA})), limits=limits) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(b"GET /data/d HTTP/1.1\r\nHost: localhost\r\n")
            assert 0.2 < closes_within(connection, 10) < 5
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            assert 0.4 < closes_within(connection, 10) < 5
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(request(b"HEAD /data/d HTTP/1.1", close=False))
            assert 0.4 < closes_within(connection, 10) < 5
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(request(b"HEAD /data/d HTTP/1.1", close=False) + b"GET /da")
            assert 0.2 < closes_within(connection, 10) < 5


@pytest.mark.parametrize("before", [b"", b"abc", BIG], ids=len)
def test_a_source_that_stalls_is_not_taken_for_a_slow_client(before: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes what there is stays connected, however long its source pauses, and the log accuses nobody."""
    caplog.set_level("INFO", "penstock.gateway")
    with RunningFront(Taking(before, 1.2, b"def"), limits=GatewayLimits(stall_s_max=0.2)) as running:
        answer, was_reset = received(running.port, request(b"GET /taking/k HTTP/1.1"))
    assert not was_reset
    assert answer.endswith(b"3\r\ndef\r\n0\r\n\r\n")
    assert "disconnected" not in caplog.text


@pytest.mark.parametrize(("direction", "verb"), [("takes", "took"), ("sends", "sent")])
def test_clients_that_are_too_slow_are_dropped(direction: str, verb: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes nothing of a body, or sends nothing of one, is disconnected, and the log says how little it did."""
    caplog.set_level("INFO", "penstock.gateway")
    limits = GatewayLimits(stall_s_max=0.4)
    bucket = UpstreamBucket("data", MemoryStore({"big": BIG}))
    with RunningFront(bucket, Taking(), limits=limits) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", running.port))
        if direction == "takes":
            connection.sendall(request(b"GET /data/big HTTP/1.1"))
        else:
            connection.sendall(request(b"PUT /taking/k HTTP/1.1", b"Content-Length: 10", body=b"1"))
        assert running.call(lambda: wait_logged(running))
        assert not running.records[0].complete
        assert running.call(lambda: wait_idle(running.front))
    assert re.search(f"the gateway waited 0.4 s for the client, which {verb} only [0-9]+ bytes", caplog.text)


def test_requests_in_advance_have_a_bound() -> None:
    """The requests that a client sends while it takes no answer are not all read: they would be held in memory."""
    some = request(b"GET /data/big HTTP/1.1", close=False) * 5000
    bound_bytes = 16 << 20  # the buffers of both sockets, and what the front reads
    sent_bytes = 0
    with (
        RunningFront(UpstreamBucket("data", MemoryStore({"big": BIG}))) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=1) as connection,
        suppress(TimeoutError),
    ):
        while sent_bytes < bound_bytes:
            sent_bytes += connection.send(some)
    assert sent_bytes < bound_bytes


async def wait_logged(running: RunningFront) -> bool:
    """Wait until a request is in the log."""
    for _ in range(1000):
        if running.records:
            return True
        await asyncio.sleep(0.01)
    return False


def test_there_are_at_most_so_many_connections() -> None:
    """One connection too many is told to come back, and a place that becomes free is used."""
    limits = GatewayLimits(connections_max=2)
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": DATA})), limits=limits) as running:
        kept = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
        for connection in kept:
            connection.sendall(request(b"HEAD /data/d HTTP/1.1", close=False))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        answer = raw_exchange(running.port, b"")
        assert statuses(answer) == [503]
        assert b"SlowDown" in answer
        for connection in kept:
            connection.close()
        assert running.call(lambda: wait_connections(running.front, 0))
        assert statuses(raw_exchange(running.port, request(b"HEAD /data/d HTTP/1.1"))) == [200]


async def wait_connections(front: Any, count: int) -> bool:
    """Wait until so many connections are open."""
    for _ in range(1000):
        if front.connections_count == count:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("finishes", [True, False])
def test_draining_finishes_what_is_under_way(finishes: bool) -> None:
    """While it drains, a front accepts nothing and finishes transfers; after the time the others are broken off."""
    with RunningFront(UpstreamBucket("data", MemoryStore({"big": BIG}))) as running, ExitStack() as stack:
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        idle.sendall(request(b"HEAD /data/big HTTP/1.1", close=False))
        idle.recv(1 << 16)
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(request(b"GET /data/big HTTP/1.1", close=False))
            found = len(connection.recv(1 << 16))
            drained = asyncio.run_coroutine_threadsafe(running.front.drain(10.0 if finishes else 0.2), running._loop)
            assert closes_within(idle, 10) < 5
            if not finishes:
                assert drained.result(20) is False
                return
            connection.settimeout(10)
            while piece := connection.recv(1 << 20):
                found += len(piece)
            assert found > len(BIG)
            assert drained.result(20) is True
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", running.port))


def test_many_clients_leave_nothing(tmp_path: Any) -> None:
    """After clients of all kinds, no request, connection or task is left."""
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": DATA, "big": BIG}))) as running:
        client = s3_client(running.url)
        for _ in range(3):
            assert client.get_object(Bucket="data", Key="d")["Body"].read() == DATA
            client.get_object(Bucket="data", Key="big")["Body"].close()
            raw_exchange(running.port, b"garbage\r\n\r\n")
        client.close()
        assert running.call(lambda: wait_idle(running.front))
        assert running.call(lambda: wait_connections(running.front, 0))


def test_the_access_log_is_one_line_without_secrets() -> None:
    """Control characters in keys and agents stay inside their field; JSON has all fields."""
    with RunningFront(UpstreamBucket("data", MemoryStore({"d": DATA}))) as running:
        raw_exchange(
            running.port,
            request(
                b"GET /data/a%0Ab%22?X-Amz-Signature=s3cret&X-Amz-Credential=who&x=1 HTTP/1.1",
                b'User-Agent: "evil" \xe2\x80\xa8 agent',
            ),
        )
        raw_exchange(running.port, request(b"GET /data/d HTTP/1.1", b"User-Agent: good"))
        first, second = running.records
    line = as_line(first)
    assert "\n" not in line
    assert '\\"evil\\"' in line
    assert "s3cret" not in line + as_json(first)
    assert line.endswith(" NoSuchKey")
    assert as_line(second).split()[3:8] == ["GET", '"/data/d"', "200", "100", as_line(second).split()[7]]
    row = json.loads(as_json(second))
    assert (row["method"], row["key"], row["sent_bytes"], row["user_agent"]) == ("GET", "d", 100, "good")
    assert set(row) == {*AccessRecord._fields, "time"}
