"""A worker process: ``python -m penstock.gateway.transforms.worker DESCRIPTOR PARENT``. It runs one call at a time.

Signals of a terminal or a service manager go to whole groups of processes. A worker ignores them: the gateway decides when it
ends, closes its socket, and kills it if necessary. SIGUSR1 cancels the running call. It only sets a flag, which is checked
whenever the transform reads or yields, so that no exception appears at an arbitrary line.

Small pieces of output are gathered, and large ones are sent as they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.compose import connect
from penstock.config import KIB, MIB, FetchConfig, share_machine
from penstock.errors import ConfigError, DataError, StoreError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.authoring import view_of
from penstock.gateway.transforms.messages import (
    DATA_BYTES_MAX,
    HEAD,
    MESSAGE_CHARACTERS_MAX,
    TRACEBACK_CHARACTERS_MAX,
    FrameKind,
    TransformCall,
    WorkerFailure,
    json_frame,
)
from penstock.gateway.transforms.program import load_program
from penstock.gateway.transforms.reading import SourceVersion, VersionReader
from penstock.processes.channel import receive_exactly
from penstock.processes.starting import connect_to_parent, watch_parent
from penstock.system.tracebacks import shorten, users_text
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from types import FrameType

    from penstock.gateway.transforms.program import LoadedProgram, ProcessSetup
    from penstock.store import Store
    from penstock.types import Buffer

EXIT_S_MAX = 2.0
"""Time for an orderly end after the gateway is gone, in seconds."""
STORES_MAX = 8
"""Stores that stay open between calls; they share the process's connections."""


GATHER_BYTES_MAX = 256 * KIB
"""Bytes that are gathered before they are sent: a frame costs about 15 µs at both ends, and copying 256 KiB as much."""

GATHER_PIECE_BYTES_MAX = 32 * KIB
"""Longest piece that is copied; a longer one is sent from where it is."""

GATHER_PIECES_MAX = 16 * 1024
"""Most pieces that are gathered, however short: an object of bytes takes 33 bytes more than its contents."""

GATHER_S_MAX = 0.05
"""Longest time for which gathered bytes wait."""


class OutputSender:
    """Sends frames to the gateway: the main thread's, and from a timer pieces that have waited for too long.

    Small pieces are gathered in a queue, which the main thread fills without a lock; the lock is held while something is sent.

    Args:
        end: The socket, which blocks.
        check: Called before each piece; raises if the call was cancelled.

    Cost: One thread, which wakes only while bytes wait. A small piece costs a copy and about 0.15 µs.
    """

    def __init__(self, end: socket.socket, *, check: Callable[[], None]) -> None:
        self._socket = end
        self._check = check
        self._gathered: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._is_armed = False  # whether the timer knows that something waits
        self._armed = threading.Event()
        self._timer = threading.Thread(target=self._flush_late, name="penstock-transform-flush", daemon=True)
        self._timer.start()

    def send_frame(self, data: bytes) -> None:
        """Send a whole frame, after all output before it."""
        with self._lock:
            self._send(data)

    def send_output(self, pieces: Iterable[Buffer]) -> int:
        """Send the pieces of an output, and return their length together. No piece is referred to when the next is requested.

        Raises:
            WrongOutputError: A piece is not bytes.
            OSError: The gateway is gone.
        """
        check, gathered = self._check, self._gathered
        sent_bytes = waiting_bytes = 0
        for piece in pieces:
            check()
            if type(piece) is not bytes:
                view = view_of(piece)
                piece = bytes(view) if view.nbytes <= GATHER_PIECE_BYTES_MAX else view.cast("B")  # noqa: PLW2901
            length = len(piece)
            sent_bytes += length
            if length > GATHER_PIECE_BYTES_MAX:
                with self._lock:
                    self._send_long(memoryview(piece))
                waiting_bytes = 0
                continue
            gathered.append(piece)  # type: ignore[arg-type]
            waiting_bytes += length
            if waiting_bytes >= GATHER_BYTES_MAX or len(gathered) >= GATHER_PIECES_MAX:
                self.flush()
                waiting_bytes = 0
            elif not self._is_armed:
                self._is_armed = True
                self._armed.set()
        return sent_bytes

    def flush(self) -> None:
        """Send the gathered pieces."""
        with self._lock:
            self._send(b"")

    def drop(self) -> None:
        """Forget the gathered pieces."""
        with self._lock:
            self._gathered.clear()

    def _flush_late(self) -> None:
        """Send pieces that have waited for too long. The thread ends with the process."""
        pause = threading.Event()
        while self._armed.wait():
            self._armed.clear()
            pause.wait(GATHER_S_MAX)
            self._is_armed = False  # before sending, so that a piece that comes meanwhile arms it again
            try:
                self.flush()
            except OSError:
                return  # the gateway is gone, and the main thread will notice

    def _taken(self) -> bytes:
        """Take the gathered pieces. The main thread may append meanwhile."""
        gathered = self._gathered
        return b"".join([gathered.popleft() for _ in range(len(gathered))])

    def _send(self, after: bytes) -> None:
        """Send the gathered pieces, and a frame after them, in one call."""
        data = self._taken()
        pieces: list[Buffer] = [HEAD.pack(FrameKind.DATA, len(data)), data] if data else []
        if after:
            pieces.append(after)
        if pieces:
            _send_all(self._socket, pieces)

    def _send_long(self, rest: memoryview) -> None:
        """Send a piece that is not copied, in one call with the pieces gathered before it."""
        before = self._taken()
        while rest:
            part, rest = rest[: DATA_BYTES_MAX - len(before)], rest[DATA_BYTES_MAX - len(before) :]
            _send_all(self._socket, [HEAD.pack(FrameKind.DATA, len(before) + len(part)), before, part])
            before = b""


