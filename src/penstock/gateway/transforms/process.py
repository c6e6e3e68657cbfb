"""One worker process, as the gateway sees it: starts, calls, cancels and ends it. All of this runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.request import getproxies_environment

from penstock.config import KIB, MIB
from penstock.errors import PenstockError, WorkerDiedError
from penstock.gateway.transforms.messages import (
    CONTROL_BYTES_MAX,
    HEAD,
    FrameKind,
    TransformCall,
    WorkerFailure,
    checked_head,
    checked_sizes,
    frame,
    json_frame,
)
from penstock.gateway.transforms.program import ProgramDescription
from penstock.processes.group import OutputPipe, ProcessGroup
from penstock.processes.pool import CANCEL_S_MAX
from penstock.processes.starting import described_end, python_path, worker_command
from penstock.redaction import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.gateway.objects import ResultWriter
    from penstock.gateway.transforms.program import ProcessSetup
    from penstock.types import ObjectInfo

T = TypeVar("T")

log = logging.getLogger("penstock.gateway.transforms")

LINE_BYTES_MAX = 8 * KIB
"""Longest line of a worker's output that is logged whole, in bytes."""
PRINTING_PAUSE_S = 0.05
"""Time after each reading of the output, in seconds. A transform that floods it is slowed down to 300 KB/s."""
START_S_MAX = 60.0
"""Longest time in which a worker imports its program, in seconds."""
CLOSE_S_MAX = 1.0
"""Time in which a worker without a call may end by itself, in seconds."""
SEND_BUFFER_BYTES = 1 * MIB
TURN_BYTES = 1 * MIB
"""Bytes that are received before other tasks of the event loop have their turn."""
_SECRET_PREFIXES = ("AWS_", "PENSTOCK_GATEWAY_")
_NO_SECRETS = frozenset({"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE"})


class TransformFailedError(PenstockError):
    """A transform failed in its worker process.

    Attributes:
        failure: Error that the worker process reported.
    """

    FIELDS = ("failure",)
    failure: WorkerFailure


