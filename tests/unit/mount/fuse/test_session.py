"""The session with a socket in the kernel's place: negotiation, refusals, malformed requests, replies at the wrong time."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.mount.fuse.answering import KernelReply
from penstock.mount.fuse.protocol import MODIFYING, WITHOUT_REPLY, Operation
from penstock.mount.fuse.session import FuseSession
from penstock.mount.nodes import ROOT_INODE, Attributes
from penstock.transport.loop import EventLoop, WatchedDescriptor
from servers.leaks import nothing_left
from servers.memory_file_system import MemoryFileSystem

ANSWER_S_MAX = 20
INIT_BODY = struct.pack("=IIII", 7, 45, 131072, 0xFFFF_FFFF) + struct.pack("=I44x", 0xFFFF_FFFF)


class KernelStandIn:
    """The other end of the device: sends requests, and receives replies. A thread of its own serves the session, or a loop."""

    def __init__(
        self,
        file_system: MemoryFileSystem,
        *,
        loop: EventLoop | SuccessiveLoops | None = None,
    ) -> None:
        self.socket, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(ANSWER_S_MAX)
        self.session = FuseSession(device.detach(), file_system)
        self.failure: Exception | None = None
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self._run)
        if loop is None:
            self.thread.start()
        else:
            self.session.start_on(loop.add_reader, ended=self._end)

    def _run(self) -> None:
        try:
            self.session.run()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, failure: Exception | None) -> None:
        self.failure = failure
        self.has_ended.set()

    def send(self, operation: int, body: bytes = b"", *, inode: int = ROOT_INODE, unique: int = 2) -> None:
        """Send a request."""
        header = struct.pack("=IIQQIIIHH", 40 + len(body), operation, unique, inode, 0, 0, 0, 0, 0)
        self.socket.send(header + body)

    def receive(self) -> tuple[int, int, bytes]:
        """Receive a reply: request, errno, body."""
        message = self.socket.recv(1 << 21)
        length, number, unique = struct.unpack_from("=IiQ", message)
        assert length == len(message)
        return unique, -number, message[16:]

    def ask(self, operation: int, body: bytes = b"", *, inode: int = ROOT_INODE) -> tuple[int, bytes]:
        """Send a request, and receive its reply: errno, body."""
        self.send(operation, body, inode=inode)
        unique, number, said = self.receive()
        assert unique == 2
        return number, said

    def close(self) -> None:
        """End the session."""
        self.session.close()
        assert self.has_ended.wait(ANSWER_S_MAX)
        if self.thread.ident is not None:
            self.thread.join(ANSWER_S_MAX)
        self.socket.close()
        assert not self.thread.is_alive()


class SuccessiveLoops:
    """Gives each call of ``add_reader`` to the next loop, as the engine does after a defect."""

    def __init__(self, *loops: EventLoop) -> None:
        self._loops = list(loops)
        self.has_moved = threading.Event()

    def add_reader(
        self, descriptor: int, *, on_readable: Callable[[], object], on_loop_end: Callable[[bool], object]
    ) -> WatchedDescriptor:
        """Have the next loop watch a descriptor."""
        loop = self._loops.pop(0)
        if not self._loops:
            self.has_moved.set()
        return loop.add_reader(descriptor, on_readable=on_readable, on_loop_end=on_loop_end)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """An event loop that runs."""
    running = EventLoop(connections_max=4, name="penstock-test-loop")
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def file_system() -> MemoryFileSystem:
    """A small tree: node 2 is a file of 7 bytes."""
    return MemoryFileSystem({"small": b"content", "hangs": b"content", "raises": b"", "twice": b"content"})


@pytest.fixture(params=["thread", "loop"])
def kernel(request: pytest.FixtureRequest, file_system: MemoryFileSystem) -> Iterator[KernelStandIn]:
    """A session whose kernel has not said anything yet, served in both ways."""
    stand_in = KernelStandIn(file_system, loop=request.getfixturevalue("loop") if request.param == "loop" else None)
    try:
        yield stand_in
    finally:
        stand_in.close()
    assert file_system.closed


def test_negotiation(kernel: KernelStandIn) -> None:
    """The session agrees to what it wants of what the kernel offers, with the lower version, and is ready then."""
    assert not kernel.session.wait_ready(0)
    number, body = kernel.ask(Operation.INIT, INIT_BODY)
    assert number == 0
    assert struct.unpack_from("=II", body) == (7, 45)
    (low,), (high,) = struct.unpack_from("=I", body, 12), struct.unpack_from("=I", body, 32)
    wanted = {0: "ASYNC_READ", 13: "DO_READDIRPLUS", 18: "PARALLEL_DIROPS", 21: "ABORT_ERROR"}
    wanted |= {22: "MAX_PAGES", 30: "INIT_EXT"}
    assert {bit for bit in range(32) if low >> bit & 1} == set(wanted)
    assert high == 0
    assert struct.unpack_from("=I", body, 36) == (0,)
    assert kernel.session.wait_ready(ANSWER_S_MAX)
    assert kernel.session.statistics().minor == 45


def test_nothing_is_claimed_that_the_kernel_does_not_offer(file_system: MemoryFileSystem) -> None:
    """Features that the kernel does not know are not agreed to."""
    kernel = KernelStandIn(file_system)
    number, body = kernel.ask(Operation.INIT, struct.pack("=IIII", 7, 31, 131072, 1 << 13 | 1 << 14 | 1 << 3))
    assert (number, struct.unpack_from("=IIII", body)) == (0, (7, 31, 131072, 1 << 13))
    assert struct.unpack_from("=H", body, 28) == (0,)
    assert not kernel.session.forget_names()
    kernel.close()


def test_a_newer_kernel_asks_again(kernel: KernelStandIn) -> None:
    """A kernel with another major version is told ours, and sends INIT again."""
    number, body = kernel.ask(Operation.INIT, struct.pack("=IIII", 8, 0, 0, 0))
    assert (number, body[:4]) == (0, struct.pack("=I", 7))
    assert not kernel.session.wait_ready(0)
    assert kernel.ask(Operation.INIT, INIT_BODY)[0] == 0
    assert kernel.session.wait_ready(ANSWER_S_MAX)


@pytest.mark.parametrize("version", [(7, 30), (6, 99)])
def test_an_old_kernel_is_refused(file_system: MemoryFileSystem, version: tuple[int, int]) -> None:
    """The session ends with an error that names the version and the remedy."""
    kernel = KernelStandIn(file_system)
    assert kernel.ask(Operation.INIT, struct.pack("=IIII", *version, 0, 0)) == (errno.EPROTO, b"")
    assert kernel.has_ended.wait(ANSWER_S_MAX)
    assert isinstance(kernel.failure, ps.ConfigError)
    assert f"{version[0]}.{version[1]}" in str(kernel.failure)
    assert "Linux 5.4" in str(kernel.failure)
    assert not kernel.session.wait_ready(ANSWER_S_MAX)
    kernel.close()


@pytest.mark.parametrize("operation", sorted(MODIFYING), ids=lambda operation: operation.name)
def test_what_modifies_is_refused(kernel: KernelStandIn, operation: Operation) -> None:
    """Every operation that would change something gets ``EROFS``."""
    assert kernel.ask(operation, bytes(64)) == (errno.EROFS, b"")


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        (Operation.IOCTL, errno.ENOTTY),
        (Operation.READLINK, errno.EINVAL),
        (Operation.STATX, errno.ENOSYS),
        (Operation.FLUSH, errno.ENOSYS),
        (Operation.LSEEK, errno.ENOSYS),
        (Operation.POLL, errno.ENOSYS),
        (Operation.ACCESS, errno.ENOSYS),
        (4096, errno.ENOSYS),
        (Operation.DESTROY, 0),
    ],
)
def test_what_is_not_done(kernel: KernelStandIn, operation: int, number: int) -> None:
    """What a node does not have is refused; what the kernel can do itself, or nobody knows, is ``ENOSYS``."""
    assert kernel.ask(operation, bytes(32)) == (number, b"")


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_TRUNC])
def test_files_are_not_opened_for_writing(kernel: KernelStandIn, flags: int) -> None:
    """OPEN for writing is refused before the file system hears of it."""
    assert kernel.ask(Operation.OPEN, struct.pack("=II", flags, 0), inode=2) == (errno.EROFS, b"")


def test_reading(kernel: KernelStandIn) -> None:
    """LOOKUP, OPEN, READ and RELEASE arrive at the file system, and its answers at the kernel."""
    number, entry = kernel.ask(Operation.LOOKUP, b"small\0")
    assert (number, struct.unpack_from("=Q", entry)) == (0, (2,))
    assert kernel.ask(Operation.LOOKUP, b"other\0") == (errno.ENOENT, b"")
    assert kernel.ask(Operation.OPEN, bytes(8), inode=2) == (0, struct.pack("=QII", 2, 2, 0))
    assert kernel.ask(Operation.READ, struct.pack("=QQI20x", 2, 3, 100), inode=2) == (0, b"tent")
    assert kernel.ask(Operation.RELEASE, struct.pack("=Q16x", 2), inode=2) == (0, b"")
    found = kernel.session.statistics()
    assert found.requests_count == {"LOOKUP": 2, "OPEN": 1, "READ": 1, "RELEASE": 1}
    assert found.waiting_count == 0


def test_extended_attributes(kernel: KernelStandIn) -> None:
    """A value is sent if there is room, its length if there is none, and ``ERANGE`` if there is too little."""
    assert kernel.ask(Operation.GETXATTR, struct.pack("=II", 0, 0) + b"user.etag\0") == (0, struct.pack("=II", 9, 0))
    assert kernel.ask(Operation.GETXATTR, struct.pack("=II", 9, 0) + b"user.etag\0") == (0, b"etag of 1")
    assert kernel.ask(Operation.GETXATTR, struct.pack("=II", 8, 0) + b"user.etag\0") == (errno.ERANGE, b"")
    assert kernel.ask(Operation.LISTXATTR, struct.pack("=II", 64, 0)) == (0, b"user.etag\0")


def test_references_are_given_back(kernel: KernelStandIn, file_system: MemoryFileSystem) -> None:
    """FORGET and BATCH_FORGET arrive, and get no reply."""
    for _ in range(5):
        kernel.ask(Operation.LOOKUP, b"small\0")
    kernel.send(Operation.FORGET, struct.pack("=Q", 2), inode=2)
    kernel.send(Operation.BATCH_FORGET, struct.pack("=II", 1, 0) + struct.pack("=QQ", 2, 3))
    assert kernel.ask(Operation.GETATTR, bytes(16))[0] == 0
    assert file_system.references[2] == 0


def test_failures_become_replies(kernel: KernelStandIn, caplog: pytest.LogCaptureFixture) -> None:
    """A request that cannot be parsed and a method that raises both end with ``EIO``; the same failure is logged once."""
    inode = next(number for number, _ in enumerate(range(10)) if kernel.ask(Operation.LOOKUP, b"raises\0")[0] == 0) + 4
    for _ in range(2):
        assert kernel.ask(Operation.READ, struct.pack("=QQI20x", inode, 0, 10), inode=inode) == (errno.EIO, b"")
        assert kernel.ask(Operation.LOOKUP, b"no end") == (errno.EIO, b"")
    assert [record.message for record in caplog.records] == ["READ of node 4 failed.", "LOOKUP of node 1 failed."]


def test_a_second_answer_is_dropped(kernel: KernelStandIn, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel gets one reply to each request; the second one is logged, once."""
    for _ in range(3):
        assert kernel.ask(Operation.READ, struct.pack("=QQI20x", 5, 0, 10), inode=5) == (0, b"content")
    assert kernel.ask(Operation.GETATTR, bytes(16))[0] == 0
    assert [record.message for record in caplog.records if "twice" in record.message] == [
        "A request (READ, request 2 of 10 bytes) was answered twice; the second answer was dropped."
    ]


