"""Only who knows the secret gets a connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.errors import ProtocolError
from penstock.ray.connecting import accept, connect

SECRET = b"s" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(5)
        yield made


def accepted(listener: socket.socket, secret: bytes = SECRET) -> tuple[threading.Thread, list[socket.socket | None]]:
    """A thread that accepts one connection, and the list that it puts the connection into."""
    found: list[socket.socket | None] = []
    thread = threading.Thread(target=lambda: found.append(accept(listener, secret)))
    thread.start()
    return thread, found


def test_both_ends_know_the_secret(listener: socket.socket) -> None:
    """Then bytes go both ways, without a time limit."""
    thread, found = accepted(listener)
    with connect("127.0.0.1", listener.getsockname()[1], SECRET) as ours:
        thread.join()
        assert found[0] is not None
        with found[0] as theirs:
            assert theirs.gettimeout() is ours.gettimeout() is None
            ours.sendall(b"there")
            theirs.sendall(b"back")
            assert (theirs.recv(9), ours.recv(9)) == (b"there", b"back")


def test_a_stranger_is_turned_away(listener: socket.socket) -> None:
    """Who connects with another secret hears nothing, and the next one is served."""
    thread, found = accepted(listener)
    with pytest.raises(ConnectionError):
        connect("127.0.0.1", listener.getsockname()[1], b"x" * 32)
    thread.join()
    assert found == [None]


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
