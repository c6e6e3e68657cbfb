"""The transport against servers on loopback: pool, TLS, proxies, deadlines, cancelling, closing, odd answers."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pycurl
import pytest

from exchanges import Heard, RawServer, ask, start
from penstock.config import MIB, TransportConfig
from penstock.errors import StoreError
from penstock.memory.buffers import bytes_buffer
from penstock.memory.file_landings import FileLanding, LandingFile
from penstock.transport import CANCELLED, CLOSED, LATE_BODY, LATE_FIRST_BYTE, LATE_TOTAL, OVERLONG, engine
from penstock.types import Landing
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

BODY = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _fresh_engine() -> Any:
    engine.close()
    yield
    engine.close()


@pytest.fixture
def server() -> Any:
    with FaultyServer({"a": BODY, "big": BODY * 400}) as running:
        yield running


def url(server: FaultyServer, key: str = "a") -> str:
    return f"{server.endpoint_url}/bucket/{key}"


# ── pool ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_is_used_again(server: FaultyServer) -> None:
    """Exchanges one after the other share one connection, and only the first reports connecting."""
    config = TransportConfig()
    answers = [ask(url(server), config=config) for _ in range(20)]
    assert [body for _, body in answers] == [BODY] * 20
    assert server.connections_total == 1
    assert answers[0][0].connect_s > 0
    assert all(answer.connect_s == 0 for answer, _ in answers[1:])


def test_the_pool_is_bounded(server: FaultyServer) -> None:
    """Never more connections than ``connections_max``, and all exchanges get through."""
    config = TransportConfig(connections_max=3)
    sinks = [start(url(server), config=config)[1] for _ in range(60)]
    for sink in sinks:
        assert sink.wait().status == 200
        assert sink.body == BODY
    assert server.connections_total <= 3


def test_waiting_for_a_connection_is_not_a_late_answer(server: FaultyServer) -> None:
    """The first-byte and connect deadlines count from the sending of a request, not from its wait for the pool."""
    config = TransportConfig(connections_max=1, first_byte_s_max=1.2, connect_s_max=1.0)
    server.fail("delay", times=None, seconds=0.45)
    sinks = [start(url(server), config=config)[1] for _ in range(6)]
    assert [sink.wait().curl_error for sink in sinks] == [0] * 6


def test_a_connection_that_the_server_closed_is_replaced(server: FaultyServer) -> None:
    """An idle connection that went away costs a new connection, not an error."""
    config = TransportConfig()
    for _ in range(5):
        assert ask(url(server), config=config)[1] == BODY
        server.fail("close", times=1, after_bytes=5)
        assert ask(url(server), config=config)[0].curl_error != 0


def test_threads_share_the_work(server: FaultyServer) -> None:
    """``threads_count`` loops run, and exchanges are dealt to all of them."""
    config = TransportConfig(threads_count=2)
    assert all(ask(url(server), config=config)[1] == BODY for _ in range(6))
    assert {thread.name for thread in threading.enumerate()} >= {"penstock-loop-0", "penstock-loop-1"}
    assert server.connections_total == 2


# ── TLS and proxies ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_tls_needs_the_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate is accepted with its authority named, by config or ``AWS_CA_BUNDLE``, and refused without."""
    with FaultyServer({"a": BODY}, tls=True) as server:
        assert ask(url(server), config=TransportConfig(ca_bundle=server.ca_bundle))[1] == BODY
        answer, body = ask(url(server))
        assert (answer.status, body) == (0, b"")
        assert "certificate" in answer.reason
        assert server.ca_bundle is not None
        monkeypatch.setenv("AWS_CA_BUNDLE", server.ca_bundle)
        assert ask(url(server), config=TransportConfig())[1] == BODY
        monkeypatch.delenv("AWS_CA_BUNDLE")
        assert ask(url(server), config=TransportConfig(verify_tls=False))[1] == BODY


def test_a_wrong_host_name_is_refused() -> None:
    """A certificate of the right authority but for another name is refused."""
    with FaultyServer({"a": BODY}, tls=True) as server:
        name = url(server).replace("127.0.0.1", "127.0.0.2")
        assert ask(name, config=TransportConfig(ca_bundle=server.ca_bundle))[0].status == 0


