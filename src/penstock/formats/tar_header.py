"""Headers of tar members: v7, ustar, GNU and PAX, as POSIX.1-2001 and the GNU manual describe them, read and written.

Only the fields that determine the offset and the name of a member are read; owners, modes and times are ignored. Functions
raise ``ValueError`` with a description, to which the parser adds the shard and the offset.

In headers that are written, owners and times are zero, and modes are 0644. They are ustar. A name that is long or not ASCII, or
a size beyond 8 GiB, goes into a PAX header, which every tar since 2001 reads. ustar could also split a long name into a prefix
and a name, but that is limited to 255 bytes and needs a slash in the right place, so it is not used.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

BLOCK_BYTES = 512
UNPACK = struct.Struct("148s8s356s").unpack_from
"""Splits a header into the bytes before the checksum, the checksum, and those after it, in one call (90 ns)."""

ZERO_BLOCK = bytes(BLOCK_BYTES)

KINDS_REGULAR = frozenset({b"0", b"\0", b"7"})
KINDS_WITHOUT_DATA = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})  # links, devices, directories, FIFOs
KINDS_META = frozenset({b"L", b"K", b"x", b"X", b"g"})  # each describes the member after it ("g": all after it)

_NAME_BYTES_MAX = 100
_SIZE_BYTES_MAX = 8**11 - 1  # 11 octal digits

_HEAD = b"%-100b0000644\0" + b"0000000\0" * 2 + b"%011o\0" + b"%011o\0" % 0
_TAIL = b"%b" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
_TAILS = {kind: (_TAIL % kind, sum(_TAIL % kind) + 8 * 0x20) for kind in (b"0", b"x")}
"""For each kind of member: the bytes after the checksum, and their contribution to it."""


class Header(NamedTuple):
    """The name, kind and size of the member that follows a header."""

    name: bytes
    kind: bytes  # one byte
    size_bytes: int


def read_header(block: bytes) -> Header:
    """Parse the header in `block`, uint8[512], and verify its checksum.

    Raises:
        ValueError: The block is not a tar header.
    """
    _check_sum(block)
    name = _text(block[:100])
    kind = block[156:157]
    # With the magic string of GNU tar, these bytes are times.
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    if kind == b"\0" and name.endswith(b"/"):  # v7 has no separate kind for directories
        kind = b"5"
    return Header(name, kind, 0 if kind in KINDS_WITHOUT_DATA else number(block[124:136]))


def is_header(block: bytes) -> bool:
    """Whether `block`, uint8[512], is the header of a member."""
    try:
        read_header(block)
    except ValueError:
        return False
    return True


def number(field: bytes) -> int:
    """Parse a number in a header: octal digits, or base 256 if the first bit is set.

    Raises:
        ValueError: The field is neither, or negative.
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ") or b"0"
    try:
        # As lenient as the hot loop, so that the result does not depend on how the shard is cut into chunks.
        value = int(digits, 8)
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"a size field of {field!r} is not an octal number")
    return value


def _check_sum(block: bytes) -> None:
    """Verify the checksum: the sum of all bytes, with spaces in place of the field. Some old archivers summed signed bytes."""
    stored = block[148:156]
    rest = block[:148] + block[156:]
    said, unsigned = read_sum(stored), byte_sum(rest) + 8 * 0x20
    if said != unsigned and (said < 0 or said != unsigned - 256 * sum(byte > 127 for byte in rest)):
        raise ValueError(f"not a tar header: its checksum field {stored!r} is not the sum of the block")


def read_sum(stored: bytes) -> int:
    """Parse a checksum: octal digits, padded with blanks and NULs. Returns -1 if it is invalid."""
    digits = stored.strip(b"\0 ")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else -1


def byte_sum(data: bytes) -> int:
    """Sum the bytes at C speed: the low half of Adler-32 is 1 + the sum modulo 65 521.

    The sum of 256 bytes never reaches the modulus. This takes 0.5 µs for a header, and ``sum()`` takes 2.3 µs.
    """
    return sum((zlib.adler32(data[at : at + 256]) & 0xFFFF) - 1 for at in range(0, len(data), 256))


def is_harmless(data: bytes) -> bool:
    """Whether PAX records certainly change neither the name nor the size of a member, nor make it sparse.

    For speed, such records are not parsed; nearly all of them only contain times.
    """
    return b"path=" not in data and b"size=" not in data and data.endswith(b"\n")


def pax_records(data: bytes) -> dict[bytes, bytes]:
    r"""Parse the records of a PAX header, each ``b"<length> <keyword>=<value>\n"``.

    Raises:
        ValueError: The records are invalid.
    """
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:  # some writers pad with NULs
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        end = at + int(digits) if digits.isdigit() else 0
        keyword, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise ValueError(f"a PAX record of {data[at : at + 40]!r}... is not '<length> <keyword>=<value>'")
        records[keyword] = value
        at = end
    return records


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def headers(name: str, size_bytes: int) -> bytes:
    """Return the header of a member, preceded by a PAX header if ustar cannot represent it; a multiple of 512 bytes."""
    raw = name.encode("utf-8")
    records = b""
    if len(raw) > _NAME_BYTES_MAX or not raw.isascii():
        records += _record(b"path", raw)
        raw = name.encode("ascii", "replace")[:_NAME_BYTES_MAX]
    if size_bytes > _SIZE_BYTES_MAX:
        records += _record(b"size", b"%d" % size_bytes)
        size_bytes = 0
    header = _header(raw, b"0", size_bytes)
    if not records:
        return header
    padding = bytes(-len(records) % BLOCK_BYTES)
    return _header(b"././@PaxHeader", b"x", len(records)) + records + padding + header


def _header(name: bytes, kind: bytes, size_bytes: int) -> bytes:
    head = _HEAD % (name.ljust(_NAME_BYTES_MAX, b"\0"), size_bytes)
    tail, tail_sum = _TAILS[kind]
    return head + b"%06o\0 " % (sum(head) + tail_sum) + tail


def _record(keyword: bytes, value: bytes) -> bytes:
    r"""Return the PAX record ``b"<length> <keyword>=<value>\n"``, whose length includes its own digits."""
    body = b" %b=%b\n" % (keyword, value)
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body