def _send_all(end: socket.socket, pieces: list[Buffer]) -> None:
    sent = end.sendmsg(pieces)
    if sent == sum(map(len, pieces)):
        return
    for piece in pieces:
        if sent >= len(piece):
            sent -= len(piece)
        else:
            end.sendall(memoryview(piece)[sent:])
            sent = 0


class CallCancelled(BaseException):
    """The gateway does not want the result any more. It passes through ``except Exception`` of a transform."""


class WorkerServer:
    """Runs the calls that come over a socket.

    Args:
        end: The socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._is_running = False
        self._is_cancelled = False
        self._stores: OrderedDict[str, Store] = OrderedDict()
        self._sender = OutputSender(end, check=self.check)
        signal.signal(signal.SIGUSR1, self._cancel)

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self._is_cancelled = self._is_running  # a signal that comes after the end of its call means nothing

    def check(self) -> None:
        """Raise ``CallCancelled`` if the call was cancelled."""
        if self._is_cancelled:
            raise CallCancelled

    def run(self) -> None:
        """Import the program, and serve calls until the gateway closes the socket."""
        program = self._start()
        if program is None:
            return
        while (received := self._receive()) is not None:
            kind, payload = received
            if kind == FrameKind.CALL:
                self._run_call(program, TransformCall(**json.loads(payload)))
            elif kind == FrameKind.SIZES:
                self._tell_sizes(program, json.loads(payload))

    def _start(self) -> LoadedProgram | None:
        received = self._receive()
        if received is None:
            return None
        try:
            setup: ProcessSetup = pickle.loads(received[1])  # from the gateway, over a socket that only it has
            share_machine(setup.processes_count)
            _limit(setup.memory_bytes_max)
            program = load_program(setup.program)
            self._sender.send_frame(json_frame(FrameKind.READY, program.description()._asdict()))
        except BaseException as error:
            self._fail(error)
            return None
        return program

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_call(self, program: LoadedProgram, call: TransformCall) -> None:
        self._is_cancelled, self._is_running = False, True
        failure: BaseException | None = None
        try:
            self._produce(program, call)
        except BaseException as error:  # also SystemExit, which a library may raise
            failure = error
        self._is_running = False
        if failure is None:
            self._sender.send_frame(json_frame(FrameKind.END, None))
        else:
            self._sender.drop()
            self._fail(failure)

    def _produce(self, program: LoadedProgram, call: TransformCall) -> None:
        with contextlib.ExitStack() as stack:
            reader = VersionReader(self._store(call.url), SourceVersion(*call.source), check=self.check)
            stack.enter_context(reader)
            response = program.respond(reader, call.arguments, span=call.span)
            stack.callback(response.close)
            size_bytes = response.size_bytes
            first = list(islice(response.pieces, 1))  # an error before the first byte is an answer without a head
            head = {"headers": response.headers, "size_bytes": size_bytes}
            self._sender.send_frame(json_frame(FrameKind.HEAD, head))
            sent_bytes = self._sender.send_output(first)
            first.clear()
            sent_bytes += self._sender.send_output(response.pieces)
            if size_bytes is not None and sent_bytes != size_bytes:
                raise DataError(f"the transform made {sent_bytes} bytes, and said that it would make {size_bytes}")

    def _tell_sizes(self, program: LoadedProgram, question: dict[str, Any]) -> None:
        try:
            arguments = question["arguments"]
            sizes = [program.size_bytes(ObjectInfo(*row), arguments) for row in question["objects"]]
        except Exception as error:
            self._fail(error)
        else:
            self._sender.send_frame(json_frame(FrameKind.SIZES, sizes))

    def _store(self, url: str) -> Store:
        if url in self._stores:
            self._stores.move_to_end(url)
            return self._stores[url]
        while len(self._stores) >= STORES_MAX:
            self._stores.popitem(last=False)[1].close()
        store = self._stores[url] = connect(url, fetch=FetchConfig(budget_bytes_max=_budget_bytes()))
        return store

    # ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fail(self, error: BaseException) -> None:
        self._sender.send_frame(json_frame(FrameKind.ERROR, _described(error)._asdict()))

    def _receive(self) -> tuple[int, bytearray] | None:
        """Return the next frame; None if the gateway has closed its end."""
        head = receive_exactly(self._socket, HEAD.size)
        if head is None:
            return None
        kind, length = HEAD.unpack(head)
        payload = receive_exactly(self._socket, length)
        return None if payload is None else (kind, payload)


def _described(error: BaseException) -> WorkerFailure:
    """Describe an error, as far as memory allows."""
    if isinstance(error, MemoryError):
        text = "".join(traceback.format_tb(error.__traceback__, limit=-4))
        return WorkerFailure("MemoryError", str(error) or "out of memory", text)
    shorten(error)
    shown = error.__cause__ if isinstance(error, ConfigError) and error.__cause__ is not None else error
    text = ""
    if not isinstance(error, CallCancelled):
        text = users_text(shown)
        if not text and shown.__traceback__ is not None:
            text = "".join(traceback.format_exception(shown))
    refusal = (error.code, error.message, error.status) if isinstance(error, S3Error) else None
    return WorkerFailure(
        type(error).__name__,
        str(error)[:MESSAGE_CHARACTERS_MAX],
        text[-TRACEBACK_CHARACTERS_MAX:],
        isinstance(error, StoreError),
        refusal,
    )


def _limit(memory_bytes_max: int) -> None:
    """Bound this process's address space, and have no core written if it crashes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = memory_bytes_max if hard == resource.RLIM_INFINITY else min(memory_bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _budget_bytes() -> int:
    """Return how many bytes may be read ahead: an eighth of what this process may use."""
    bound, _ = resource.getrlimit(resource.RLIMIT_AS)
    return max(8 * MIB, min(128 * MIB, bound // 8 if bound != resource.RLIM_INFINITY else 128 * MIB))


def main(arguments: list[str]) -> None:
    """Run a worker process.

    Args:
        arguments: Descriptor of the socket, and id of the parent process, or 0 if this process must not end with it.
    """
    faulthandler.enable()
    end = connect_to_parent(*arguments, ignored=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    watch_parent(end, lambda: os.killpg(0, signal.SIGKILL), grace_s=EXIT_S_MAX)
    with contextlib.suppress(OSError):  # the gateway is gone
        WorkerServer(end).run()


if __name__ == "__main__":
    main(sys.argv[1:])
