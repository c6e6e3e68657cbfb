"""Replies to the kernel as bytes. Pure: records in, bytes out."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from penstock.mount.fuse.protocol import MAJOR, PAGE_BYTES, WRITE_BYTES_MAX, Feature

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.mount.nodes import Attributes

HEADER = struct.Struct("=IiQ")
_ATTRIBUTES = (
    "QQQqqqIIIIIII12x"  # inode, size, blocks; times; nanoseconds; mode, links, uid, gid; device, block size, flags
)
_LIFETIMES = "Q8xQQII"  # node, generation, lifetimes of name and attributes
_DIRECTORY_ENTRY = "QQII"
_ENTRY = struct.Struct("=IiQ" + _LIFETIMES + _ATTRIBUTES)
_GET_ATTRIBUTES = struct.Struct("=IiQ" + "QI4x" + _ATTRIBUTES)
_OPENED = struct.Struct("=IiQ" + "QIi")
_INIT = struct.Struct("=IiQ" + "IIIIHHIIHHII24x")
_STATISTICS = struct.Struct("=IiQ" + "QQQQQIII4x24x")
_LENGTH = struct.Struct("=IiQ" + "I4x")
_NAMED = struct.Struct("=" + _DIRECTORY_ENTRY)
_NAMED_PLUS = struct.Struct("=" + _LIFETIMES + _ATTRIBUTES + _DIRECTORY_ENTRY)
_PADDINGS = tuple(bytes(length) for length in range(8))

NAMED_BYTES_MIN = _NAMED.size + 8
"""Shortest entry of a reply to READDIR."""

NAMED_PLUS_BYTES_MIN = _NAMED_PLUS.size + 8
"""Shortest entry of a reply to READDIRPLUS."""

SECONDS_MAX = 2**32
"""Longest lifetime of what the kernel remembers, 136 years; the kernel limits it further."""

_NS_PER_S = 1_000_000_000
_BLOCK_BYTES = 512
_NO_REFERENCE = (b".", b"..")


def lifetime(seconds: float) -> tuple[int, int]:
    """Return a lifetime as whole seconds and nanoseconds; negative ones are 0, and endless ones ``SECONDS_MAX``."""
    if not seconds > 0:
        return 0, 0
    if seconds >= SECONDS_MAX:
        return SECONDS_MAX, 0
    return int(seconds), int(seconds % 1 * _NS_PER_S)


def error(unique: int, number: int) -> bytes:
    """Return the reply that says that a request failed, or with number 0 one without a body."""
    return HEADER.pack(HEADER.size, -number, unique)


def data_head(unique: int, length_bytes: int) -> bytes:
    """Return what stands before `length_bytes` bytes of data."""
    return HEADER.pack(HEADER.size + length_bytes, 0, unique)


def entry(unique: int, attributes: Attributes, lifetime_s: float) -> bytes:
    """Return the reply to LOOKUP."""
    inode, mode, size, links, modified_ns, uid, gid, st_ino = attributes
    whole, rest = lifetime(lifetime_s)
    seconds, nanoseconds = divmod(modified_ns, _NS_PER_S)
    return _ENTRY.pack(
        *(_ENTRY.size, 0, unique),
        *(inode, whole, whole, rest, rest),
        *(st_ino or inode, size, (size + 511) // _BLOCK_BYTES),
        *(seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds),
        *(mode, links, uid, gid),
    )


def attributes(unique: int, described: Attributes, lifetime_s: float) -> bytes:
    """Return the reply to GETATTR."""
    inode, mode, size, links, modified_ns, uid, gid, st_ino = described
    whole, rest = lifetime(lifetime_s)
    seconds, nanoseconds = divmod(modified_ns, _NS_PER_S)
    return _GET_ATTRIBUTES.pack(
        *(_GET_ATTRIBUTES.size, 0, unique),
        *(whole, rest),
        *(st_ino or inode, size, (size + 511) // _BLOCK_BYTES),
        *(seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds),
        *(mode, links, uid, gid),
    )


def opened(unique: int, handle: int, flags: int) -> bytes:
    """Return the reply to OPEN and OPENDIR."""
    return _OPENED.pack(_OPENED.size, 0, unique, handle, flags, 0)


def directory(entries: Iterable[tuple[Attributes, bytes, int]], *, room_bytes: int) -> bytearray:
    """Return the body of a reply to READDIR: as many of the entries as there is room for."""
    body = bytearray()
    for described, name, offset in entries:
        length = len(name)
        padded = -(_NAMED.size + length) % 8
        if len(body) + _NAMED.size + length + padded > room_bytes:
            break
        body += _NAMED.pack(described.st_ino or described.inode, offset, length, described.mode >> 12 & 15)
        body += name
        body += b"\0" * padded
    return body


def directory_plus(
    entries: Iterable[tuple[Attributes, bytes, int]], *, room_bytes: int, lifetime_s: float
) -> tuple[bytes, int]:
    """Return the body of a reply to READDIRPLUS, and the number of its entries that give the kernel a reference."""
    whole, rest = lifetime(lifetime_s)
    pack, size_bytes = _NAMED_PLUS.pack, _NAMED_PLUS.size
    parts: list[bytes] = []
    used = count = 0
    for (inode, mode, size, links, modified_ns, uid, gid, st_ino), name, offset in entries:
        length = len(name)
        padding = -(size_bytes + length) % 8
        used += size_bytes + length + padding
        if used > room_bytes:
            break
        seconds, nanoseconds = divmod(modified_ns, _NS_PER_S)
        node = inode
        if name in _NO_REFERENCE:
            node = 0
        else:
            count += 1
        shown = st_ino or inode
        # fmt: off
        parts += (
            pack(
                node, whole, whole, rest, rest,
                shown, size, (size + 511) // _BLOCK_BYTES,
                seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
                mode, links, uid, gid,
                shown, offset, length, mode >> 12 & 15,
            ),
            name,
            _PADDINGS[padding],
        )
        # fmt: on
    return b"".join(parts), count


def length(unique: int, length_bytes: int) -> bytes:
    """Return the reply to GETXATTR and LISTXATTR that asked for a length."""
    return _LENGTH.pack(_LENGTH.size, 0, unique, length_bytes)


def statistics(unique: int, *, blocks: int, files: int, block_bytes: int, name_bytes_max: int) -> bytes:
    """Return the reply to STATFS of a file system without free space."""
    return _STATISTICS.pack(
        _STATISTICS.size, 0, unique, blocks, 0, 0, files, 0, block_bytes, name_bytes_max, block_bytes
    )


def init(
    unique: int,
    *,
    minor: int,
    features: int,
    read_ahead_bytes: int,
    request_bytes_max: int,
    background_max: int,
) -> bytes:
    """Return the reply to INIT."""
    return _INIT.pack(
        *(_INIT.size, 0, unique),
        *(MAJOR, minor, read_ahead_bytes, features & 0xFFFF_FFFF),
        *(background_max, background_max * 3 // 4, WRITE_BYTES_MAX, 1),
        *(request_bytes_max // PAGE_BYTES if features & Feature.MAX_PAGES else 0, 0, features >> 32),
        0,  # depth of file systems stacked below this one, for passthrough
    )


def init_version(unique: int) -> bytes:
    """Return the reply to INIT of a kernel with a newer major version, which then asks again with this one."""
    return _INIT.pack(_INIT.size, 0, unique, MAJOR, *(0,) * 11)


def notification(number: int) -> bytes:
    """Return a notification without a body."""
    return HEADER.pack(HEADER.size, number, 0)
