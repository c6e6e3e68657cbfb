"""The open ``/dev/fuse``, and replies to it that any thread may send, each exactly once.

A program that is killed while it waits for a reply can die only when it gets one: ``InterruptedRequests`` answers for it.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from penstock.mount.fuse import replies
from penstock.mount.fuse.protocol import ERRNO_MAX, NAME_BYTES_MAX, OpenFlag, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.mount.nodes import Attributes
    from penstock.types import Buffer

GONE = frozenset({errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN, errno.EPERM})
"""What reading and writing says once the file system is unmounted, or its connection was aborted."""


class Device:
    """Owns the descriptor of one connection to the kernel.

    A reply may be written by any thread at any time, also while the device is being closed. A closed descriptor's number is
    soon that of another file, into which a late reply must not be written. Therefore ``close`` puts ``/dev/null`` in its place,
    and the number itself is given back when nothing refers to this object.
    """

    __slots__ = ("__weakref__", "_number", "is_open")

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        self.is_open = True
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._number

    def read(self, buffers: list[bytearray]) -> int:
        """Read one request; 0 if there is none after all.

        Raises:
            OSError: The connection has ended (``GONE``), or cannot be read.
        """
        try:
            return os.readv(self._number, buffers)
        except OSError as error:
            if error.errno in (
                errno.EAGAIN,
                errno.EINTR,
                errno.ENOENT,
            ):  # ENOENT: the program gave up while it was read
                return 0
            raise

    def write(self, message: list[bytes | bytearray | memoryview]) -> None:
        """Write one reply or notification.

        Raises:
            OSError: Nobody waits for it (``ENOENT``), the connection has ended, or the message is refused.
        """
        os.writev(self._number, message)

    def close(self) -> None:
        """End the connection: programs that wait get ``ECONNABORTED``, and later ones ``ENOTCONN``."""
        if self.is_open:
            self.is_open = False
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.dup2(null, self._number, inheritable=False)
            finally:
                os.close(null)

    def __del__(self) -> None:
        os.close(self._number)


PIECES_MAX = 1000
"""Most pieces that one reply is written from; the system takes 1 024 (``IOV_MAX``). More are joined first."""

_log = logging.getLogger("penstock")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answers_in_any_case(
    method: Callable[Concatenate[KernelReply, _P], _R],
) -> Callable[Concatenate[KernelReply, _P], _R]:
    """Reply with ``EIO`` if a method of ``KernelReply`` raises, or the program would wait for ever."""

    @wraps(method)
    def answered(reply: KernelReply, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(reply, *args, **kwargs)
        except Exception:
            if reply.is_waiting:
                reply.error(errno.EIO)
            raise

    return answered


class Outbox:
    """The requests that wait for a reply, and the way to the kernel.

    Taking a request out of ``waiting`` is one operation of a dictionary, which no other thread can interrupt. So the thread
    that succeeds is the only one that sends, and no lock is held while data are copied.
    """

    __slots__ = ("_device", "_has_warned", "waiting")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._has_warned = False
        self.waiting: dict[int, KernelReply] = {}

    def send(self, reply: KernelReply, message: list[bytes | bytearray | memoryview]) -> bool:
        """Send a reply unless its request has been answered; whether the kernel took it."""
        if self.waiting.pop(reply.unique, None) is None:
            self._refuse(reply)
            return False
        try:
            self._device.write(message)
        except Exception as error:
            if isinstance(error, OSError) and (error.errno == errno.ENOENT or error.errno in GONE):
                return False
            self._replace(reply, error)
            if isinstance(error, OSError):
                return False
            raise
        return self._device.is_open

    def abandon(self, reply: KernelReply) -> None:
        """Answer a request with ``EINTR``, because the program that waits is being killed; the real reply is dropped."""
        reply.is_abandoned = True
        if reply.is_waiting:
            reply.error(errno.EINTR)

    def abandon_all(self) -> None:
        """Drop all requests; their replies are ignored. The connection has ended."""
        for reply in list(self.waiting.values()):
            reply.is_abandoned = True
        self.waiting.clear()

    def _refuse(self, reply: KernelReply) -> None:
        if not reply.is_abandoned and not self._has_warned:
            self._has_warned = True
            _log.error("A request (%s) was answered twice; the second answer was dropped.", reply.described())

    def _replace(self, reply: KernelReply, error: Exception) -> None:
        """A reply could not be written: the kernel may wait still."""
        _log.error("The reply to %s could not be written: %s.", reply.described(), error)
        try:
            self._device.write([replies.error(reply.unique, errno.EIO)])
        except OSError as again:
            if again.errno != errno.ENOENT and again.errno not in GONE:
                _log.error("The kernel also refused to be told so: %s.", again)


class KernelReply:
    """The reply to one request of the kernel. One method is called once, on any thread.

    A second call is refused and logged. Arguments of a method may be dropped or changed as soon as it returns.

    Attributes:
        unique: Number of the request.
        operation: Operation that the request asks for.
        thread_id: Thread that waits; 0 if it cannot be seen from here.
        is_abandoned: Whether the program no longer waits.
    """

    __slots__ = ("_outbox", "_room_bytes", "is_abandoned", "operation", "thread_id", "unique")

    def __init__(self, outbox: Outbox, *, unique: int, operation: int, thread_id: int, room_bytes: int) -> None:
        self._outbox = outbox
        self._room_bytes = room_bytes
        self.unique = unique
        self.operation = operation
        self.thread_id = thread_id
        self.is_abandoned = False
        outbox.waiting[unique] = self

    @property
    def is_waiting(self) -> bool:
        """Whether the request has not been answered yet."""
        return self.unique in self._outbox.waiting

    @property
    def entries_max(self) -> int:
        """Largest number of entries that could fit into the reply to READDIR or READDIRPLUS."""
        plus = self.operation == Operation.READDIRPLUS
        return self._room_bytes // (replies.NAMED_PLUS_BYTES_MIN if plus else replies.NAMED_BYTES_MIN)

    def error(self, number: int) -> None:
        """Reply with an errno."""
        self._outbox.send(self, [replies.error(self.unique, number if 0 < number <= ERRNO_MAX else errno.EIO)])

    def ok(self) -> None:
        """Reply without a body."""
        self._outbox.send(self, [replies.error(self.unique, 0)])

    @_answers_in_any_case
    def entry(self, attributes: Attributes, *, lifetime_s: float) -> bool:
        """Reply to LOOKUP. The kernel may use the name and the attributes for `lifetime_s` seconds.

        Inode 0 says that the name does not exist, and that the kernel may remember this. Any other inode gives the kernel a
        reference, which it drops by ``forget``, possibly before this call returns: count it before the call. Returns False if
        the kernel no longer waited, and so took no reference.
        """
        return self._outbox.send(self, [replies.entry(self.unique, attributes, lifetime_s)])

    @_answers_in_any_case
    def attributes(self, attributes: Attributes, *, lifetime_s: float) -> None:
        """Reply to GETATTR."""
        self._outbox.send(self, [replies.attributes(self.unique, attributes, lifetime_s)])

    @_answers_in_any_case
    def opened(self, handle: int, *, keeps_cache: bool = False) -> bool:
        """Reply to OPEN and OPENDIR; `keeps_cache` keeps the kernel's pages of the file.

        For a directory, `keeps_cache` lets the kernel remember its entries, and use those that it remembers. Returns False if
        the kernel no longer waited: the handle is not open, and will not be released.
        """
        flags = OpenFlag.KEEP_CACHE.value if keeps_cache else 0
        if self.operation == Operation.OPENDIR:
            flags = flags and flags | OpenFlag.CACHE_DIR.value
        return self._outbox.send(self, [replies.opened(self.unique, handle, flags)])

    @_answers_in_any_case
    def data(self, pieces: Sequence[Buffer]) -> None:
        """Reply to READ with the bytes of all pieces, which are not copied."""
        if len(pieces) > PIECES_MAX:
            pieces = [b"".join(pieces)]
        length_bytes = sum(map(len, pieces))
        if length_bytes > self._room_bytes:
            _log.error("%s was answered with %d bytes.", self.described(), length_bytes)
            self.error(errno.EIO)
            return
        self._outbox.send(self, [replies.data_head(self.unique, length_bytes), *pieces])

    @_answers_in_any_case
    def directory(self, entries: Iterable[tuple[Attributes, bytes, int]], *, lifetime_s: float) -> int:
        """Reply to READDIR and READDIRPLUS: entries with their names and the offset after each; none at the end.

        Entries are taken until the reply is full. Returns how many of them gave the kernel a reference, which is 0 for READDIR:
        the first ones, but for ``.`` and ``..``, which give none. As with ``entry``, count before the call, and take back
        afterwards what was too much.
        """
        count = 0
        body: bytes | bytearray
        if self.operation == Operation.READDIRPLUS:
            body, count = replies.directory_plus(entries, room_bytes=self._room_bytes, lifetime_s=lifetime_s)
        else:
            body = replies.directory(entries, room_bytes=self._room_bytes)
        return count if self._outbox.send(self, [replies.data_head(self.unique, len(body)), body]) else 0

    @_answers_in_any_case
    def extended(self, value: bytes) -> None:
        """Reply to GETXATTR and LISTXATTR with the value or, if there is no room for it, with its length or ``ERANGE``."""
        if not self._room_bytes:
            self._outbox.send(self, [replies.length(self.unique, len(value))])
        elif len(value) > self._room_bytes:
            self.error(errno.ERANGE)
        else:
            self._outbox.send(self, [replies.data_head(self.unique, len(value)), value])

    @_answers_in_any_case
    def statistics(self, *, blocks: int, files: int, block_bytes: int) -> None:
        """Reply to STATFS."""
        body = replies.statistics(
            self.unique, blocks=blocks, files=files, block_bytes=block_bytes, name_bytes_max=NAME_BYTES_MAX
        )
        self._outbox.send(self, [body])

    def described(self) -> str:
        """Return the request in words, for messages."""
        return f"{operation_name(self.operation)}, request {self.unique} of {self._room_bytes} bytes"


def operation_name(number: int) -> str:
    """Return the name of an operation, or its number if it has none."""
    try:
        return Operation(number).name
    except ValueError:
        return f"operation {number}"


CHECK_INTERVAL_MS = 100
"""Time between two looks at a thread that received a signal and lives on; the kernel does not tell of later signals."""


def _bit(number: int) -> int:
    return 1 << (number - 1)


_KILL = _bit(signal.SIGKILL)
_HARMLESS = sum(
    _bit(number)
    for number in (
        *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    )
)
_MASKS = (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")


def is_fatal(status: bytes) -> bool:
    """Whether a signal is pending that ends the thread.

    Args:
        status: Contents of the thread's ``/proc/ID/status``.
    """
    masks = {line[:7]: int(line[7:], 16) for line in status.splitlines() if line[:7] in _MASKS}
    own, shared, blocked, ignored, caught = (masks.get(name, 0) for name in _MASKS)
    pending = own | shared
    return bool(pending & _KILL or pending & ~(blocked | ignored | caught | _HARMLESS))


def is_dying(thread_id: int) -> bool:
    """Whether a thread has ended, or is about to end because of a signal; False if it cannot be seen from here."""
    if not thread_id:
        return False
    try:
        return is_fatal(Path(f"/proc/{thread_id}/status").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


class InterruptedRequests:
    """The requests whose threads have received a signal, and were still alive then. Used only by the session's thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: dict[int, KernelReply] = {}
        self._next_s = 0.0

    def interrupted(self, unique: int) -> None:
        """A thread that waits for the reply to a request has received a signal."""
        reply = self._outbox.waiting.get(unique)
        if reply is not None:
            self._watched[unique] = reply
            self._look_at(unique, reply)

    def check(self) -> None:
        """Answer the requests of threads that are about to end, and forget those that were answered."""
        for unique, reply in list(self._watched.items()):
            self._look_at(unique, reply)
        self._next_s = time.monotonic() + CHECK_INTERVAL_MS / 1000

    def _look_at(self, unique: int, reply: KernelReply) -> None:
        if reply.is_waiting and is_dying(reply.thread_id):
            self._outbox.abandon(reply)
        if not reply.is_waiting:
            del self._watched[unique]

    @property
    def wait_ms(self) -> int | None:
        """Longest time until the next ``check`` in milliseconds; None if none is needed."""
        return CHECK_INTERVAL_MS if self._watched else None

    @property
    def is_due(self) -> bool:
        """Whether it is time for ``check``."""
        return bool(self._watched) and time.monotonic() >= self._next_s