def test_a_broken_bundle_is_an_error_not_a_dead_engine(server: FaultyServer, tmp_path: Any) -> None:
    """A bundle that does not exist, or is no string, ends that exchange alone."""
    for bundle in (str(tmp_path / "none.pem"), tmp_path / "path.pem"):
        answer, _ = ask("https://127.0.0.1:1/", config=TransportConfig(ca_bundle=bundle))
        assert answer.curl_error != 0
    assert ask(url(server))[1] == BODY


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_proxy_variables_are_followed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """``HTTP_PROXY`` in either spelling sends requests through the proxy, which sees the whole URL."""
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nproxy") as proxy:
        monkeypatch.setenv(name, proxy.url)
        assert ask("http://store.invalid/bucket/a", config=TransportConfig())[1] == b"proxy"
        assert proxy.heads[0].startswith(b"GET http://store.invalid/bucket/a HTTP/1.1")


def test_no_proxy_is_followed(monkeypatch: pytest.MonkeyPatch, server: FaultyServer) -> None:
    """Hosts in ``NO_PROXY`` are asked directly, also when the proxy is given by ``HTTP_PROXY``."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    assert ask(url(server), config=TransportConfig())[1] == BODY


def test_a_proxy_can_be_given(server: FaultyServer) -> None:
    """``TransportConfig(proxy=...)`` is used."""
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as proxy:
        ask(url(server), config=TransportConfig(proxy=proxy.url))
        assert len(proxy.heads) == 1
    assert server.requests == []


# ── deadlines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_connect_deadline() -> None:
    """A host that does not answer the TLS handshake is given up after ``connect_s_max``."""
    with RawServer(None) as silent:
        started_s = time.monotonic()
        answer, _ = ask(silent.url.replace("http:", "https:"), config=TransportConfig(connect_s_max=0.3))
        assert answer.curl_error > 0
        assert time.monotonic() - started_s < 2


def test_first_byte_deadline(server: FaultyServer) -> None:
    """A server that does not begin to answer is given up after ``first_byte_s_max``."""
    server.fail("stall_head", times=None)
    answer, _ = ask(url(server), config=TransportConfig(first_byte_s_max=0.3))
    assert answer.curl_error == LATE_FIRST_BYTE
    assert "0.3 s" in answer.reason


def test_stall_deadline(server: FaultyServer) -> None:
    """A body that stops, or drips below the bound, is given up after ``stall_s_max``, with what had arrived."""
    config = TransportConfig(stall_s_max=0.4, stall_bytes_per_s=2000)
    server.fail("stall", times=1, after_bytes=100)
    answer, body = ask(url(server), config=config)
    assert (answer.curl_error, body) == (LATE_BODY, BODY[:100])
    server.fail("drip", times=1, bytes_per_s=200)
    answer, body = ask(url(server), config=config)
    assert answer.curl_error == LATE_BODY
    assert BODY.startswith(body)


def test_total_deadline(server: FaultyServer) -> None:
    """No exchange outlives ``total_s_max``, however steady it is."""
    server.fail("drip", times=None, bytes_per_s=1000)
    answer, _ = ask(url(server), config=TransportConfig(total_s_max=0.5, stall_bytes_per_s=0))
    assert answer.curl_error == LATE_TOTAL


# ── cancelling and closing ──────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_before_start(server: FaultyServer) -> None:
    """A transfer cancelled at once ends as cancelled, exactly once."""
    for _ in range(50):
        transfer, sink = start(url(server))
        transfer.cancel()
        transfer.cancel()
        assert sink.wait().curl_error in (CANCELLED, 0)
    engine.close()
    assert len(sink.answers) == 1


def test_cancel_inside_the_body(server: FaultyServer) -> None:
    """A transfer cancelled inside its body ends soon, and the next exchange works."""
    server.fail("stall", times=1, match="big", after_bytes=300_000)
    transfer, sink = start(url(server, "big"))
    assert sink.begun.wait(10)
    transfer.cancel()
    assert sink.wait(2).curl_error == CANCELLED
    assert ask(url(server))[1] == BODY


def test_cancel_after_the_end(server: FaultyServer) -> None:
    """Cancelling what has ended changes nothing."""
    transfer, sink = start(url(server))
    sink.wait()
    transfer.cancel()
    assert ask(url(server))[1] == BODY
    assert [answer.curl_error for answer in sink.answers] == [0]


def test_submitting_never_blocks() -> None:
    """10 000 submissions to a server that never answers return at once; closing ends them all."""
    with RawServer(None) as silent:
        started_s = time.monotonic()
        transfers = [start(silent.url, config=TransportConfig(connections_max=4)) for _ in range(3000)]
        assert time.monotonic() - started_s < 3
        engine.close()
        assert all(sink.wait(5).curl_error == CLOSED for _, sink in transfers)


def test_closing_leaves_nothing(server: FaultyServer, nothing_left: Any) -> None:
    """``engine.close()`` leaves no thread, socket or descriptor, with transfers in flight; the next use starts anew."""
    server.fail("stall", times=None, match="big", after_bytes=10)
    with nothing_left():
        assert ask(url(server))[1] == BODY
        sinks = [start(url(server, "big"))[1] for _ in range(5)]
        assert all(sink.begun.wait(10) for sink in sinks)
        engine.close()
        assert [sink.wait(1).curl_error for sink in sinks] == [CLOSED] * 5
        engine.close()
    assert ask(url(server))[1] == BODY


def test_who_is_told_of_the_end_does_not_start_the_engine_again(server: FaultyServer, nothing_left: Any) -> None:
    """A sink that asks for more when its exchange ends by ``close()`` is told the same again; no new thread begins."""
    server.fail("stall", times=None, match="big", after_bytes=10)
    more: list[Heard] = []

    class Insistent(Heard):
        def on_end(self, answer: Any) -> None:
            super().on_end(answer)
            if len(more) < 100:
                more.append(start(url(server, "big"), sink=Insistent())[1])

    with nothing_left():
        first = start(url(server, "big"), sink=Insistent())[1]
        assert first.begun.wait(10)
        engine.close()
        assert first.wait(1).curl_error == CLOSED
        assert [sink.wait(1).curl_error for sink in more] == [CLOSED] * 100


def test_an_idle_handle_keeps_nothing_alive(server: FaultyServer) -> None:
    """What a finished exchange wrote to, and who heard of it, are free although the connection stays open."""
    import gc
    import weakref

    class Memory(bytearray):
        pass

    memory = Memory(len(BODY))
    sink = Heard(Landing(memory, 0, len(BODY)))
    gone = [weakref.ref(memory), weakref.ref(sink)]
    assert start(url(server), sink=sink)[1].wait().status == 200
    assert sink.body == BODY
    del memory, sink
    ask(url(server, "b"), config=TransportConfig())  # the loop's thread has left the first exchange
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert server.connections_count == 1


def test_a_callback_that_fails_does_not_end_the_others(server: FaultyServer) -> None:
    """A body refused by ``on_head`` ends its own exchange with that refusal; others go on."""

    def refuse(*_: object) -> None:
        raise StoreError("not wanted")

    sinks = [start(url(server), sink=Heard(on_head=refuse if index % 2 else None))[1] for index in range(10)]
    for index, sink in enumerate(sinks):
        answer = sink.wait()
        assert isinstance(answer.refused, StoreError) == bool(index % 2)
        assert sink.body == (b"" if index % 2 else BODY)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_timings_and_request_id(server: FaultyServer) -> None:
    """An answer tells its times, in order and in seconds, and the server's request id."""
    before_s = time.monotonic()
    server.fail("delay", times=1, seconds=0.2)
    answer, _ = ask(url(server))
    assert before_s <= answer.start_s <= time.monotonic()
    assert 0 <= answer.queued_s < 0.2
    assert 0.15 < answer.first_byte_s <= answer.total_s < 5
    assert answer.headers[b"x-amz-request-id"].startswith(b"REQ")
    assert answer.received_bytes == len(BODY)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01 this is not HTTP \xff\r\n\r\n",
        b"HTTP/9.9 banana\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nbad\r\n",
        b"",
        b"HTTP/1.1",
    ],
)
def test_garbage_ends_with_an_error(server: FaultyServer, answer: bytes) -> None:
    """Bytes that are no HTTP answer end their exchange with libcurl's error; the engine lives on."""
    with RawServer(answer) as raw:
        ended, _ = ask(raw.url)
    assert ended.curl_error > 0
    assert ended.reason
    assert ask(url(server))[1] == BODY


