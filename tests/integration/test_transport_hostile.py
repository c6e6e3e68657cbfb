"""The transport against servers that break HTTP on purpose: no wrong byte, no dead engine, nothing without a bound."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import socket
import threading
from typing import Any

import pytest

import penstock as ps
from exchanges import Heard, KeptServer, RawServer, ask, start
from penstock.config import MIB, RetryConfig, TransportConfig
from penstock.errors import CancelledOperationError, ClosedError, ProtocolError, StoreError, UnavailableError
from penstock.store.base import innermost
from penstock.store.inflight import WaitingSink, perform
from penstock.store.limited import Limited
from penstock.transport import CLOSED, DEFECT, LATE_TOTAL, Signing, engine
from penstock.transport.loop import EventLoop
from penstock.types import Get
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

ONCE = RetryConfig(attempts_max=1)


@pytest.fixture(autouse=True)
def _fresh_engine() -> Any:
    engine.close()
    yield
    engine.close()


def whole(body: bytes, *lines: bytes) -> bytes:
    """An answer of known length."""
    head = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


# ── never another request's bytes ───────────────────────────────────────────────────────────────────────────────────


def test_an_answer_too_many_is_never_the_next_ones() -> None:
    """What follows a body beyond its length is not taken for the answer to the next request on that connection."""

    def script(_connection: int, _exchange: int, head: bytes) -> list[bytes]:
        if b"/large" in head:
            return [whole(b"A" * 100_000) + whole(b"wrong")]
        return [whole(b"right")]

    next_one: list[Heard] = []

    class Sink(Heard):
        def on_end(self, answer: Any) -> None:
            next_one.append(start(server.url + "/small")[1])  # at once, on the loop's thread
            super().on_end(answer)

    with KeptServer(script) as server:
        for _ in range(5):
            next_one.clear()
            start(server.url + "/large", sink=Sink())[1].wait()
            assert next_one[0].wait().status == 200
            assert next_one[0].body == b"right"


@pytest.mark.parametrize(
    "lines",
    [(b"Connection: keep-alive, close",), (b"Connection: close", b"Connection: x"), (b"connection: Close",)],
)
def test_connection_options_are_a_list(lines: tuple[bytes, ...]) -> None:
    """``close`` among the options, in one line or several, ends the connection's use."""
    with KeptServer(lambda *_: [whole(b"ok", *lines)]) as server:
        assert [ask(server.url)[1] for _ in range(3)] == [b"ok"] * 3
        assert len(server.connections) == 3


def test_a_request_that_met_a_dead_connection_is_counted() -> None:
    """A kept connection that dies unanswered costs no attempt: the request goes out again, and its record tells."""
    answer = whole(b"ok", b'ETag: "1"')
    with KeptServer(lambda connection, exchange, _: None if (connection, exchange) == (0, 1) else [answer]) as server:
        with ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True) as store:
            attempts = [perform(store, Get("a")).attempts for _ in range(3)]
            assert [[attempt.resent for attempt in each] for each in attempts] == [[False], [True], [False]]
            assert len(server.heads) == 4
            assert store.statistics().resent_count == 1


@pytest.mark.parametrize(("line", "connections_count"), [(b"Server: old", 3), (b"Connection: keep-alive", 1)])
def test_http_1_0_keeps_only_what_it_says(line: bytes, connections_count: int) -> None:
    """A connection of HTTP/1.0 is used again only where the answer asks for it."""
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n" + line + b"\r\n\r\nok"
    with KeptServer(lambda *_: [answer]) as server:
        assert [ask(server.url)[1] for _ in range(3)] == [b"ok"] * 3
        assert len(server.connections) == connections_count


