"""The table of mounts is read as the kernel writes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.mount.fuse.watching import MountEntry, find_mount, parse_mount_table

TABLE = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
300 22 0:45 / /data/my\040set\134x ro,nosuid shared:7 master:2 - fuse.penstock s3://bucket/a\054b ro,user_id=0
301 22 0:46 / /n\303\244her rw - tmpfs none rw

broken line
302 x
"""


def test_fields() -> None:
    """Optional fields are skipped, escaped characters restored, and lines of another form left out."""
    assert parse_mount_table(TABLE) == [
        MountEntry(22, "8:1", "/", "ext4", "/dev/sda1"),
        MountEntry(300, "0:45", "/data/my set\\x", "fuse.penstock", "s3://bucket/a,b"),
        MountEntry(301, "0:46", "/näher", "tmpfs", "none"),
    ]


@given(st.binary(max_size=300))
def test_any_bytes(table: bytes) -> None:
    """Whatever the bytes, the parser returns entries, or none."""
    assert all(isinstance(entry, MountEntry) for entry in parse_mount_table(table))


def test_this_system() -> None:
    """The root is mounted, and a directory that does not exist is not."""
    assert find_mount("/") is not None
    assert find_mount("/proc") is not None
    assert find_mount("/no such directory") is None
