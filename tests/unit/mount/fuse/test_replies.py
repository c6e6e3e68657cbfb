"""Replies to the kernel, byte by byte as ``linux/fuse.h`` lays them out."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.mount.fuse import replies
from penstock.mount.fuse.protocol import Feature
from penstock.mount.nodes import Attributes

FILE = Attributes(20, 0o100644, 1025, 1, 1_700_000_000_123_456_789, 1000, 1001, 999)
FOLDER = Attributes(30, 0o040755, 0, 2, -1, 0, 0)
LIFETIME = (1, 500_000_000)


def head(length_bytes: int, unique: int = 77, number: int = 0) -> bytes:
    """The header of a reply."""
    return struct.pack("=IiQ", length_bytes, number, unique)


def attribute_bytes(ino: int, size: int, blocks: int, seconds: int, nanoseconds: int, *rest: int) -> bytes:
    """``struct fuse_attr``, with the same time three times."""
    return struct.pack("=QQQqqqIII", ino, size, blocks, *(seconds,) * 3, *(nanoseconds,) * 3) + struct.pack(
        "=IIIIIII", *rest, 0, 0, 0
    )


FILE_BYTES = attribute_bytes(999, 1025, 3, 1_700_000_000, 123_456_789, 0o100644, 1, 1000, 1001)
FOLDER_BYTES = attribute_bytes(30, 0, 0, -1, 999_999_999, 0o040755, 2, 0, 0)


def test_lengths_of_structures() -> None:
    """The structures are as long as those of the kernel."""
    assert (len(FILE_BYTES), replies.NAMED_BYTES_MIN, replies.NAMED_PLUS_BYTES_MIN) == (88, 32, 160)


def test_errors() -> None:
    """An error is a header with a negative errno; 0 is success without a body."""
    assert replies.error(77, 5) == head(16, number=-5)
    assert replies.error(77, 0) == head(16)
    assert replies.data_head(77, 1 << 20) == head(16 + (1 << 20))


def test_entry() -> None:
    """The kernel's number of a node and the number that programs see are different fields."""
    body = struct.pack("=QQQQII", 20, 0, 1, 1, 500_000_000, 500_000_000) + FILE_BYTES
    assert replies.entry(77, FILE, 1.5) == head(16 + 128) + body


def test_attributes() -> None:
    """Without a number of its own for programs, a node shows the kernel's."""
    body = struct.pack("=QII", 1, 500_000_000, 0) + FOLDER_BYTES
    assert replies.attributes(77, FOLDER, 1.5) == head(16 + 104) + body


def test_opened_length_and_statistics() -> None:
    """The replies to OPEN, GETXATTR without room, and STATFS have their fields in place."""
    assert replies.opened(77, 2**63, 3) == head(32) + struct.pack("=QII", 2**63, 3, 0)
    assert replies.length(77, 12) == head(24) + struct.pack("=II", 12, 0)
    expected = struct.pack("=QQQQQIIII", 10, 0, 0, 3, 0, 4096, 255, 4096, 0) + bytes(24)
    assert replies.statistics(77, blocks=10, files=3, block_bytes=4096, name_bytes_max=255) == head(96) + expected


def test_init() -> None:
    """Features above the 32nd are in a field of their own, and the longest request is counted in pages."""
    features = Feature.MAX_PAGES | Feature.INIT_EXT | 1 << 36
    said = replies.init(
        77, minor=45, features=features, read_ahead_bytes=131072, request_bytes_max=1 << 20, background_max=128
    )
    low = 1 << 22 | 1 << 30
    expected = struct.pack("=IIIIHHIIHHII", 7, 45, 131072, low, 128, 96, 4096, 1, 256, 0, 1 << 4, 0) + bytes(24)
    assert said == head(80) + expected
    older = replies.init(77, minor=31, features=0, read_ahead_bytes=0, request_bytes_max=1 << 20, background_max=1)
    assert older == head(80) + struct.pack("=IIIIHHIIHHII", 7, 31, 0, 0, 1, 0, 4096, 1, 0, 0, 0, 0) + bytes(24)
    assert replies.init_version(77) == head(80) + struct.pack("=I", 7) + bytes(60)


def test_notifications() -> None:
    """Notifications have no request, and their number is where replies have an error."""
    assert replies.notification(8) == head(16, 0, 8)


