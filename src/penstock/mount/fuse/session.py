"""Reads the kernel's requests, and has a ``FileSystem`` answer them."""

from __future__ import annotations

import errno
import os
import select
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.config import MIB
from penstock.errors import ClosedError, ConfigError
from penstock.mount.fuse import replies
from penstock.mount.fuse.answering import GONE, Device, InterruptedRequests, Outbox, operation_name
from penstock.mount.fuse.dispatching import Dispatcher, FileSystem
from penstock.mount.fuse.protocol import (
    BUFFER_BYTES,
    EPOCH_MINOR_MIN,
    MAJOR,
    MINOR_MAX,
    MINOR_MIN,
    Feature,
    Notification,
    Operation,
)
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.mount.fuse.protocol import RequestHeader
    from penstock.transport.loop import WatchedDescriptor

    AddReader: TypeAlias = Callable[..., WatchedDescriptor]

REQUEST_BYTES_MAX = 1 * MIB
"""Longest read, a multiple of ``PAGE_BYTES``. The system may have a lower limit, which is 1 MiB unless
``/proc/sys/fs/fuse/max_pages_limit`` says otherwise. Reads as long as this also need the read-ahead of the mount
(``Mounted.set_read_ahead``)."""

BACKGROUND_MAX = 128
"""Largest number of reads in flight that the kernel began itself, as read-ahead."""

REQUESTS_PER_TURN = 16
"""Requests that are read before an event loop goes on with its other work."""

_WANTED = (
    Feature.ASYNC_READ
    | Feature.PARALLEL_DIROPS
    | Feature.ABORT_ERROR
    | Feature.MAX_PAGES
    | Feature.INIT_EXT
    | Feature.DO_READDIRPLUS
)
"""``READDIRPLUS_AUTO`` is left out, so that the kernel asks for the attributes with all entries of a directory, and opening the
files afterwards needs no LOOKUP. Pages are dropped neither by time (``AUTO_INVAL_DATA``, which costs a GETATTR for each read
after the attributes' lifetime) nor by notification: each version of a file is a node of its own, so its pages stay right.
``ASYNC_DIO`` is left out: with it, a program that is killed while it reads with ``O_DIRECT`` is uninterruptible until the reply
comes, and no INTERRUPT is sent."""


@dataclass(frozen=True, slots=True)
class FuseStatistics:
    """Statistics of a session.

    Attributes:
        requests_count: Number of requests by operation.
        waiting_count: Number of requests that wait for their reply now.
        minor: Minor version of the protocol that is spoken; None before INIT.
    """

    requests_count: Mapping[str, int]
    waiting_count: int
    minor: int | None


class RequestReader:
    """Reads requests from the device, and has them answered. One thread at a time may use it.

    Args:
        device: The device.
        dispatcher: Has requests answered.
        interrupted: The requests of threads that have received a signal.

    Attributes:
        device: The device.
        interrupted: The requests of threads that have received a signal.
        is_stopping: Whether no more requests are to be read.
    """

    def __init__(self, device: Device, dispatcher: Dispatcher, interrupted: InterruptedRequests) -> None:
        self.device = device
        self._dispatcher = dispatcher
        buffer = bytearray(BUFFER_BYTES)
        self._buffers, self._view = [buffer], memoryview(buffer)
        self.interrupted = interrupted
        self.is_stopping = False

    def answer(self, *, count_max: int) -> bool:
        """Read requests as long as there are any, at most `count_max`; False if the connection has ended.

        Raises:
            OSError: The device cannot be read.
        """
        read, buffers, view, dispatch = self.device.read, self._buffers, self._view, self._dispatcher.dispatch
        for _ in range(count_max):
            if self.is_stopping:
                break
            try:
                length_bytes = read(buffers)
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            if not length_bytes:
                break
            dispatch(view[:length_bytes])
        return True


