"""Requests of the kernel as records. Pure: bytes in, records out.

Each record has a method ``parse``, which takes the bytes after the header. Bytes that are too few, too many or not what the
protocol says raise ``MalformedRequestError``, and nothing else.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from penstock.mount.fuse.protocol import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.types import Buffer

HEADER = struct.Struct("=IIQQIII2H")
_INIT = struct.Struct("=IIII")
_INIT_EXTENDED = struct.Struct("=I44x")
_FORGET = struct.Struct("=Q")
_FORGET_COUNT = struct.Struct("=I4x")
_FORGET_ONE = struct.Struct("=QQ")
_OPEN = struct.Struct("=I4x")
_READ = struct.Struct("=QQI4x8x8x")
_RELEASE = struct.Struct("=Q16x")
_GET_EXTENDED = struct.Struct("=I4x")
_INTERRUPT = struct.Struct("=Q")

_INIT_EXT_FLAG = 1 << 30


class MalformedRequestError(ValueError):
    """The bytes are not a request as the protocol describes it."""


class RequestHeader(NamedTuple):
    """What every request begins with.

    Attributes:
        length_bytes: Length of the whole request.
        operation: Number of the operation; one that ``Operation`` does not have is possible.
        unique: Number of the request, which the reply repeats.
        inode: The node that it is about.
        uid: User of the program that caused it.
        gid: Group of the program.
        thread_id: Thread that waits for the reply, in the process namespace of the mount; 0 if it cannot be seen there.
        extension_words: Length of the extensions at the end of the request, in units of 8 bytes.
        padding: Unused.
    """

    length_bytes: int
    operation: int
    unique: int
    inode: int
    uid: int
    gid: int
    thread_id: int
    extension_words: int
    padding: int

    @classmethod
    def parse(cls, message: Buffer) -> RequestHeader:
        """Read the header of a whole request.

        Raises:
            MalformedRequestError: The request is shorter or longer than its header says.
        """
        received_bytes = len(message)
        if received_bytes < HEADER.size:
            raise MalformedRequestError(f"a request of {received_bytes} bytes is shorter than its header")
        header = cls._make(HEADER.unpack_from(message))
        if header.length_bytes != received_bytes or HEADER.size + 8 * header.extension_words > received_bytes:
            raise MalformedRequestError(
                f"a request of {received_bytes} bytes says that it has {header.length_bytes}, "
                f"{8 * header.extension_words} of them extensions"
            )
        return header


class InitRequest(NamedTuple):
    """INIT: what the kernel offers.

    Attributes:
        major: Version of the protocol.
        minor: Minor version of the protocol.
        read_ahead_bytes_max: Longest read-ahead of the kernel.
        features: Bits of ``Feature`` that the kernel knows.
    """

    major: int
    minor: int
    read_ahead_bytes_max: int
    features: int

    @classmethod
    def parse(cls, body: memoryview) -> InitRequest:
        """Read the body of INIT, with the upper half of the features if the kernel sent it."""
        if len(body) < _INIT.size:
            raise MalformedRequestError(f"INIT has {len(body)} bytes")
        major, minor, read_ahead_bytes_max, features = _INIT.unpack_from(body)
        if features & _INIT_EXT_FLAG and len(body) >= _INIT.size + _INIT_EXTENDED.size:
            features |= _INIT_EXTENDED.unpack_from(body, _INIT.size)[0] << 32
        return cls(major, minor, read_ahead_bytes_max, features)


class NameRequest(NamedTuple):
    """LOOKUP: the name of an entry of a directory.

    Attributes:
        name: The name, without the NUL that ends it.
    """

    name: bytes

    @classmethod
    def parse(cls, body: memoryview) -> NameRequest:
        """Read a name that ends with NUL."""
        return cls(_name(body))


class ForgetRequest(NamedTuple):
    """FORGET: references to the header's node that the kernel has dropped.

    Attributes:
        references: Number of references.
    """

    references: int

    @classmethod
    def parse(cls, body: memoryview) -> ForgetRequest:
        """Read the body of FORGET."""
        return cls._make(_exactly(_FORGET, body))


class BatchForgetRequest(NamedTuple):
    """BATCH_FORGET: references to several nodes that the kernel has dropped.

    Attributes:
        forgotten: Inode number and number of references for each node.
    """

    forgotten: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, body: memoryview) -> BatchForgetRequest:
        """Read the body of BATCH_FORGET."""
        if len(body) < _FORGET_COUNT.size:
            raise MalformedRequestError(f"BATCH_FORGET has {len(body)} bytes")
        (count,) = _FORGET_COUNT.unpack_from(body)
        items = body[_FORGET_COUNT.size :]
        if len(items) != count * _FORGET_ONE.size:
            raise MalformedRequestError(f"BATCH_FORGET of {count} nodes has {len(body)} bytes")
        return cls(tuple(_FORGET_ONE.iter_unpack(items)))


class OpenRequest(NamedTuple):
    """OPEN and OPENDIR.

    Attributes:
        flags: Flags of open(2), without those that the kernel handles itself.
    """

    flags: int

    @classmethod
    def parse(cls, body: memoryview) -> OpenRequest:
        """Read the body of OPEN or OPENDIR."""
        return cls._make(_exactly(_OPEN, body))


class ReadRequest(NamedTuple):
    """READ, READDIR and READDIRPLUS.

    Attributes:
        handle: Handle of the open file or directory.
        offset: First byte; for a directory, the offset after the entry that the kernel read last, or 0.
        length_bytes: Number of bytes of a file; for a directory, the room for entries.
    """

    handle: int
    offset: int
    length_bytes: int

    @classmethod
    def parse(cls, body: memoryview) -> ReadRequest:
        """Read the body of READ, READDIR or READDIRPLUS."""
        return cls._make(_exactly(_READ, body))


class ReleaseRequest(NamedTuple):
    """RELEASE and RELEASEDIR.

    Attributes:
        handle: Handle of the file or directory that is closed.
    """

    handle: int

    @classmethod
    def parse(cls, body: memoryview) -> ReleaseRequest:
        """Read the body of RELEASE or RELEASEDIR."""
        return cls._make(_exactly(_RELEASE, body))


class GetExtendedRequest(NamedTuple):
    """GETXATTR.

    Attributes:
        room_bytes: Room for the value; 0 asks for its length.
        name: Name of the attribute.
    """

    room_bytes: int
    name: bytes

    @classmethod
    def parse(cls, body: memoryview) -> GetExtendedRequest:
        """Read the body of GETXATTR."""
        if len(body) < _GET_EXTENDED.size:
            raise MalformedRequestError(f"GETXATTR has {len(body)} bytes")
        return cls(_GET_EXTENDED.unpack_from(body)[0], _name(body[_GET_EXTENDED.size :]))


class ListExtendedRequest(NamedTuple):
    """LISTXATTR.

    Attributes:
        room_bytes: Room for the names; 0 asks for their length.
    """

    room_bytes: int

    @classmethod
    def parse(cls, body: memoryview) -> ListExtendedRequest:
        """Read the body of LISTXATTR."""
        return cls._make(_exactly(_GET_EXTENDED, body))


class InterruptRequest(NamedTuple):
    """INTERRUPT: a program that waits for a reply has received a signal.

    Attributes:
        unique: Number of the request that the program waits for.
    """

    unique: int

    @classmethod
    def parse(cls, body: memoryview) -> InterruptRequest:
        """Read the body of INTERRUPT."""
        return cls._make(_exactly(_INTERRUPT, body))


class OtherRequest(NamedTuple):
    """A request whose body is not looked at, because it has none or because the answer does not depend on it."""

    @classmethod
    def parse(cls, body: memoryview) -> OtherRequest:
        """Skip the body."""
        return _OTHER


_OTHER = OtherRequest()

PARSERS: dict[int, Callable[[memoryview], NamedTuple]] = {
    Operation.INIT: InitRequest.parse,
    Operation.LOOKUP: NameRequest.parse,
    Operation.FORGET: ForgetRequest.parse,
    Operation.BATCH_FORGET: BatchForgetRequest.parse,
    Operation.OPEN: OpenRequest.parse,
    Operation.OPENDIR: OpenRequest.parse,
    Operation.READ: ReadRequest.parse,
    Operation.READDIR: ReadRequest.parse,
    Operation.READDIRPLUS: ReadRequest.parse,
    Operation.RELEASE: ReleaseRequest.parse,
    Operation.RELEASEDIR: ReleaseRequest.parse,
    Operation.GETXATTR: GetExtendedRequest.parse,
    Operation.LISTXATTR: ListExtendedRequest.parse,
    Operation.INTERRUPT: InterruptRequest.parse,
}
"""How the body of each operation is read; that of any other one is an ``OtherRequest``."""


def _exactly(form: struct.Struct, body: memoryview) -> Iterable[int]:
    if len(body) != form.size:
        raise MalformedRequestError(f"the body of a request has {len(body)} bytes instead of {form.size}")
    return form.unpack(body)


def _name(body: memoryview) -> bytes:
    name = bytes(body)
    if len(name) < 2 or name.find(0) != len(name) - 1:
        raise MalformedRequestError(f"a name of {len(name)} bytes is empty, contains NUL, or does not end with it")
    return name[:-1]