def test_directory() -> None:
    """Entries are padded to 8 bytes, say what kind they are, and end where there is no room for the next one."""
    entries = [(FOLDER, b".", 1), (FILE, b"12345678", 2), (FILE, b"123456789", 2**63)]
    first = struct.pack("=QQII", 30, 1, 1, 4) + b"." + bytes(7)
    second = struct.pack("=QQII", 999, 2, 8, 8) + b"12345678"
    third = struct.pack("=QQII", 999, 2**63, 9, 8) + b"123456789" + bytes(7)
    assert replies.directory(entries, room_bytes=4096) == first + second + third
    assert replies.directory(entries, room_bytes=103) == first + second
    assert replies.directory(entries, room_bytes=31) == b""


def test_directory_plus() -> None:
    """Each entry has its attributes, and counts as a reference unless it is the directory itself or its parent."""
    entries = [(FOLDER, b".", 1), (FOLDER, b"..", 2), (FILE, b"123456789", 3), (FOLDER, b"folder", 4)]
    times = struct.pack("=QQII", 1, 1, 500_000_000, 500_000_000)

    def plus(node: int, attributes: bytes, rest: bytes) -> bytes:
        return struct.pack("=QQ", node, 0) + times + attributes + rest

    expected = [
        plus(0, FOLDER_BYTES, struct.pack("=QQII", 30, 1, 1, 4) + b"." + bytes(7)),
        plus(0, FOLDER_BYTES, struct.pack("=QQII", 30, 2, 2, 4) + b".." + bytes(6)),
        plus(20, FILE_BYTES, struct.pack("=QQII", 999, 3, 9, 8) + b"123456789" + bytes(7)),
        plus(30, FOLDER_BYTES, struct.pack("=QQII", 30, 4, 6, 4) + b"folder" + bytes(2)),
    ]
    assert replies.directory_plus(entries, room_bytes=4096, lifetime_s=1.5) == (b"".join(expected), 2)
    room_bytes = len(b"".join(expected)) - 1
    assert replies.directory_plus(entries, room_bytes=room_bytes, lifetime_s=1.5) == (b"".join(expected[:3]), 1)


def test_entries_are_taken_only_as_far_as_they_fit() -> None:
    """Of an iterator, at most one entry more than fits is taken."""
    for make in (
        replies.directory,
        lambda given, room_bytes: replies.directory_plus(given, room_bytes=room_bytes, lifetime_s=0)[0],
    ):
        taken: list[int] = []
        many = ((FILE, b"name", taken.append(number) or number) for number in range(1000))  # type: ignore[func-returns-value]
        body = make(many, room_bytes=1600)
        assert 0 < len(body) <= 1600
        assert len(taken) == 1600 // (32 if make is replies.directory else 160) + 1


@given(
    names=st.lists(
        st.binary(min_size=1, max_size=255).filter(lambda name: b"\0" not in name and b"/" not in name), max_size=20
    ),
    room_bytes=st.integers(0, 8192),
)
def test_directories_can_be_taken_apart(names: list[bytes], room_bytes: int) -> None:
    """Whatever names and room, the kernel finds the first names in the reply, and never more bytes than it has room for."""
    entries = [(FILE, name, number + 1) for number, name in enumerate(names)]
    body, count = replies.directory_plus(entries, room_bytes=room_bytes, lifetime_s=1)
    assert len(body) <= room_bytes
    found, start = [], 0
    while start < len(body):
        (length,) = struct.unpack_from("=I", body, start + 128 + 16)
        found.append(bytes(body[start + 152 : start + 152 + length]))
        start += 152 + length + -(152 + length) % 8
    assert found == names[: len(found)]
    assert count == sum(name not in (b".", b"..") for name in found)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, (0, 0)),
        (-1, (0, 0)),
        (math.nan, (0, 0)),
        (0.25, (0, 250_000_000)),
        (1.5, LIFETIME),
        (3600, (3600, 0)),
        (2**32 + 1, (2**32, 0)),
        (math.inf, (2**32, 0)),
    ],
)
def test_lifetimes(seconds: float, expected: tuple[int, int]) -> None:
    """Lifetimes are whole seconds and nanoseconds; endless ones are long, and negative ones are none."""
    assert replies.lifetime(seconds) == expected


@given(st.floats(0, 2**33))
def test_lifetimes_have_valid_nanoseconds(seconds: float) -> None:
    """The nanoseconds of a lifetime are less than a second."""
    whole, rest = replies.lifetime(seconds)
    assert 0 <= whole <= 2**32
    assert 0 <= rest < 1_000_000_000