ANSWERS = {
    "length": whole(b"0123456789"),
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;e=1\r\n0123\r\n6\r\n456789\r\n0\r\nT: x\r\n\r\n",
    "interim": b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + whole(b"0123456789"),
}


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_an_answer_cut_anywhere_is_an_error(kind: str) -> None:
    """Whatever the byte after which the connection ends: an error, never a short body that looks whole."""
    answer = ANSWERS[kind]
    with RawServer(lambda head: answer[: int(head.split(b" ")[1][1:])]) as server:
        sinks = [start(f"{server.url}/{size}")[1] for size in range(1, len(answer))]
        for sink in sinks:
            assert sink.wait().curl_error != 0
        assert ask(f"{server.url}/{len(answer)}")[1] == b"0123456789"


@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_an_answer_in_any_two_pieces_is_whole(kind: str) -> None:
    """Wherever an answer is cut into two segments, it comes out the same, and the connection serves the next."""
    answer = ANSWERS[kind]
    pause = threading.Event()

    def script(_connection: int, _exchange: int, head: bytes) -> Any:
        at = int(head.split(b" ")[1][1:])
        yield answer[:at]
        pause.wait(0.002)  # two segments, so two reads
        yield answer[at:]

    with KeptServer(script) as server:
        assert [ask(f"{server.url}/{at}")[1] for at in range(1, len(answer))] == [b"0123456789"] * (len(answer) - 1)
        assert len(server.connections) == 1


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxx\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 404 No\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 101 Switch\r\n\r\n" + whole(b"ok"),
    ],
)
def test_framing_that_cannot_be_trusted_is_an_error(answer: bytes) -> None:
    """Where it is not sure what the body is, there is no body."""
    with RawServer(answer) as server:
        ended, body = ask(server.url)
    assert ended.curl_error > 0
    assert body == b""


def test_nothing_is_injected() -> None:
    """Paths, header lines and session tokens with control characters end their exchange; nothing is sent."""
    with KeptServer(lambda *_: [whole(b"ok")]) as server:
        for path in ("/a\rb", "/a\tb", "/a\x00b", "/a b", "/\xe9", "/a\nb", "/a#b"):
            assert ask(server.url + path)[0].curl_error != 0
        for line in ("A: b\nC: d", "A: b\rC", "A: b\x00"):
            assert ask(server.url, headers=[line])[0].curl_error != 0
        assert ask(server.url, "PUT", body=b"x", headers=["A: b\nC: d"])[0].curl_error != 0
        assert ask(server.url, signing=Signing("A", "S", "token\n", "r"))[0].curl_error != 0
        assert server.heads == []
        assert ask(server.url)[1] == b"ok"


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_flood_of_interim_answers_costs_nothing() -> None:
    """900 of them in one segment, and the answer after."""
    with RawServer(b"HTTP/1.1 100 C\r\n\r\n" * 900 + whole(b"hi")) as server:
        assert ask(server.url)[1] == b"hi"


def test_a_length_beyond_memory_is_that_exchanges_error() -> None:
    """An absurd Content-Length ends its exchange with an error that says so, not the engine."""
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\nxx") as server:
        answer, _ = ask(server.url)
        assert isinstance(answer.refused, StoreError)
        assert "no memory for a body of 999999999999999999 bytes" in str(answer.refused)
        others = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-loop")]
        assert len(others) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 404 No\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"])
def test_an_endless_body_has_a_bound(head: bytes) -> None:
    """An error document, and a body of unknown length in a private buffer, are given up at a bound, not by memory."""
    piece = b"100000\r\n" + bytes(MIB) + b"\r\n"
    with KeptServer(lambda *_: itertools.chain([head], itertools.repeat(piece))) as server:
        answer, body = ask(server.url)
    assert answer.curl_error > 0
    assert len(answer.error_body) <= 2 * MIB
    assert len(body) <= 64 * MIB


def test_a_range_in_chunks_arrives(faulty: FaultyServer) -> None:
    """A range whose Content-Range tells its length arrives in chunks too."""
    faulty.objects["a"] = bytes(range(256)) * 2000
    faulty.fail("chunked", times=None)
    store = ps.connect(faulty.url, endpoint_url=faulty.endpoint_url, anonymous=True)
    assert bytes(store.read("a", ps.ByteRange(5, 300_005)).data) == faulty.objects["a"][5:300_005]
    store.close()