def test_headers_that_are_none_are_skipped() -> None:
    """Lines without a colon or a name are not headers; names are lower case, values stripped, the last one counts."""
    head = b'HTTP/1.1 200 OK\r\n\xff\xfe no colon\r\n: no name\r\nETag:   "x"  \r\nX-A: 1\r\nx-a: 2\r\n\r\n'
    with RawServer(head) as server:
        answer, _ = ask(server.url)
    if answer.curl_error == 0:  # libcurl may refuse the whole answer instead
        assert answer.headers[b"etag"] == b'"x"'
        assert answer.headers[b"x-a"] == b"2"
        assert b"" not in answer.headers


@pytest.mark.parametrize("key", ["a", "big"])
def test_a_body_of_unknown_length(server: FaultyServer, key: str) -> None:
    """A chunked body arrives whole, whatever its size; one that is cut short is an error."""
    server.fail("chunked", times=1)
    answer, body = ask(url(server, key))
    assert (answer.curl_error, body) == (0, server.objects[key])
    server.fail("chunked_cut", times=1)
    assert ask(url(server, key))[0].curl_error > 0


def test_a_body_that_ends_with_its_connection() -> None:
    """Without a length and without chunks, the body is all that comes until the server closes."""
    with RawServer(b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\n" + BODY * 20) as server:
        answer, body = ask(server.url)
    assert (answer.curl_error, body) == (0, BODY * 20)


def test_a_name_is_looked_up(server: FaultyServer) -> None:
    """A host name becomes addresses on a thread of its own; one that does not exist is an error that says so."""
    assert ask(url(server).replace("127.0.0.1", "localhost"))[1] == BODY
    answer, _ = ask("http://no-such-host.invalid/x")
    assert answer.curl_error == pycurl.E_COULDNT_RESOLVE_HOST
    assert "no-such-host.invalid" in answer.reason


def test_the_next_address_is_tried(server: FaultyServer, monkeypatch: Any) -> None:
    """Of a name with several addresses, those that refuse are passed over. The name service is a stand-in."""
    port = int(server.endpoint_url.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (9, 8, 1)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: found)
    assert ask(f"http://three.test:{port}/bucket/a")[1] == BODY


def test_a_head_in_many_pieces() -> None:
    """A head larger than one read is put together."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Long: " + b"x" * 40_000 + b"\r\n\r\nhello"
    with RawServer(head) as raw:
        assert ask(raw.url)[1] == b"hello"


@pytest.mark.parametrize("direct", [False, True])
def test_an_overlong_body_never_leaves_its_landing(server: FaultyServer, direct: bool) -> None:
    """A body longer than its landing fills it and no byte beside it, also in an mmap and of unknown length."""
    size = 2 * MIB
    for kind in (None, "chunked"):
        if kind:
            server.fail(kind, times=1, match="big")
        buffer: Any = mmap.mmap(-1, size + 8192)
        landing = Landing(buffer, 4096, 4096 + size, direct=buffer if direct else None)
        answer, _ = ask(url(server, "big"), landing=landing)
        assert answer.curl_error in (OVERLONG, 63, 23)
        assert landing.offset <= landing.end
        assert buffer[:4096] == bytes(4096)
        assert buffer[4096 + size :] == bytes(4096)
        assert server.objects["big"].startswith(buffer[4096 : landing.offset])


@pytest.mark.parametrize("sent_bytes", [100, 3000])
def test_an_overlong_body_that_breaks_is_broken(sent_bytes: int) -> None:
    """A connection that ends before the landing is full is an error, also where the body would have been longer."""
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + bytes(sent_bytes)) as server:
        landing = Landing(bytearray(2000), 0, 2000)
        answer, _ = ask(server.url, landing=landing)
    assert answer.curl_error == (OVERLONG if sent_bytes >= 2000 else pycurl.E_PARTIAL_FILE)
    assert landing.offset == min(sent_bytes, 2000)


def test_a_body_for_a_file_that_breaks_is_broken(tmp_path: Path) -> None:
    """A connection that ends before its file is complete is an error, and is not used again."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    file = LandingFile(fd, tmp_path / "f")
    os.close(fd)
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + bytes(3000)) as server:
        landing = FileLanding(file, 0, 9000)
        answer, _ = ask(server.url, landing=landing)
    assert (answer.curl_error, landing.offset) == (pycurl.E_PARTIAL_FILE, 3000)


