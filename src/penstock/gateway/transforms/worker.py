"""A worker process: ``python -m penstock.gateway.transforms.worker DESCRIPTOR PARENT``. It runs one call at a time.

Signals of a terminal or a service manager go to whole groups of processes. A worker ignores them: the gateway decides when it
ends, closes its socket, and kills it if need be. SIGUSR1 cancels the call that is running; it only sets a flag, which
is looked at whenever the transform reads or yields, so that no exception appears at an arbitrary line.
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
import traceback
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.compose import connect
from penstock.config import MIB, FetchConfig, share_machine
from penstock.errors import ConfigError, DataError, StoreError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.messages import (
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
from penstock.gateway.transforms.sending import OutputSender
from penstock.processes.channel import receive_exactly
from penstock.processes.child import connect_to_parent, watch_parent
from penstock.system.tracebacks import shorten, users_text
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from penstock.gateway.transforms.program import LoadedProgram, ProcessSetup
    from penstock.store import Store

EXIT_S_MAX = 2.0
"""Time for an orderly end after the gateway is gone, in seconds."""
STORES_MAX = 8
"""Stores that stay open between calls; they share the process's connections."""


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
        version = SourceVersion(call.key, call.stored_key, call.size_bytes, call.etag, call.headers)
        with contextlib.ExitStack() as stack:
            reader = VersionReader(self._store(call.url), version, check=self.check)
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