class LoopTurns:
    """Reads requests on the thread of an event loop, which has other work, too.

    Two threads of one interpreter take turns at it, and on two processors each turn wakes the other one up. A file system that
    is answered from an event loop of the same process saves that.

    If a defect in another callback ends the loop, the next one takes its place. If the loops are closed, the session ends.

    Args:
        requests: Reads and answers them.
        add_reader: Has the loop watch a descriptor; see ``penstock.transport.engine.add_reader``.
        end: Called once, on the loop's thread, when no more requests are read; with the error if the device cannot be read.
    """

    def __init__(
        self, requests: RequestReader, *, add_reader: AddReader, end: Callable[[Exception | None], object]
    ) -> None:
        self._requests = requests
        self._add_reader = add_reader
        self._end: Callable[[Exception | None], object] | None = end
        self._reader: WatchedDescriptor | None = None
        self._checks_soon = False
        self._lock = threading.RLock()  # the loop may end while it is asked to watch the device

    def start(self) -> None:
        """Begin; it may be called from any thread."""
        with self._lock:
            before = self._reader
            reader = self._add_reader(
                self._requests.device.fileno(), on_readable=self._on_readable, on_loop_end=self._on_loop_end
            )
            if self._reader is before:  # otherwise that loop has ended already, and the next one watches the device
                self._reader = reader

    def stop(self) -> None:
        """End soon, after ``requests.is_stopping`` was set; it may be called from any thread."""
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.call_later(0.0, self._finish)

    def _on_readable(self) -> None:
        requests = self._requests
        try:
            goes_on = requests.answer(count_max=REQUESTS_PER_TURN)
        except Exception as error:
            self._finish(error)
            return
        if not goes_on or requests.is_stopping:
            self._finish()
        elif requests.interrupted.wait_ms is not None:
            self._check_soon()

    def _check_soon(self) -> None:
        wait_ms, reader = self._requests.interrupted.wait_ms, self._reader
        if not self._checks_soon and wait_ms is not None and reader is not None:
            self._checks_soon = True
            reader.call_later(wait_ms / 1000, self._check)

    def _check(self) -> None:
        self._checks_soon = False
        if self._end is not None:
            self._requests.interrupted.check()
            self._check_soon()

    def _on_loop_end(self, by_defect: bool) -> None:
        if by_defect and not self._requests.is_stopping:
            self.start()
        else:
            self._finish()

    def _finish(self, failure: Exception | None = None) -> None:
        with self._lock:
            end, self._end = self._end, None
            reader, self._reader = self._reader, None
        if end is None:
            return
        if reader is not None:
            reader.remove()
        end(failure)