class TransformProcess:
    """One worker process; a ``PooledWorker``.

    Args:
        name: Name of the access point, for logs.
        setup: Program and limits that it receives first.

    Attributes:
        is_clean: Whether it waits for a call.
        calls_count: Number of calls that it has got.
        description: The program's description, as its process sent it; None before it has started.
    """

    def __init__(self, name: str, setup: ProcessSetup) -> None:
        self._name = name
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self.is_clean = False
        self.calls_count = 0
        self.description: ProgramDescription | None = None
        self._head = bytearray(HEAD.size)
        self._head_length = 0
        self._rest_bytes = 0  # bytes of the current frame that have not been received
        self._scratch: memoryview | None = None
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe2(os.O_CLOEXEC)
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._group = ProcessGroup(
                worker_command("penstock.gateway.transforms.worker", theirs),
                on_exit=self._end_receiving,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                env=worker_environment(),
                process_group=0,  # signals of a terminal go to the gateway, which decides
            )
        except BaseException:
            ours.close()
            os.close(output_read)
            raise
        finally:
            theirs.close()
            os.close(output_write)
        ours.setblocking(False)
        self._socket = ours
        self._output = OutputPipe(output_read, self._log_line, line_bytes_max=LINE_BYTES_MAX, pause_s=PRINTING_PAUSE_S)

    def _log_line(self, line: bytes) -> None:
        if text := printable(line.decode(errors="replace").rstrip()):
            log.info("%s[%d]: %s", self._name, self.process_id, text)

    @property
    def process_id(self) -> int:
        """Id of the process."""
        return self._group.process_id

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._group.exited.is_set()

    def watch(self, ended: Callable[[], object] | None) -> None:
        """Have `ended` called if the process ends, or sends something that nobody asked for; None takes it back."""
        self._loop.remove_reader(self._socket.fileno())
        if ended is not None:
            self._loop.add_reader(self._socket.fileno(), ended)

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Send the program, and wait until the worker has imported it.

        Raises:
            TransformFailedError: It cannot be imported, or its arguments are wrong.
            TimeoutError: The worker takes too long.
            WorkerDiedError: The process died.
        """
        async with asyncio.timeout(START_S_MAX):
            await self._send(frame(FrameKind.SETUP, pickle.dumps(self._setup)))
            await self._expect(FrameKind.READY)
            self.description = await self._parsed(ProgramDescription.of)
        self.is_clean = True

    async def call(self, call: TransformCall, output: ResultWriter) -> None:
        """Run one call, and write its output. If this is cancelled, ``settle`` must follow.

        Raises:
            TransformFailedError: The transform failed; the worker is ready for another call.
            WorkerDiedError: The process died.
        """
        self.is_clean = False
        self.calls_count += 1
        await self._send(json_frame(FrameKind.CALL, call._asdict()))
        while True:
            kind = await self._next_frame()
            if kind == FrameKind.DATA:
                await self._receive_data(output)
            elif kind == FrameKind.HEAD:
                headers, size_bytes = await self._parsed(checked_head)
                output.begin(headers, size_bytes=size_bytes)
            elif kind == FrameKind.END:
                await self._payload()
                self.is_clean = True
                return
            else:
                await self._raise(kind)

    async def sizes(self, infos: Sequence[ObjectInfo], arguments: dict[str, str]) -> list[int | None]:
        """Ask the transform for sizes of results.

        Raises:
            TransformFailedError: It failed.
            WorkerDiedError: The process died.
        """
        self.is_clean = False
        rows = [(info.key, info.size_bytes, info.etag, info.last_modified_s) for info in infos]
        await self._send(json_frame(FrameKind.SIZES, {"objects": rows, "arguments": arguments}))
        await self._expect(FrameKind.SIZES)
        sizes = await self._parsed(lambda values: checked_sizes(values, count=len(rows)))
        self.is_clean = True
        return sizes

    async def _expect(self, expected: FrameKind) -> None:
        kind = await self._next_frame()
        if kind != expected:
            await self._raise(kind)

    async def _parsed(self, parse: Callable[[Any], T]) -> T:
        """Return the payload of a frame, which may be anything: the code in the worker has the socket, too."""
        data = await self._payload()
        try:
            return parse(json.loads(data))
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            raise WorkerDiedError(f"a worker of {self._name} sent a frame without meaning") from None

    async def _raise(self, kind: int) -> None:
        if kind != FrameKind.ERROR:
            raise WorkerDiedError(f"a worker of {self._name} sent a frame of kind {kind}")
        failure = await self._parsed(WorkerFailure.of)
        self.is_clean = True
        raise TransformFailedError(f"{failure.kind}: {failure.message}", failure=failure)

    def cancel(self) -> None:
        """Tell the worker that the result is not wanted any more. It answers with an ERROR, or ends the call before that."""
        self._group.signal(signal.SIGUSR1)

    async def settle(self) -> bool:
        """Cancel the call whose task was cancelled, and wait a little for its end. Returns whether another call can follow."""
        if self.is_clean:
            return True
        self.cancel()
        try:
            async with asyncio.timeout(CANCEL_S_MAX):
                while await self._next_frame() not in (FrameKind.END, FrameKind.ERROR, FrameKind.SIZES):
                    pass
                await self._skip()
        except (TimeoutError, WorkerDiedError):
            return False
        self.is_clean = True
        return True

    # ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _next_frame(self) -> int:
        """Return the kind of the next frame. The unreceived part of the current one is skipped."""
        await self._skip()
        while self._head_length < HEAD.size:
            self._head_length += await self._receive_into([memoryview(self._head)[self._head_length :]])
        self._head_length = 0
        kind, self._rest_bytes = HEAD.unpack(self._head)
        if kind != FrameKind.DATA and self._rest_bytes > CONTROL_BYTES_MAX:
            raise WorkerDiedError(f"a worker of {self._name} sent a frame of {self._rest_bytes} bytes")
        return int(kind)

    async def _receive_data(self, output: ResultWriter) -> None:
        """Receive a frame of data directly into the memory of the result, and with its last bytes the head of the next."""
        turn_bytes = 0
        head = memoryview(self._head)
        while self._rest_bytes:
            target = output.buffer()[: self._rest_bytes]
            is_last = len(target) == self._rest_bytes
            count = await self._receive_into([target, head] if is_last else [target])
            self._head_length = max(0, count - len(target))
            count -= self._head_length
            self._rest_bytes -= count
            turn_bytes += count
            await output.filled(count)
            if turn_bytes >= TURN_BYTES:
                turn_bytes = 0
                await asyncio.sleep(0)

    async def _payload(self) -> bytes:
        data = bytearray(self._rest_bytes)
        view = memoryview(data)
        while self._rest_bytes:
            count = await self._receive_into([view[len(data) - self._rest_bytes :]])
            self._rest_bytes -= count
        return bytes(data)

    async def _skip(self) -> None:
        if self._rest_bytes and self._scratch is None:
            self._scratch = memoryview(bytearray(256 * KIB))
        while self._rest_bytes:
            assert self._scratch is not None
            self._rest_bytes -= await self._receive_into([self._scratch[: self._rest_bytes]])
        self._scratch = None

    async def _receive_into(self, targets: list[memoryview]) -> int:
        """Receive at least one byte into memory that is to be filled in this order, and return the number of bytes."""
        while True:
            try:
                count = self._socket.recvmsg_into(targets)[0]
            except BlockingIOError:
                await self._wait_readable()
                continue
            except OSError:
                count = 0
            if not count:
                raise await self._death()
            return count

    async def _wait_readable(self) -> None:
        """Wait until something has been received, or the process has ended."""
        waiter = self._loop.create_future()
        self._loop.add_reader(self._socket.fileno(), _wake, waiter)
        try:
            await waiter
        finally:
            if self._socket.fileno() >= 0:  # otherwise close() has done it, and the number may mean another file
                self._loop.remove_reader(self._socket.fileno())

    def _end_receiving(self) -> None:
        """Let receiving end after what has arrived: a child of the process may still hold the other end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    async def _send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError:
            raise await self._death() from None

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _death(self) -> WorkerDiedError:
        """Return the error for a process that has closed its end."""
        group = self._group
        await group.wait_exit(CLOSE_S_MAX)
        if not group.exited.is_set():
            return WorkerDiedError(f"the worker process {group.process_id} closed its socket")
        code = group.exit_code()
        return WorkerDiedError(
            f"the worker process {group.process_id} {described_end(code)}",
            process_id=group.process_id,
            exit_code=code,
        )

    async def close(self) -> None:
        """End the process: by itself if it waits for a call, otherwise by SIGKILL, with all processes that it started."""
        if self._group.is_released:
            return
        was_clean, self.is_clean = self.is_clean, False
        try:
            if was_clean:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                await self._group.wait_exit(CLOSE_S_MAX)
            self._group.kill()
            await self._group.wait_exit(CLOSE_S_MAX)  # freeing many gigabytes takes a while
        finally:
            if not self._group.is_released:  # by another caller, while this one waited
                self._group.release()
                self._loop.remove_reader(self._socket.fileno())
                self._socket.close()
                self._output.close()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def worker_environment() -> dict[str, str]:
    """Return the environment of worker processes: without the upstream's keys and those of the gateway's clients."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NO_SECRETS or not name.startswith(_SECRET_PREFIXES)
    }
    return {
        **kept,
        "AWS_EC2_METADATA_DISABLED": "true",
        "no_proxy": _without_proxy(),
        # The kernel takes longer to give memory than a transform to fill it, so freed memory stays for the next piece.
        "MALLOC_MMAP_THRESHOLD_": str(16 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(64 * MIB),
        "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space that RLIMIT_AS bounds
        "OPENCV_FOR_THREADS_NUM": "1",  # as many workers as there are cores are faster with one each
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
    }


def _without_proxy() -> str:
    """Return the hosts that no proxy is used for: also this one, where the gateway's internal endpoint is."""
    known = getproxies_environment().get("no", "")
    return known if known.strip() == "*" else ",".join(filter(None, (known, "127.0.0.1")))