def held_reply(kernel: KernelStandIn, file_system: MemoryFileSystem, *, length_bytes: int = 10) -> KernelReply:
    """The reply to a READ that the file system has not given."""
    kernel.send(Operation.READ, struct.pack("=QQI20x", 3, 0, length_bytes), inode=3, unique=4)
    assert kernel.ask(Operation.GETATTR, bytes(16))[0] == 0
    ((reply, _),) = file_system.held
    return reply


def test_answers_that_cannot_be_encoded(kernel: KernelStandIn, file_system: MemoryFileSystem) -> None:
    """Whatever goes wrong while a reply is made, on whatever thread: the program gets ``EIO``, and does not wait for ever."""

    def entries() -> Iterator[tuple[Attributes, bytes, int]]:
        raise KeyError("no such node")
        yield

    impossible = Attributes(1, 0, 0, 1, 0, -1, 0)
    for fail in (
        lambda reply: reply.attributes(impossible, lifetime_s=1),
        lambda reply: reply.entry(impossible, lifetime_s=1),
        lambda reply: reply.directory(entries(), lifetime_s=1),
        lambda reply: reply.data(["text"]),
        lambda reply: reply.data([None]),
    ):
        reply = held_reply(kernel, file_system, length_bytes=4096)
        with pytest.raises(Exception):
            fail(reply)
        assert kernel.receive() == (4, errno.EIO, b"")
        file_system.held.clear()


