"""Replies that may be sent from any thread, each exactly once."""

from __future__ import annotations

import errno
import logging
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from penstock.mount.fuse import replies
from penstock.mount.fuse.device import GONE
from penstock.mount.fuse.protocol import ERRNO_MAX, NAME_BYTES_MAX, OpenFlag, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.mount.contracts import Attributes
    from penstock.mount.fuse.device import Device
    from penstock.types import Buffer

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
    """Implements ``Reply`` of ``penstock.mount.contracts`` for a request of the kernel.

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
        """Reply to LOOKUP; whether the kernel took the reference."""
        return self._outbox.send(self, [replies.entry(self.unique, attributes, lifetime_s)])

    @_answers_in_any_case
    def attributes(self, attributes: Attributes, *, lifetime_s: float) -> None:
        """Reply to GETATTR."""
        self._outbox.send(self, [replies.attributes(self.unique, attributes, lifetime_s)])

    @_answers_in_any_case
    def opened(self, handle: int, *, keeps_cache: bool = False, is_direct: bool = False, backing: int = 0) -> bool:
        """Reply to OPEN and OPENDIR; whether the handle is open."""
        flags = OpenFlag.KEEP_CACHE.value if keeps_cache else 0
        if self.operation == Operation.OPENDIR:
            flags = flags and flags | OpenFlag.CACHE_DIR.value
        elif backing:
            flags = OpenFlag.PASSTHROUGH.value
        elif is_direct:
            flags |= OpenFlag.DIRECT_IO.value
        return self._outbox.send(self, [replies.opened(self.unique, handle, flags, backing)])

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
        """Reply to READDIR and READDIRPLUS with as many entries as fit; how many of them gave the kernel a reference."""
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
