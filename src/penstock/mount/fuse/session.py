"""Reads the kernel's requests, and has a ``FileSystem`` answer them."""

from __future__ import annotations

import errno
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import MIB, check_whole
from penstock.errors import ClosedError, ConfigError
from penstock.mount.fuse import replies
from penstock.mount.fuse.answering import GONE, Device, InterruptedRequests, Outbox, operation_name
from penstock.mount.fuse.dispatching import Dispatcher, FileSystem
from penstock.mount.fuse.protocol import (
    BACKING_CLOSE,
    BACKING_OPEN,
    EPOCH_MINOR_MIN,
    MAJOR,
    MINOR_MAX,
    MINOR_MIN,
    PAGE_BYTES,
    Feature,
    Notification,
    Operation,
)
from penstock.mount.fuse.turns import LoopTurns, RequestReader, ThreadTurns
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.mount.fuse.protocol import InitRequest, InterruptRequest, RequestHeader
    from penstock.mount.fuse.turns import AddReader

_WANTED = (
    Feature.ASYNC_READ
    | Feature.PARALLEL_DIROPS
    | Feature.ABORT_ERROR
    | Feature.MAX_PAGES
    | Feature.INIT_EXT
    | Feature.DIRECT_IO_ALLOW_MMAP
    | Feature.DO_READDIRPLUS
    | Feature.PASSTHROUGH
)
"""Pages are dropped neither by time (``AUTO_INVAL_DATA``, which costs a GETATTR for each read after the attributes' lifetime)
nor by notification: each version of a file is a node of its own, so its pages stay right. ``ASYNC_DIO`` is left out: with it, a
program that is killed while it reads with ``O_DIRECT`` is uninterruptible until the reply comes, and no INTERRUPT is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseConfig:
    """What a session agrees on with the kernel.

    Attributes:
        request_bytes_max: Longest read, in bytes, a multiple of 4 096. The system may have a lower limit, which is 1 MiB unless
            ``/proc/sys/fs/fuse/max_pages_limit`` says otherwise. Reads as long as this also need the read-ahead of the mount
            (``Mounted.set_read_ahead``).
        background_max: Largest number of reads in flight that the kernel began itself, as read-ahead.
        always_reads_attributes: Whether the kernel asks for the attributes with all entries of a directory, so that opening the
            files afterwards needs no LOOKUP; otherwise only if programs look at entries while they read the directory.
    """

    request_bytes_max: int = 1 * MIB
    background_max: int = 128
    always_reads_attributes: bool = True

    def __post_init__(self) -> None:
        check_whole("request_bytes_max", self.request_bytes_max, PAGE_BYTES, 16 * MIB)
        check_whole("background_max", self.background_max, 1, 65_535)
        if self.request_bytes_max % PAGE_BYTES:
            raise ConfigError(f"request_bytes_max={self.request_bytes_max} must be a multiple of {PAGE_BYTES}")


@dataclass(frozen=True, slots=True)
class FuseStatistics:
    """What a session has done so far.

    Attributes:
        requests_count: Number of requests by operation.
        waiting_count: Number of requests that wait for their reply now.
        minor: Minor version of the protocol that is spoken; None before INIT.
    """

    requests_count: Mapping[str, int]
    waiting_count: int
    minor: int | None


class FuseSession:
    """One mounted file system: a thread calls ``run``, which returns when the file system is unmounted, or ``start_on``.

    Args:
        descriptor: Open ``/dev/fuse`` that was mounted; the session closes it.
        file_system: Answers the requests. Its methods are called by the thread of ``run``, or by that of the event loop.
        config: Limits and options that are agreed on with the kernel.

    Cost: no thread of its own; a buffer of 128 KiB and two descriptors.
    """

    def __init__(self, descriptor: int, file_system: FileSystem, *, config: FuseConfig | None = None) -> None:
        self._device = Device(descriptor)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._file_system = file_system
        self._config = config or FuseConfig()
        self._outbox = Outbox(self._device)
        self._dispatcher = Dispatcher(file_system, self._outbox)
        self._interrupted = InterruptedRequests(self._outbox)
        self._requests = RequestReader(self._device, self._dispatcher, self._interrupted)
        self._dispatcher.handlers[Operation.INIT] = self._init
        self._dispatcher.handlers[Operation.INTERRUPT] = self._interrupt
        self._minor: int | None = None
        self._features = 0
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
        try:
            ThreadTurns(self._requests, self._wake).run()
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
            is_mine = not self._is_running and not self._has_ended
            self._is_running = self._is_running or is_mine
        if is_mine:
            self._end()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until kernel and session have agreed, and programs can use the mount; whether they have."""
        self._ready.wait(timeout_s)
        return self._minor is not None

    def statistics(self) -> FuseStatistics:
        """Return what the session has done so far."""
        counts = {operation_name(number): count for number, count in sorted(self._dispatcher.counts.copy().items())}
        return FuseStatistics(requests_count=counts, waiting_count=len(self._outbox.waiting), minor=self._minor)

    def forget_attributes(self, inode: int) -> None:
        """Have the kernel ask for the attributes of a node when they are used next, whatever lifetime they were given."""
        self._notify(replies.invalidate_inode(Notification.INVALIDATE_INODE, inode))

    def forget_names(self) -> bool:
        """Have the kernel look up every name anew when it is used next, whatever lifetime it was given.

        The kernel can also drop a single name or the pages of a file, but waits for locks that requests in flight hold; if the
        process were killed in that moment, it could never end. These two notifications wait for nothing.

        Returns:
            Whether the kernel can do that (Linux 6.16 and newer).
        """
        if self._minor is None or self._minor < EPOCH_MINOR_MIN:
            return False
        self._notify(replies.notification(Notification.INCREMENT_EPOCH))
        return True

    def open_backing(self, descriptor: int) -> int | None:
        """Register a file from which the kernel may read for ``Reply.opened(backing=)``; `descriptor` may be closed then.

        Returns:
            Its number, or None if the system does not permit this: it needs Linux 6.9 with passthrough, root, and a file of a
            file system that the kernel can read from directly.
        """
        if self._minor is None or not self._features & Feature.PASSTHROUGH:
            return None
        try:
            return self._device.control(BACKING_OPEN, struct.pack("=iI8x", descriptor, 0))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ELOOP, *GONE):
                return None
            raise

    def close_backing(self, number: int) -> None:
        """Forget a registered file. Files that are open with it stay open."""
        with suppress(OSError):  # the connection has ended
            self._device.control(BACKING_CLOSE, struct.pack("=I", number))

    def after_fork_in_child(self) -> None:
        """Close the connection in a forked child: the mount must end with the process that serves it."""
        self._lock = threading.RLock()
        self._requests.is_stopping = self._has_ended = True
        self._outbox.abandon_all()
        self._device.close()

    def _notify(self, message: bytes) -> None:
        try:
            self._device.write([message])
        except OSError as error:
            if error.errno != errno.ENOENT and error.errno not in GONE:  # ENOENT: the kernel does not know the node
                raise

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

    def _init(self, header: RequestHeader, body: InitRequest) -> None:
        if body.major > MAJOR:
            self._device.write([replies.init_version(header.unique)])
            return
        if (body.major, body.minor) < (MAJOR, MINOR_MIN):
            self._device.write([replies.error(header.unique, errno.EPROTO)])
            self._requests.is_stopping = True
            self._failure = ConfigError(
                f"the kernel speaks FUSE {body.major}.{body.minor}, and a mount needs {MAJOR}.{MINOR_MIN}",
                hint="use Linux 5.4 or newer",
            )
            return
        minor = min(body.minor, MINOR_MAX)
        wanted = _WANTED if self._config.always_reads_attributes else _WANTED | Feature.READDIRPLUS_AUTO
        self._features = body.features & wanted
        message = replies.init(
            header.unique,
            minor=minor,
            features=self._features,
            read_ahead_bytes=body.read_ahead_bytes_max,
            request_bytes_max=self._config.request_bytes_max,
            background_max=self._config.background_max,
        )
        self._device.write([message])
        self._minor = minor
        self._ready.set()

    def _interrupt(self, _header: RequestHeader, body: InterruptRequest) -> None:
        self._interrupted.interrupted(body.unique)
