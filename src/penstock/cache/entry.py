"""The files of a cache: what is in them, and what they are called. Pure: bytes and names, no file is touched here.

An entry is a header and its data. The header holds the whole identity (namespace, endpoint, bucket, key, ETag, block
size) and the CRC-32C of header and data, so that a file that lies under the wrong name, of another object whose name
collides, torn by a power cut, or rotten, is found out by whoever reads it. Integers are little-endian:

====== ===== ===========================================================================================
offset bytes
====== ===== ===========================================================================================
0      8     ``PENSTCK1``
8      2     bytes of the header: 56 and the identity, padded with zeros to a multiple of 64; of 4096 before whole
             pages of 256 KiB or more, so that they lie where a disk can take them from memory
10     1     kind: 1 block, 2 stat, 3 missing, 4 listing page
11     1     0
12     4     number of the block in its object
16     8     bytes of the object; -1 where that means nothing
24     8     bytes of data behind the header
32     8     float64: when the store said so, in seconds since 1970; 0 of blocks, which never go stale
40     4     bytes of the identity
44     4     bytes of a full block
48     4     CRC-32C of the data
52     4     CRC-32C of the rest of the header
56           identity: UTF-8, fields separated by NUL
====== ===== ===========================================================================================
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from penstock.crc import crc32c

if TYPE_CHECKING:
    from penstock.types import Buffer

BLOCK, STAT, MISSING, PAGE = 1, 2, 3, 4
SUFFIXES = {BLOCK: "b", STAT: "s", MISSING: "m", PAGE: "p"}

FOLDERS_COUNT = 256
"""2 million objects of 100 KB make 8 000 names in each: 20 ms to scan one."""

MISSING_COUNT_MAX = 16_384
"""Negative entries of a cache: as many names as there are for them, a newer one takes the place of an older."""

_FIXED = struct.Struct("<8sHBxIqQdIIII")
_MAGIC = b"PENSTCK1"
_GRAIN_BYTES = 64
_DIRECT_BYTES_MIN = 256 * 1024
_STRIDE = 37  # prime to 256: consecutive blocks of an object lie in different folders
FIXED_BYTES = _FIXED.size
ROUND_BYTES = 4096  # what file systems allot


class CorruptEntryError(ValueError):
    """These bytes are not an entry, or not the one that was looked for."""


class Name(NamedTuple):
    """Where an entry lies: folder number, and name in it."""

    folder: int
    file: str

    @property
    def path(self) -> str:
        """Relative to the entries' root."""
        return f"{self.folder:02x}/{self.file}"


class Header(NamedTuple):
    """What a header says; see the module."""

    kind: int
    header_bytes: int
    block_index: int
    object_bytes: int
    data_bytes: int
    said_s: float
    block_bytes: int
    data_crc: int
    identity: bytes


def identity_of(*fields: str) -> bytes:
    """Fields of an identity as the bytes that are hashed and kept."""
    return "\0".join(fields).encode()


def digest_of(identity: bytes) -> str:
    """32 hexadecimal digits. Cost: 1.5 µs."""
    return blake2b(identity, digest_size=16).hexdigest()


def block_name(digest: str, block_index: int) -> Name:
    """Of a block of the object whose identity has this digest."""
    folder = (int(digest[:2], 16) + _STRIDE * block_index) % FOLDERS_COUNT
    return Name(folder, f"{digest}.{block_index:x}b")


def entry_name(kind: int, identity: bytes) -> Name:
    """Of a stat, a page, or what is missing; the last share a bounded number of names."""
    digest = digest_of(identity)
    if kind == MISSING:
        digest = f"{int(digest[:8], 16) % MISSING_COUNT_MAX:04x}"
    return Name(int(digest[:2], 16), f"{digest}.{SUFFIXES[kind]}")


def header_bytes_of(identity: bytes, data_bytes: int) -> int:
    """Bytes of the header that holds `identity`, before so much data."""
    grain_bytes = ROUND_BYTES if takes_direct_writes(data_bytes) else _GRAIN_BYTES
    return -(-(FIXED_BYTES + len(identity)) // grain_bytes) * grain_bytes


def takes_direct_writes(data_bytes: int) -> bool:
    """Whether data of this length are worth writing past the page cache, and can be: whole pages, and many."""
    return data_bytes >= _DIRECT_BYTES_MIN and data_bytes % ROUND_BYTES == 0


def encode(
    kind: int,
    identity: bytes,
    data: Buffer,
    *,
    block_index: int = 0,
    object_bytes: int = -1,
    block_bytes: int = 0,
    said_s: float = 0.0,
) -> bytes:
    """The header of an entry with this data. Cost: one pass over `data` at 15 to 27 GB/s."""
    header_bytes = header_bytes_of(identity, memoryview(data).nbytes)
    fields = (
        _MAGIC,
        header_bytes,
        kind,
        block_index,
        object_bytes,
        memoryview(data).nbytes,
        said_s,
        len(identity),
        block_bytes,
        crc32c(data),
    )
    tail = identity.ljust(header_bytes - FIXED_BYTES, b"\0")
    crc = crc32c(tail, crc32c(_FIXED.pack(*fields, 0)))
    return _FIXED.pack(*fields, crc) + tail


def decode(raw: Buffer) -> Header:
    """The header at the beginning of `raw`, of which there may be more, or less than all.

    Raises:
        CorruptEntryError: it is none, or its checksum does not match.
    """
    if len(raw) < FIXED_BYTES:
        raise CorruptEntryError(f"{len(raw)} bytes are no header")
    fixed = bytes(raw[:FIXED_BYTES])
    (magic, header_bytes, kind, block_index, object_bytes, data_bytes, said_s, identity_bytes, block_bytes, data_crc,
     header_crc) = _FIXED.unpack(fixed)  # fmt: skip
    if magic != _MAGIC or len(raw) < header_bytes or header_bytes < FIXED_BYTES + identity_bytes:
        raise CorruptEntryError("no header of an entry")
    tail = bytes(raw[FIXED_BYTES:header_bytes])
    if crc32c(tail, crc32c(fixed[:-4] + bytes(4))) != header_crc:
        raise CorruptEntryError("the header's checksum does not match")
    return Header(
        kind, header_bytes, block_index, object_bytes, data_bytes, said_s, block_bytes, data_crc, tail[:identity_bytes]
    )


def check_data(header: Header, data: Buffer) -> None:
    """Hold the data against the header.

    Raises:
        CorruptEntryError: they differ in length or checksum.
    """
    if len(data) != header.data_bytes:
        raise CorruptEntryError(f"{len(data)} of {header.data_bytes} bytes")
    if crc32c(data) != header.data_crc:
        raise CorruptEntryError("the data's checksum does not match")


def allotted_bytes(file_bytes: int) -> int:
    """What a file of this length takes on the disk, for the accounting: whole pages."""
    return -(-file_bytes // ROUND_BYTES) * ROUND_BYTES