def test_answers_that_are_too_long(kernel: KernelStandIn, file_system: MemoryFileSystem) -> None:
    """More bytes than were asked for are not sent; many pieces are joined; an errno that the kernel refuses becomes ``EIO``."""
    held_reply(kernel, file_system).data([b"12345678", b"90", b"1"])
    assert kernel.receive() == (4, errno.EIO, b"")
    file_system.held.clear()
    held_reply(kernel, file_system, length_bytes=5000).data([b"%d" % (number % 10) for number in range(5000)])
    assert kernel.receive() == (4, 0, b"0123456789" * 500)
    file_system.held.clear()
    held_reply(kernel, file_system).error(512)
    assert kernel.receive() == (4, errno.EIO, b"")
    file_system.held.clear()
    held_reply(kernel, file_system).error(-5)
    assert kernel.receive() == (4, errno.EIO, b"")


def test_answers_after_the_end(
    kernel: KernelStandIn, file_system: MemoryFileSystem, tmp_path: os.PathLike[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A reply that comes when the session has ended goes nowhere, least of all into the file that has its descriptor now."""
    reply = held_reply(kernel, file_system)
    kernel.close()
    files = [open(os.path.join(tmp_path, f"{number}"), "w+b") for number in range(20)]  # noqa: SIM115 - all at once
    reply.data([b"late"])
    assert reply.opened(1) is False
    for file in files:
        assert os.fstat(file.fileno()).st_size == 0
        file.close()
    assert caplog.records == []


def test_a_loop_has_other_work_too(file_system: MemoryFileSystem, loop: EventLoop) -> None:
    """Requests are answered on the thread of the loop, which also does other work and outlives the session."""
    kernel = KernelStandIn(file_system, loop=loop)
    assert kernel.ask(Operation.INIT, INIT_BODY)[0] == 0
    threads: list[str] = []
    for _ in range(3):
        loop.call_soon(lambda: threads.append(threading.current_thread().name))
        assert kernel.ask(Operation.STATFS)[0] == 0
    kernel.close()
    assert threads == ["penstock-test-loop"] * 3
    assert loop.alive


def test_a_defect_of_others_moves_a_session_to_the_next_loop(
    file_system: MemoryFileSystem, loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """If another callback ends the loop, the session goes on with the loop that takes its place."""
    second = EventLoop(connections_max=4, name="penstock-test-loop-2")
    second.start()
    loops = SuccessiveLoops(loop, second)
    kernel = KernelStandIn(file_system, loop=loops)
    assert kernel.ask(Operation.INIT, INIT_BODY)[0] == 0
    loop.call_soon(lambda: 1 / 0)
    assert loops.has_moved.wait(ANSWER_S_MAX)
    assert kernel.ask(Operation.STATFS)[0] == 0
    assert "callback failed" in caplog.text
    assert not loop.alive
    kernel.close()
    assert kernel.failure is None
    second.close()


def test_a_session_ends_with_the_loops(file_system: MemoryFileSystem, loop: EventLoop) -> None:
    """If the loops are closed, nobody could answer any more, so the session ends and says so to its owner."""
    kernel = KernelStandIn(file_system, loop=loop)
    assert kernel.ask(Operation.INIT, INIT_BODY)[0] == 0
    loop.close()
    assert kernel.has_ended.wait(ANSWER_S_MAX)
    assert file_system.closed
    assert kernel.socket.recv(1) == b""
    kernel.close()


def test_stopping_at_once(file_system: MemoryFileSystem, loop: EventLoop) -> None:
    """A session that is stopped before the loop has looked at it ends, and so does one that starts on a closed loop."""
    for _ in range(20):
        kernel = KernelStandIn(file_system, loop=loop)
        kernel.close()
    loop.close()
    kernel = KernelStandIn(file_system, loop=loop)
    assert kernel.has_ended.wait(ANSWER_S_MAX)
    kernel.close()


def test_a_device_that_cannot_be_read_ends_the_session_alone(file_system: MemoryFileSystem, loop: EventLoop) -> None:
    """The error reaches the owner of the session, and the loop goes on."""
    listening = socket.socket(socket.AF_UNIX)  # is readable when somebody connects, and cannot be read
    listening.bind("")
    listening.listen()
    calling = socket.socket(socket.AF_UNIX)
    calling.connect(listening.getsockname())
    session = FuseSession(listening.detach(), file_system)
    failures: list[Exception | None] = []
    has_ended = threading.Event()

    def ended(failure: Exception | None) -> None:
        failures.append(failure)
        has_ended.set()

    session.start_on(loop.add_reader, ended=ended)
    assert has_ended.wait(ANSWER_S_MAX)
    assert isinstance(failures[0], OSError)
    assert failures[0].errno == errno.EINVAL
    assert loop.alive
    assert file_system.closed
    calling.close()


def test_closing_without_running(file_system: MemoryFileSystem) -> None:
    """A session that never ran closes its descriptor and its file system, once, and cannot run then."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session = FuseSession(its.detach(), file_system)
    session.close()
    session.close()
    assert file_system.closed
    assert ours.recv(1) == b""
    with pytest.raises(ps.ClosedError, match="only once"):
        session.run()
    ours.close()


def test_descriptors_are_given_back(file_system: MemoryFileSystem) -> None:
    """A session leaves no descriptor and no thread behind."""
    with nothing_left():
        for _ in range(5):
            kernel = KernelStandIn(file_system)
            kernel.ask(Operation.INIT, INIT_BODY)
            kernel.close()
            del kernel


@given(messages=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6), st.binary(max_size=80)), max_size=10))
def test_any_requests_get_one_reply_each(messages: list[tuple[int, int, bytes]]) -> None:
    """Whatever bytes a request has, the session answers it exactly once, if it is one that gets an answer, and goes on."""
    kernel = KernelStandIn(MemoryFileSystem({"small": b"content"}))
    try:
        answered = [(operation, inode, body) for operation, inode, body in messages if operation != Operation.INIT]
        for index, (operation, inode, body) in enumerate(answered):
            kernel.send(operation, body, inode=inode, unique=2 * index + 4)
        kernel.send(Operation.STATFS, unique=2)
        expected = [2 * index + 4 for index, each in enumerate(answered) if each[0] not in WITHOUT_REPLY]
        assert [kernel.receive()[0] for _ in range(len(expected) + 1)] == [*expected, 2]
    finally:
        kernel.close()