def test_an_error_document_never_becomes_the_body(server: FaultyServer) -> None:
    """The body of an answer that is not 2xx is ``error_body``; the landing stays where it was."""
    for direct in (False, True):
        buffer = mmap.mmap(-1, 2 * MIB)
        landing = Landing(buffer, 0, 2 * MIB, direct=buffer if direct else None)
        server.fail("slow_down", times=1)
        answer, body = ask(url(server, "big"), landing=landing)
        assert answer.status == 503
        assert b"SlowDown" in answer.error_body
        assert (body, landing.offset) == (b"", 0)


def test_bodies_are_sent_whole(server: FaultyServer) -> None:
    """PUT sends its body byte for byte, of any size, and 0 bytes."""
    filled = bytes_buffer(len(BODY) * 400)
    filled[:] = BODY * 400
    for data in (
        b"", b"x", BODY * 400, filled, filled[1000:-1000], bytearray(BODY * 400), memoryview(BODY * 400)[7:], np.arange(9)
    ):  # fmt: skip
        answer, _ = ask(url(server, "new"), "PUT", body=data, headers=["Expect:"])
        assert answer.status == 200
        assert server.objects["new"] == bytes(data)
        assert "content-type" not in server.requests[-1].headers  # libcurl would say that it is a form
    assert ask(url(server, "new"), "DELETE")[0].status == 204
    assert ask(url(server, "a"), "HEAD")[0].headers[b"content-length"] == str(len(BODY)).encode()


