"""Headers of tar members: v7, ustar, GNU and PAX, as POSIX.1-2001 and the GNU manual describe them.

Only what decides where a member's bytes lie and what it is called; owners, modes and times are passed over.
Functions raise ``ValueError`` with a sentence; the parser adds shard and offset.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

BLOCK_BYTES = 512
UNPACK = struct.Struct("148s8s356s").unpack_from
"""Before the checksum, the checksum, after it: all that the hot loop needs, in one call (90 ns)."""

ZERO_BLOCK = bytes(BLOCK_BYTES)

KINDS_REGULAR = frozenset({b"0", b"\0", b"7"})
KINDS_WITHOUT_DATA = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})  # links, devices, directories, FIFOs
KINDS_META = frozenset({b"L", b"K", b"x", b"X", b"g"})  # each describes the member after it ("g": all after it)


class Header(NamedTuple):
    """What a header says of the bytes after it."""

    name: bytes
    kind: bytes  # one byte
    size_bytes: int


def read_header(block: bytes) -> Header:
    """The header in `block`, uint8[512], after its checksum.

    Raises:
        ValueError: Not a tar header.
    """
    _check_sum(block)
    name = _text(block[:100])
    kind = block[156:157]
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):  # GNU keeps times there: another magic
        name = prefix + b"/" + name
    if kind == b"\0" and name.endswith(b"/"):  # v7 has no kind for directories
        kind = b"5"
    return Header(name, kind, 0 if kind in KINDS_WITHOUT_DATA else number(block[124:136]))


def number(field: bytes) -> int:
    """A header's number: octal digits, or base 256 where the first bit is set.

    Raises:
        ValueError: Neither, or negative.
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ") or b"0"
    try:
        value = int(digits, 8)  # as lenient as the hot loop, so that the answer does not depend on where chunks are cut
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"a size field of {field!r} is no octal number")
    return value


def _check_sum(block: bytes) -> None:
    """Sum of all bytes, the field itself taken as spaces; some old archivers summed signed bytes."""
    stored = block[148:156]
    rest = block[:148] + block[156:]
    said, unsigned = read_sum(stored), byte_sum(rest) + 8 * 0x20
    if said != unsigned and (said < 0 or said != unsigned - 256 * sum(byte > 127 for byte in rest)):
        raise ValueError(f"no tar header: its checksum field {stored!r} is not the sum of the block")


def read_sum(stored: bytes) -> int:
    """A checksum: octal digits, with blanks and NULs on either side; -1 where it is none."""
    digits = stored.strip(b"\0 ")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else -1


def byte_sum(data: bytes) -> int:
    """Sum of the bytes, at C speed: the low half of Adler-32 is 1 + the sum modulo 65 521.

    256 bytes never reach the modulus. 0.5 us for a header; ``sum()`` takes 2.3.
    """
    return sum((zlib.adler32(data[at : at + 256]) & 0xFFFF) - 1 for at in range(0, len(data), 256))


def is_harmless(data: bytes) -> bool:
    """Whether PAX records surely change neither name nor size of a member (nor make it sparse: those have sizes).

    Such records are not looked at further, for speed: nearly all only hold times.
    """
    return b"path=" not in data and b"size=" not in data and data.endswith(b"\n")


def pax_records(data: bytes) -> dict[bytes, bytes]:
    r"""Records of an extended header, each ``b"<length> <keyword>=<value>\n"``.

    Raises:
        ValueError: Not such records.
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
