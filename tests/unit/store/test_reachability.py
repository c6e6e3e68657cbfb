"""``Retrying`` and ``Reachability``: operations wait for an endpoint that has answered before, and for no other."""

from __future__ import annotations

import http.server
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import penstock as ps
from penstock.config import RetryConfig
from penstock.errors import CancelledOperationError, ClosedError, StoreError, ThrottledError, UnavailableError
from penstock.store import reachability
from penstock.store.base import Store
from penstock.transport import engine
from penstock.types import Get
from servers.faulty import FaultyServer
from store_contract.support import WatchingSink

pytestmark = pytest.mark.server

Connect = Callable[..., Store]
QUICK = RetryConfig(backoff_s=0.01)
OBJECTS = {"a": b"a", "b": b"b"} | {f"{number:03d}": b"x" * number for number in range(200)}


class OldConnections(http.server.BaseHTTPRequestHandler):
    """Serves ``x`` for every key. A server that has ended goes on serving the connections that it has."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *_: object) -> None:
        pass


class SimpleServer(http.server.ThreadingHTTPServer):
    request_queue_size = 512  # so that the kernel of a busy machine drops none
    block_on_close = False
    daemon_threads = True


@contextmanager
def simple_server(port: int = 0) -> Iterator[int]:
    with SimpleServer(("127.0.0.1", port), OldConnections) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def fill(server: FaultyServer) -> None:
    for key, body in OBJECTS.items():
        server.objects[key] = body


def retries(store: Store) -> Any:
    return store.statistics().inner.inner


@contextmanager
def after(delay_s: float, call: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(delay_s, call)
    timer.start()
    yield
    timer.join()


def test_a_server_that_refuses_connections_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reads end well, and the log has one warning when the wait begins and one line when it ends."""
    monkeypatch.setattr(reachability, "PAUSE_S_MIN", 0.2)
    with FaultyServer(OBJECTS) as server:
        store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=QUICK)
        assert bytes(store.read("a").data) == b"a"
    again = FaultyServer(OBJECTS, port=server.port)
    with after(1.5, again.__enter__):
        found = {blob.key: bytes(blob.data) for blob in store.read_many([*OBJECTS] * 2)}
    again.close()
    assert found == OBJECTS
    assert retries(store).unreachable_s > 0.5
    assert retries(store).given_up_count == 0
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [server.endpoint_url in text for text in texts] == [True, True], texts
    assert "does not answer; waiting for it, for up to 120 s" in texts[0]
    assert "Connection refused" in texts[0]
    assert "answers again, after" in texts[1]
    store.close()