class Uploads(RawServer):
    """A server of uploads: `serve` has each connection, by number, and gives what arrived of its body.

    Attributes:
        bodies: What `serve` gave, connection by connection.
    """

    def __init__(self, serve: Callable[[int, socket.socket], bytes]) -> None:
        super().__init__(None)
        self._serve = serve
        self.bodies: list[bytes] = []

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                connection, _ = self._listener.accept()
                with connection:
                    self.bodies.append(self._serve(number, connection))


def received(connection: socket.socket, *, slow_bytes: int = 0) -> bytes:
    """The body of one upload, the first `slow_bytes` at 10 MB/s."""
    head, data, size_bytes = b"", bytearray(), None
    while size_bytes is None or len(data) < size_bytes:
        piece = connection.recv(256 * 1024)
        if not piece:
            break
        time.sleep(len(piece) / 10e6 if len(data) < slow_bytes else 0)
        data += piece
        if size_bytes is None and b"\r\n\r\n" in data:
            head, _, data = data.partition(b"\r\n\r\n")
            size_bytes = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return bytes(data)


UPLOADED = [bytes, bytearray]  # libcurl reads the one where it lies, and is handed copies of the other


@pytest.mark.parametrize("kind", UPLOADED)
def test_a_slow_upload_is_no_silence(kind: type) -> None:
    """Who takes an upload slowly is not given up while bytes go; who takes none of it is."""
    body = kind(BODY * 3200)  # 33 MB, of which some lie in the kernel
    config = TransportConfig(first_byte_s_max=0.6)

    def slowly(_: int, connection: socket.socket) -> bytes:
        data = received(connection, slow_bytes=16 * MIB)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return data

    with Uploads(slowly) as server:
        answer, _ = ask(server.url, "PUT", body=body, headers=["Expect:"], config=config)
    assert (answer.status, server.bodies) == (200, [bytes(body)])
    assert answer.total_s > 2 * config.first_byte_s_max
    stop = threading.Event()
    with Uploads(lambda *_: bytes(stop.wait(10))) as server:
        answer, _ = ask(server.url, "PUT", body=body, headers=["Expect:"], config=config)
        stop.set()
    assert answer.curl_error == LATE_FIRST_BYTE


@pytest.mark.parametrize("kind", UPLOADED)
def test_an_upload_is_sent_again_from_its_beginning(kind: type) -> None:
    """A kept connection that dies under the next request: its body goes over a fresh one, all of it."""
    body = kind(BODY * 10)

    def dying(number: int, connection: socket.socket) -> bytes:
        data = received(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        if number == 0:
            connection.recv(1000)  # of the second one, and ends
        return data

    with Uploads(dying) as server:
        for _ in range(2):
            assert ask(server.url, "PUT", body=body, headers=["Expect:"])[0].status == 200
    assert server.bodies == 2 * [bytes(body)]


def test_a_url_that_cannot_be_asked_is_an_error(server: FaultyServer) -> None:
    """Malformed URLs, other protocols and odd headers end their exchange and nothing else."""
    for bad in (
        "http://",
        "ftp://127.0.0.1/x",
        "http://127.0.0.1:99999/",
        "http://[::1",
        "http://h\x00/",
        "http://\u00fc/\u00e9",
    ):
        answer, _ = ask(bad)
        assert answer.status == 0
        assert answer.curl_error != 0
    assert ask(url(server), headers=["X: \u20ac"])[0].curl_error != 0
    assert ask(url(server))[1] == BODY
