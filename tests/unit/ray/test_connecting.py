"""Only who knows the secret gets a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.errors import ProtocolError
from penstock.ray import connecting
from penstock.ray.connecting import Acceptor, HostJoined, connect
from penstock.ray.pool import Machine

SECRET = b"s" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_both_ends_know_the_secret(listener: socket.socket) -> None:
    """Then bytes go both ways, without a time limit."""
    acceptor = Acceptor(listener, SECRET)
    with connect("127.0.0.1", listener.getsockname()[1], SECRET) as ours:
        found = acceptor.accept(5)
        assert found is not None
        with found as theirs:
            assert theirs.gettimeout() is ours.gettimeout() is None
            ours.sendall(b"there")
            theirs.sendall(b"back")
            assert (theirs.recv(9), ours.recv(9)) == (b"there", b"back")


def test_a_stranger_is_turned_away(listener: socket.socket) -> None:
    """Who connects with another secret hears nothing, and the next one is served."""
    acceptor = Acceptor(listener, SECRET)
    address = listener.getsockname()
    with pytest.raises(ConnectionError):
        connect(*address, b"x" * 32)
    assert acceptor.accept(0.1) is None
    with connect(*address, SECRET):
        found = acceptor.accept(5)
        assert found is not None
        found.close()


def test_silent_and_slow_strangers_keep_nobody_waiting(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader is served beside them, and they are turned away together, however much they say."""
    monkeypatch.setattr(connecting, "CONNECT_S_MAX", 1.5)
    acceptor = Acceptor(listener, SECRET)
    address = listener.getsockname()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(20)]
        began_s = time.monotonic()
        stack.enter_context(connect(*address, SECRET))
        found = acceptor.accept(5)
        assert found is not None
        found.close()
        assert time.monotonic() - began_s < 1
        slow = strangers[0]
        while time.monotonic() - began_s < 10:
            try:
                slow.sendall(b"s")
            except OSError:
                break
            time.sleep(0.2)
        assert time.monotonic() - began_s < 5
        for stranger in strangers[1:]:
            assert len(stranger.recv(99)) == 32
            assert stranger.recv(99) == b""


def test_no_secret_is_shown() -> None:
    """What is printed of a machine, as tools that show the variables of a traceback do, leaves it out."""
    assert "sss" not in repr(HostJoined("n", "10.0.0.7", 1, SECRET)) + repr(Machine("n", "10.0.0.7", 1, SECRET))


def test_a_stranger_that_answers_is_refused(listener: socket.socket) -> None:
    """What listens at the address without the secret gets no message to unpickle."""

    def pretend() -> None:
        end, _ = listener.accept()
        with end:
            end.sendall(b"n" * 32)
            end.recv(64)
            end.sendall(b"p" * 32)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ProtocolError, match="not the worker"):
        connect("127.0.0.1", listener.getsockname()[1], SECRET)
    thread.join()