class FuseSession:
    """One mounted file system: a thread calls ``run``, which returns when the file system is unmounted, or ``start_on``.

    Args:
        descriptor: Open ``/dev/fuse`` that was mounted; the session closes it.
        file_system: Answers the requests. Its methods are called by the thread of ``run``, or by that of the event loop.
        request_bytes_max: Longest read in bytes; see ``REQUEST_BYTES_MAX``.

    Cost: no thread of its own; a buffer of 128 KiB and two descriptors.
    """

    def __init__(self, descriptor: int, file_system: FileSystem, *, request_bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._device = Device(descriptor)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._file_system = file_system
        self._request_bytes_max = request_bytes_max
        self._outbox = Outbox(self._device)
        self._dispatcher = Dispatcher(file_system, self._outbox)
        self._interrupted = InterruptedRequests(self._outbox)
        self._requests = RequestReader(self._device, self._dispatcher, self._interrupted)
        self._dispatcher.handlers[Operation.INIT] = self._init
        self._dispatcher.handlers[Operation.INTERRUPT] = lambda _, unique: self._interrupted.interrupted(unique)
        self._minor: int | None = None
        self._ready = threading.Event()
        self._lock = threading.RLock()  # a signal's handler may call stop() while this thread holds it
        self._turns: LoopTurns | None = None
        self._is_running = self._has_ended = False
        self._failure: ConfigError | None = None
        forks.register(self)

    def run(self) -> None:
        """Answer requests until the file system is unmounted or ``stop`` is called. Then close the file system.

        Raises:
            ConfigError: The kernel is too old.
            ClosedError: The session has ended already.
            OSError: ``/dev/fuse`` cannot be read.
        """
        self._begin()
        requests, interrupted, poll = self._requests, self._interrupted, select.poll()
        poll.register(self._device.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not requests.is_stopping:
                poll.poll(interrupted.wait_ms)
                if not requests.answer(count_max=1):  # another read, which finds nothing, costs as much as polling
                    break
                if interrupted.is_due:
                    interrupted.check()
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure

    def start_on(self, add_reader: AddReader, *, ended: Callable[[Exception | None], object]) -> None:
        """Answer requests on the thread of an event loop until the file system is unmounted, or ``stop`` is called.

        Args:
            add_reader: Has the loop watch a descriptor; see ``penstock.transport.engine.add_reader``.
            ended: Called on the loop's thread after the file system was closed, with what ``run`` would have raised.

        Raises:
            ClosedError: The session has ended already, or runs.
        """
        self._begin()

        def end(failure: Exception | None) -> None:
            try:
                self._end()
            except Exception as error:
                failure = failure or error
            ended(failure or self._failure)

        with self._lock:
            turns = self._turns = LoopTurns(self._requests, add_reader=add_reader, end=end)
        turns.start()
        if self._requests.is_stopping:
            turns.stop()

    def _begin(self) -> None:
        with self._lock:
            if self._is_running or self._has_ended:
                raise ClosedError("a session can run only once")
            self._is_running = True

    def stop(self) -> None:
        """Have ``run`` return soon. Programs that use the mount get ``ENOTCONN``; unmount first if they should not."""
        with self._lock:
            self._requests.is_stopping = True
            if not self._has_ended:
                os.eventfd_write(self._wake, 1)
            turns = self._turns
        if turns is not None:
            turns.stop()

    def close(self) -> None:
        """Stop, and drop everything if ``run`` was never called; otherwise ``run`` does so. Idempotent."""
        self.stop()
        with self._lock:
            never_ran = not self._is_running and not self._has_ended
            self._is_running = self._is_running or never_ran
        if never_ran:
            self._end()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until kernel and session have agreed, and programs can use the mount; whether they have."""
        self._ready.wait(timeout_s)
        return self._minor is not None

    def statistics(self) -> FuseStatistics:
        """Return the statistics of the session so far."""
        counts = {operation_name(number): count for number, count in sorted(self._dispatcher.counts.copy().items())}
        return FuseStatistics(requests_count=counts, waiting_count=len(self._outbox.waiting), minor=self._minor)

    def forget_names(self) -> bool:
        """Have the kernel look up every name again when it is used next, regardless of its lifetime.

        The kernel can also drop a single name or the pages of a file, but waits for locks that requests in flight hold; if the
        process were killed in that moment, it could never end. This notification waits for nothing.

        Returns:
            Whether the kernel can do that (Linux 6.16 and newer).
        """
        if self._minor is None or self._minor < EPOCH_MINOR_MIN:
            return False
        try:
            self._device.write([replies.notification(Notification.INCREMENT_EPOCH)])
        except OSError as error:
            if error.errno not in GONE:
                raise
        return True

    def after_fork_in_child(self) -> None:
        """Close the connection in a forked child: the mount must end with the process that serves it."""
        self._lock = threading.RLock()
        self._requests.is_stopping = self._has_ended = True
        self._outbox.abandon_all()
        self._device.close()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
        self._outbox.abandon_all()
        self._device.close()
        os.close(self._wake)
        self._turns = None
        self._dispatcher.handlers.clear()  # they refer to this object, and would keep its descriptor until a garbage collection
        self._ready.set()
        self._file_system.close()

    def _init(self, header: RequestHeader, major: int, minor: int, read_ahead_bytes_max: int, features: int) -> None:
        if major > MAJOR:
            self._device.write([replies.init_version(header.unique)])
            return
        if (major, minor) < (MAJOR, MINOR_MIN):
            self._device.write([replies.error(header.unique, errno.EPROTO)])
            self._requests.is_stopping = True
            self._failure = ConfigError(
                f"the kernel speaks FUSE {major}.{minor}, and a mount needs {MAJOR}.{MINOR_MIN}",
                hint="use Linux 5.4 or newer",
            )
            return
        minor = min(minor, MINOR_MAX)
        message = replies.init(
            header.unique,
            minor=minor,
            features=features & _WANTED,
            read_ahead_bytes=read_ahead_bytes_max,
            request_bytes_max=self._request_bytes_max,
            background_max=BACKGROUND_MAX,
        )
        self._device.write([message])
        self._minor = minor
        self._ready.set()