def test_the_total_deadline_holds_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name service that does not answer is no reason to wait longer than ``total_s_max``."""
    answered = threading.Event()
    real = socket.getaddrinfo

    def slow(*args: Any, **more: Any) -> Any:
        if not more.get("flags"):
            answered.wait(10)
        return real(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        answer, _ = ask("http://localhost:1/", config=TransportConfig(total_s_max=0.3, connect_s_max=9))
        assert answer.curl_error == LATE_TOTAL
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "penstock-resolve":
                thread.join(10)


def test_connections_spread_over_the_addresses_of_a_name(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection picks among a name's addresses. The name service is a stand-in; the listener has all of 127/8."""
    listener = socket.create_server(("0.0.0.0", 0), backlog=64)
    port = listener.getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in range(1, 5)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **more: [] if more.get("flags") else found)
    for _ in range(40):
        start(f"http://many.test:{port}/", config=TransportConfig())
    connections = [listener.accept()[0] for _ in range(40)]
    assert len({connection.getsockname()[0] for connection in connections}) == 4
    engine.close()
    for connection in (*connections, listener):
        connection.close()


def test_a_name_that_moved_is_looked_up_again(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no address of a name can be reached, the next request asks the name service again."""
    real = socket.getaddrinfo
    asked: list[str] = []

    def moving(host: str, *args: Any, **more: Any) -> Any:
        if not more.get("flags"):
            asked.append(host)
        return real("127.0.0.9" if len(asked) < 2 else "127.0.0.1", *args, **more) if not more.get("flags") else []

    monkeypatch.setattr(socket, "getaddrinfo", moving)
    faulty.objects["a"] = b"here"
    url = f"http://moving.test:{faulty.port}/bucket/a"
    assert ask(url)[0].curl_error > 0
    assert ask(url)[1] == b"here"


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everybody_hears_of_the_end_although_sinks_fail(caplog: pytest.LogCaptureFixture) -> None:
    """A sink that raises ends the loop; all other exchanges are told of the defect, and the next use starts anew."""

    class Failing(Heard):
        def on_end(self, answer: Any) -> None:
            super().on_end(answer)
            raise RuntimeError("a defect")

    with RawServer(None) as silent, KeptServer(lambda *_: [whole(b"x")]) as server:
        sinks = [start(silent.url, sink=Failing() if index < 3 else Heard())[1] for index in range(8)]
        (failing,) = (thread for thread in threading.enumerate() if thread.name == "penstock-loop-0")
        start(server.url, sink=Failing())
        assert [sink.wait(5).curl_error for sink in sinks] == [DEFECT] * 8
        assert all("RuntimeError: a defect" in sink.wait().reason for sink in sinks)
        failing.join(5)
        assert ask(server.url)[1] == b"x"
    assert "RuntimeError: a defect" in caplog.text


def fail(*_: Any, **_more: Any) -> Any:
    raise ZeroDivisionError("a defect")


def test_a_timer_that_fails_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """A timer's callback that raises ends the loop with one traceback; who waits for an answer hears of the defect."""
    with RawServer(None) as silent, KeptServer(lambda *_: [whole(b"x")]) as server:
        sinks = [start(silent.url)[1] for _ in range(4)]
        engine.call_later(0.0, fail)
        assert [sink.wait(5).curl_error for sink in sinks] == [DEFECT] * 4
        assert ask(server.url)[1] == b"x"
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize("verb", ["list", "read", "write", "stat"])
@pytest.mark.parametrize("fault", ["stall_head", "503_retry_after"])
def test_closing_the_engine_ends_every_verb_alike(verb: str, fault: str, faulty: FaultyServer) -> None:
    """``engine.close()`` under an operation, answered or waiting for its next attempt, makes it a ``ClosedError``."""
    with ps.connect(faulty.url, endpoint_url=faulty.endpoint_url, anonymous=True) as store:
        faulty.fail(fault, times=None, seconds=30)
        verbs: dict[str, Any] = {
            "list": lambda: list(store.list()),
            "read": lambda: store.read("a"),
            "write": lambda: store.write("a", b"x"),
            "stat": lambda: store.stat("a"),
        }
        heard: list[Exception] = []

        def use() -> None:
            try:
                verbs[verb]()
            except Exception as error:
                heard.append(error)

        user = threading.Thread(target=use, daemon=True)
        user.start()
        while not faulty.requests:
            user.join(0.01)
        user.join(0.1)
        engine.close()
        user.join(10)
    assert [isinstance(error, ClosedError) for error in heard] == [True], heard


def test_a_cancelled_waiter_is_told_on_an_engine_thread() -> None:
    """Whoever waits for a permit and gives up is not called back by the thread that cancels."""

    class Sink(WaitingSink):
        thread: threading.Thread | None = None

        def done(self, completion: Any) -> None:
            self.thread = threading.current_thread()
            super().done(completion)

    with RawServer(None) as silent:
        store = ps.connect("s3://bucket", endpoint_url=silent.url, anonymous=True)
        limited = Limited(innermost(store), requests_max=1)
        sinks = [Sink(), Sink()]
        transfers = [limited.submit(Get("k"), sink) for sink in sinks]
        transfers[1].cancel()
        assert isinstance(sinks[1].wait(transfers[1]).error, CancelledOperationError)
        assert sinks[1].thread is not threading.current_thread()
        transfers[0].cancel()
        sinks[0].wait(transfers[0])


PLACES = ["plain.PlainPool._begin_body", "plain.PlainPool.start", "plain.parse_head", "loop.EventLoop._watch"]


@pytest.mark.parametrize("name", [*PLACES, "curl.attach", "curl.record_outcome"])
def test_what_fails_on_the_loop_ends_its_own_exchange(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect anywhere on the loop's thread ends the exchange that it happened to, too."""
    with FaultyServer({"a": b"x"}, tls=name.startswith("curl")) as server, monkeypatch.context() as patch:
        server.fail("delay", seconds=1.0)
        patch.setattr(f"penstock.transport.{name}", fail)
        config = TransportConfig(ca_bundle=server.ca_bundle)
        _, sink = start(server.endpoint_url + "/bucket/a", config=config)
        assert sink.wait(10).curl_error == DEFECT


CALLBACKS = ["traced.Traced.note", "limited.Limited.release", "retrying.RetriedOperation._wait_s",
             "retrying.RetriedOperation._remaining", "retrying.RetriedOperation._is_refused_resumption",
             "hedged.Hedged.forget", "exchange.attempt_record", "s3._S3Exchange.resend_if_corrected"]  # fmt: skip


@pytest.mark.parametrize("name", [*CALLBACKS, "penstock.fetch.concurrency.Concurrency.completed"])
def test_a_callback_of_a_wrapper_that_fails_leaves_nobody_waiting(
    name: str, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails while an answer is passed on, whoever waits for it hears; and the store reads again afterwards."""
    retry = RetryConfig(backoff_s=0.001)
    faulty.objects["a"] = bytes(1000)
    with ps.connect(faulty.url, endpoint_url=faulty.endpoint_url, anonymous=True, retry=retry) as store:
        with monkeypatch.context() as patch:
            patch.setattr(name if name.startswith("penstock") else f"penstock.store.{name}", fail)
            faulty.fail("503", times=2)
            heard: list[object] = []
            reader = threading.Thread(target=lambda: heard.extend(store.try_read_many(["a", "a"])), daemon=True)
            reader.start()
            reader.join(10)
            assert len(heard) == 2
        engine.close()  # waits for a loop that is just ending: what comes too soon would end with it
        faulty.heal()
        assert len(store.read("a")) == 1000


def test_closing_from_a_sink_does_not_start_anew(nothing_left: Any) -> None:
    """``engine.close()`` on the loop's thread, with others in flight whose sinks ask for more: no thread is left."""

    class Insistent(Heard):
        def on_end(self, answer: Any) -> None:
            super().on_end(answer)
            if answer.curl_error == CLOSED:
                more.append(start(silent.url)[1])

    class Closing(Heard):
        def on_end(self, answer: Any) -> None:
            engine.close()
            super().on_end(answer)

    more: list[Heard] = []
    with nothing_left(), RawServer(None) as silent, KeptServer(lambda *_: [whole(b"x")]) as server:
        sinks = [start(silent.url, sink=Insistent())[1] for _ in range(5)]
        start(server.url, sink=Closing())
        assert [sink.wait(5).curl_error for sink in sinks] == [CLOSED] * 5
        assert [sink.wait(5).curl_error for sink in more] == [CLOSED] * 5


def test_a_thread_with_the_number_of_a_closed_loop_starts_anew() -> None:
    """Thread numbers are used again: who has that of a loop that ended is not told that the transport is closed."""
    with KeptServer(lambda *_: [whole(b"x")]) as server:
        for _ in range(20):
            assert ask(server.url)[1] == b"x"
            engine.close()
            bodies: list[bytes] = []
            user = threading.Thread(target=lambda: bodies.append(ask(server.url)[1]))  # noqa: B023 - joined below
            user.start()
            user.join(10)
            assert bodies == [b"x"]
            engine.close()


def test_an_interrupted_wake_up_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a sleeping loop is being woken: the next submission wakes it."""
    with KeptServer(lambda *_: [whole(b"x")]) as server:
        assert ask(server.url)[1] == b"x"
        write = os.eventfd_write

        def interrupted(*_: Any) -> None:
            monkeypatch.setattr(os, "eventfd_write", write)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "eventfd_write", interrupted)
        with pytest.raises(KeyboardInterrupt):  # at the first that finds the loop asleep
            _ = [ask(server.url) for _ in range(1000)]
        assert ask(server.url)[1] == b"x"


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, nothing_left: Any) -> None:
    """Ctrl-C while a loop's thread starts ends that thread; the next use starts anew."""
    real = EventLoop.start

    def interrupted(loop: EventLoop) -> None:
        monkeypatch.setattr(EventLoop, "start", real)
        real(loop)
        raise KeyboardInterrupt

    with KeptServer(lambda *_: [whole(b"x")]) as server:
        monkeypatch.setattr(EventLoop, "start", interrupted)
        with nothing_left(), pytest.raises(KeyboardInterrupt):
            ask(server.url)
        assert ask(server.url)[1] == b"x"


def test_a_finaliser_may_submit_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch, nothing_left: Any) -> None:
    """A dropped writer's finaliser submits, in the midst of a first use: no deadlock, no loop that nobody closes."""
    sinks: list[Heard] = []

    class Dropped:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            sinks.append(start(server.url)[1])

    real = EventLoop.start

    def collecting(loop: EventLoop) -> None:
        gc.collect()
        real(loop)

    monkeypatch.setattr(EventLoop, "start", collecting)
    with KeptServer(lambda *_: [whole(b"x", b"Connection: close")]) as server:
        gc.collect()
        with nothing_left():
            Dropped()
            assert ask(server.url)[1] == b"x"
            assert sinks[0].wait().status == 200
            engine.close()


def test_configurations_do_not_pile_up() -> None:
    """A configuration per store, over TLS: idle libcurl handles are kept for a bounded number of them."""
    with FaultyServer({"a": b"x"}, tls=True) as server:
        for _ in range(40):
            config = TransportConfig(ca_bundle=server.ca_bundle)
            assert ask(f"{server.endpoint_url}/bucket/a", config=config)[1] == b"x"
    (loop,) = (loop for group in engine._loops.values() for loop in group)
    assert len(loop._curl._handles) <= 16


def test_the_connect_deadline_counts_from_the_second_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept connection that dies after a long wait is replaced: the time waited is no time of connecting."""
    pause = threading.Event()

    def script(connection: int, exchange: int, _head: bytes) -> list[bytes] | None:
        if connection == 0 and exchange == 1:
            pause.wait(1.2)
            return None
        return [whole(b"ok")]

    real = socket.getaddrinfo
    monkeypatch.setattr(
        "penstock.transport.connections.NAME_S_MAX", 0.0
    )  # so that the second connection looks up again

    def slow(*args: Any, **more: Any) -> Any:
        if not more.get("flags"):
            pause.wait(0.7)
        return real(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with KeptServer(script) as server:
        url = f"http://localhost:{server.port}"
        config = TransportConfig(connect_s_max=1.1)
        assert [ask(url, config=config)[1] for _ in range(2)] == [b"ok"] * 2


SHORT_OF_DESCRIPTORS = """
import resource, sys
import penstock as ps
from penstock.errors import UnavailableError
from penstock.config import RetryConfig
store = ps.connect(sys.argv[1], endpoint_url=sys.argv[2], anonymous=True, retry=RetryConfig(attempts_max=1))
assert bytes(store.read("a").data) == b"x"
resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
results = list(store.try_read_many(["a"] * 300))
errors = [str(result) for result in results if isinstance(result, Exception)]
assert all("Too many open files" in error and "ulimit" in error for error in errors), errors[:3]
assert len(results) == 300
assert bytes(store.read("a").data) == b"x"
print(len(errors))
"""


def test_without_descriptors_errors_say_so_and_reading_recovers(faulty: FaultyServer) -> None:
    """At the limit of open files the error names it, and the way out; what is asked later works again."""
    import subprocess
    import sys

    faulty.objects["a"] = b"x"
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS, faulty.url, faulty.endpoint_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_engine_without_descriptors_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for the event loop itself: an error of ours with a hint, and the next use works."""

    def none_left(*_: Any) -> int:
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    with KeptServer(lambda *_: [whole(b"x")]) as server:
        monkeypatch.setattr(os, "eventfd", none_left)
        with pytest.raises(UnavailableError, match="ulimit"):
            ask(server.url)
        assert ask(server.url)[1] == b"x"


@pytest.mark.parametrize("free_count", range(6))
def test_descriptors_that_end_while_the_engine_starts_are_given_back(free_count: int, nothing_left: Any) -> None:
    """Wherever the limit of open files is met, it is an error with a hint, and no descriptor stays behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nothing_left():
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free_count, hard))
        refused: list[str] = []
        try:
            engine.call_later(3600.0, list)
        except UnavailableError as error:
            refused.append(str(error))  # not the error, whose traceback keeps everything
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert all("ulimit" in error for error in refused)
        with KeptServer(lambda *_: [whole(b"x")]) as server:
            assert ask(server.url)[1] == b"x"
            engine.close()


# ── stores ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("status", [201, 202, 203, 204, 205, 299])
@pytest.mark.parametrize("body", [b"", b"abc"])
def test_a_success_that_is_none_is_an_error(kind: str, status: int, body: bytes) -> None:
    """Only 200 and 206 answer a GET: a 204 is not an empty object, and never a reader that waits for ever."""
    answer = b'HTTP/1.1 %d X\r\nETag: "e"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n' % (status, len(body))
    with KeptServer(lambda *_: [answer + body]) as server:
        if kind == "s3":
            store = ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True, retry=ONCE)
        else:
            store = ps.connect(f"{server.url}/bucket/", retry=ONCE)
        with pytest.raises(ProtocolError, match=f"status {status}"):
            store.read("a")


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_an_answer_that_nobody_thought_of_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect while an answer is understood reaches whoever waits, with its cause; the engine lives on."""

    def defect(*_: Any, **_more: Any) -> None:
        raise ZeroDivisionError("a defect")

    with KeptServer(lambda *_: [whole(b"abc", b'ETag: "e"')]) as server:
        if kind == "s3":
            store = ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True, retry=ONCE)
        else:
            store = ps.connect(f"{server.url}/bucket/", retry=ONCE)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.store.exchange.object_info", defect)
            with pytest.raises(ProtocolError, match="ZeroDivisionError: a defect"):
                store.stat("a")
        assert store.stat("a").size_bytes == 3