@pytest.mark.parametrize("kind", ["503", "500", "close_head", "reset_head"])
def test_one_operation_probes_for_all_that_wait(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """While 200 reads wait, the server hears one request at a time; when it has recovered, all are served."""
    monkeypatch.setattr(reachability, "PAUSE_S_MIN", 0.5)
    fill(faulty)
    store = connect_faulty(retry=RetryConfig(backoff_s=0.001, attempts_max=2))
    store.read("a")
    faulty.fail(kind, times=None)
    heard: list[int] = []

    def recover() -> None:
        heard.append(len(faulty.requests))
        time.sleep(1)
        heard.append(len(faulty.requests))
        faulty.heal()

    with after(2, recover):
        assert len(list(store.read_many(OBJECTS, ordered=False))) == len(OBJECTS)
    assert 0 <= heard[1] - heard[0] <= 8  # a probe may be sent twice on a kept connection
    assert retries(store).unreachable_s > 1


def test_an_object_that_alone_fails_does_not_wait(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """As long as others are answered, an error of one object is an error after its attempts."""
    fill(faulty)
    faulty.fail("500", times=None, match="b")
    store = connect_faulty(retry=RetryConfig(backoff_s=0.05))
    ended = threading.Event()

    def read_others() -> None:
        while not ended.wait(0.001):
            store.read("a")

    thread = threading.Thread(target=read_others)
    thread.start()
    try:
        store.read("a")
        with pytest.raises(UnavailableError, match="InternalError") as caught:
            store.read("b")
    finally:
        ended.set()
        thread.join()
    assert caught.value.attempts_count == 5
    assert retries(store).unreachable_s == 0


def test_throttling_spends_attempts(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A store that asks to slow down is reached; nothing waits for it beyond the attempts."""
    fill(faulty)
    store = connect_faulty(retry=QUICK)
    store.read("a")
    faulty.fail("slow_down", times=None)
    with pytest.raises(ThrottledError) as caught:
        store.read("b")
    assert caught.value.attempts_count == 5


@pytest.mark.parametrize("kind", ["500", "close_head"])
def test_the_wait_ends_with_the_last_error(
    faulty: FaultyServer, connect_faulty: Connect, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """After ``total_s_max`` the error says how long it was tried; with one attempt, nothing is tried again."""
    fill(faulty)
    store = connect_faulty(retry=RetryConfig(total_s_max=1, backoff_s=0.001))
    once = connect_faulty(retry=RetryConfig(attempts_max=1))
    store.read("a")
    faulty.fail(kind, times=None)
    with pytest.raises(UnavailableError) as caught:
        store.read("b")
    assert caught.value.elapsed_s is not None
    assert 1 <= caught.value.elapsed_s < 3
    assert retries(store).given_up_count == 1
    assert "nothing waits for it any more" in caplog.text
    with pytest.raises(UnavailableError) as caught:
        once.read("b")
    assert caught.value.attempts_count == 1
    faulty.heal()
    assert bytes(store.read("b").data) == b"b"


@pytest.mark.parametrize("how", ["cancel", "close", "close the engine"])
def test_the_wait_can_be_ended_at_once(faulty: FaultyServer, connect_faulty: Connect, how: str) -> None:
    """Cancelling, closing the store and closing the transport end what waits."""
    fill(faulty)
    store = connect_faulty(retry=RetryConfig(backoff_s=0.001))
    store.read("a")
    faulty.fail("500", times=None)
    sinks = [WatchingSink() for _ in range(20)]
    transfers = [store.submit(Get("b"), sink) for sink in sinks]
    while not retries(store).unreachable_s:
        time.sleep(0.01)
    time.sleep(0.3)
    began_s = time.monotonic()
    if how == "cancel":
        for transfer in transfers:
            transfer.cancel()
    elif how == "close":
        store.close()
    else:
        engine.close()
    errors = [sink.wait(5).error for sink in sinks]
    assert time.monotonic() - began_s < 1.5
    assert all(isinstance(error, StoreError) for error in errors)
    if how != "cancel":
        assert any(isinstance(error, ClosedError) for error in errors)
    else:
        assert not any(isinstance(error, ClosedError) for error in errors)
    assert CancelledOperationError  # what waits ends with its last error, what is in flight with this one


CHILD = """
import pickle, sys
store = pickle.load(sys.stdin.buffer)
print("begun", flush=True)
print(bytes(store.read("a").data).decode())
"""


def test_a_process_that_is_started_during_an_outage_waits() -> None:
    """What its parent has reached, a child that unpickles the store waits for; another process has an error."""
    with FaultyServer(OBJECTS) as server:
        store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=QUICK)
        unreached = pickle.dumps(store)
        store.read("a")
        reached = pickle.dumps(store)
    ends = []
    for data in (unreached, reached):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ,
        )
        assert child.stdin is not None
        child.stdin.write(data)
        child.stdin.close()
        child.stdin = None
        ends.append(child)
    failed = ends[0].communicate(timeout=30)
    assert ends[0].returncode == 1
    assert b"Connection refused" in failed[1]
    assert ends[1].poll() is None
    with FaultyServer(OBJECTS, port=server.port):
        assert ends[1].communicate(timeout=30)[0].split() == [b"begun", b"a"]
    store.close()


def test_a_server_that_serves_old_connections_while_it_ends_is_waited_for() -> None:
    """New connections are refused, and a kept one still answers: nothing is an error, for no request is what is wrong."""
    with simple_server() as port:
        store = ps.connect("s3://bucket", endpoint_url=f"http://127.0.0.1:{port}", anonymous=True, retry=QUICK)
        store.read("a")
    with ExitStack() as stack, after(1.5, lambda: stack.enter_context(simple_server(port))):
        assert len(list(store.read_many([*OBJECTS] * 5))) == 5 * len(OBJECTS)
    assert retries(store).given_up_count == 0
    assert retries(store).retried_count > 5
    store.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("scheme", "host", "proxy", "expected"),
    [
        ("http", "127.5.4.3:{port}", None, "is the endpoint's address and port right"),
        ("https", "127.5.4.3:{port}", None, "is the endpoint's address and port right"),
        ("http", "no-such-host.invalid", None, "check the endpoint's host name"),
        ("https", "no-such-host.invalid", None, "check the endpoint's host name"),
        ("http", "127.5.4.3:{port}", "http://127.5.4.3:{port}", "requests go by a proxy: check HTTPS_PROXY"),
        ("https", "127.5.4.3:{port}", "http://no-such-proxy.invalid", "check HTTPS_PROXY"),
        ("https", "localhost:{plain}", None, "does the endpoint speak TLS on this port"),
    ],
)
def test_an_endpoint_that_was_never_reached_is_an_error_that_names_the_cause(
    scheme: str, host: str, proxy: str | None, expected: str
) -> None:
    """It comes within 10 s, whatever the time and the attempts that would be left.

    The addresses are those of no other test, whose server may have answered this process on the same port.
    """
    with simple_server() as plain:
        ports = {"port": free_port(), "plain": plain}
        transport = ps.TransportConfig(proxy=proxy and proxy.format(**ports))
        url = f"{scheme}://{host.format(**ports)}"
        store = ps.connect("s3://bucket", endpoint_url=url, anonymous=True, transport=transport)
        began_s = time.monotonic()
        with store, pytest.raises(UnavailableError) as caught:
            store.read("a")
    assert time.monotonic() - began_s < 10
    assert expected in str(caught.value)
    assert retries(store).unreachable_s == 0


def test_a_connection_that_is_never_made_is_an_error_within_ten_seconds(connect_faulty: Connect) -> None:
    """A listener whose queue is full, as a host behind a firewall, answers nothing."""
    with socket.create_server(("127.5.4.3", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        url = f"http://127.5.4.3:{full.getsockname()[1]}"
        began_s = time.monotonic()
        with (
            ps.connect("s3://bucket", endpoint_url=url, anonymous=True) as store,
            pytest.raises(UnavailableError, match="A firewall may drop"),
        ):
            store.read("a")
        assert time.monotonic() - began_s < 10
        for each in fillers:
            each.close()
