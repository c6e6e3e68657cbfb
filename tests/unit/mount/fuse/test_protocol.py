"""Requests of the kernel become records, byte by byte as ``linux/fuse.h`` lays them out; anything else is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mount.fuse.protocol import PARSERS, MalformedRequestError, Operation, RequestHeader


def u32(*numbers: int) -> bytes:
    """Numbers as the kernel writes them, 4 bytes each."""
    return b"".join(struct.pack("=I", number) for number in numbers)


def u64(*numbers: int) -> bytes:
    """Numbers as the kernel writes them, 8 bytes each."""
    return b"".join(struct.pack("=Q", number) for number in numbers)


def test_header() -> None:
    """Each field of the header is read from its place."""
    message = u32(48, 15) + u64(2**63 + 1, 7) + u32(1000, 1001, 4242) + struct.pack("=HH", 1, 0) + bytes(8)
    assert RequestHeader.parse(message) == RequestHeader(48, 15, 2**63 + 1, 7, 1000, 1001, 4242, 1, 0)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(39),
        u32(41, 1) + bytes(32),
        u32(40, 1) + bytes(33),
        u32(48, 1) + bytes(28) + struct.pack("=HH", 2, 0) + bytes(8),
    ],
    ids=["empty", "short", "too few bytes", "too many bytes", "extensions longer than the request"],
)
def test_headers_that_do_not_fit(message: bytes) -> None:
    """A request that is not as long as it says is refused."""
    with pytest.raises(MalformedRequestError, match="a request of"):
        RequestHeader.parse(message)


BODIES = {
    Operation.INIT: (u32(7, 45, 131072, 1 << 30 | 3, 5) + bytes(44), (7, 45, 131072, 5 << 32 | 1 << 30 | 3)),
    Operation.LOOKUP: ("näme".encode() + b"\0", ("näme".encode(),)),
    Operation.FORGET: (u64(3), (3,)),
    Operation.BATCH_FORGET: (u32(2, 0) + u64(5, 1, 6, 2**64 - 1), ((5, 1), (6, 2**64 - 1))),
    Operation.OPEN: (u32(0o100000, 0), (0o100000,)),
    Operation.READ: (u64(9, 2**40) + u32(1 << 20, 0) + u64(0) + u32(0, 0), (9, 2**40, 1 << 20)),
    Operation.READDIR: (u64(9, 3) + u32(4096, 0) + u64(0) + u32(0, 0), (9, 3, 4096)),
    Operation.READDIRPLUS: (u64(9, 3) + u32(4096, 0) + u64(0) + u32(0, 0), (9, 3, 4096)),
    Operation.RELEASE: (u64(9) + u32(0, 1) + u64(0), (9,)),
    Operation.RELEASEDIR: (u64(9) + u32(0, 0) + u64(0), (9,)),
    Operation.GETXATTR: (u32(64, 0) + b"user.etag\0", (64, b"user.etag")),
    Operation.LISTXATTR: (u32(0, 0), (0,)),
    Operation.INTERRUPT: (u64(77), (77,)),
}


def test_every_parser_is_tested() -> None:
    """Each operation that has a parser has an example here."""
    assert set(BODIES) == set(PARSERS)


@pytest.mark.parametrize("operation", BODIES, ids=lambda operation: operation.name)
def test_bodies(operation: Operation) -> None:
    """Each field of each body is read from its place."""
    body, expected = BODIES[operation]
    assert PARSERS[operation](memoryview(body)) == expected


def test_first_version_of_init() -> None:
    """INIT without the extension has 32 bits of features, whatever follows."""
    assert PARSERS[Operation.INIT](memoryview(u32(7, 31, 65536, 3))) == (7, 31, 65536, 3)
    assert PARSERS[Operation.INIT](memoryview(u32(7, 31, 65536, 3) + bytes(48))) == (7, 31, 65536, 3)


@pytest.mark.parametrize("operation", BODIES, ids=lambda operation: operation.name)
@given(data=st.data())
def test_malformed_bodies(operation: Operation, data: st.DataObject) -> None:
    """Whatever the bytes, a parser returns values or raises ``MalformedRequestError``; it never reads past the end."""
    valid, _ = BODIES[operation]
    cut = st.integers(0, len(valid)).map(lambda end: valid[:end])
    body = data.draw(st.one_of(st.binary(max_size=200), cut, cut.map(lambda part: part + valid)))
    try:
        parsed = PARSERS[operation](memoryview(body))
    except MalformedRequestError:
        return
    assert isinstance(parsed, tuple)


@pytest.mark.parametrize("body", [b"", b"\0", b"name", b"na\0me\0", b"name\0\0"])
def test_names_end_with_their_only_nul(body: bytes) -> None:
    """A name has at least one byte and exactly one NUL, at its end."""
    with pytest.raises(MalformedRequestError, match="a name of"):
        PARSERS[Operation.LOOKUP](memoryview(body))
