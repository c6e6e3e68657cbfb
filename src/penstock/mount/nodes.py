"""The types that the parts of a mount exchange: nodes, their attributes, and the callbacks that receive them.

Requests come from the kernel on one thread, which must not wait. Slow work is begun there and ends on another thread, usually
that of an engine's event loop, by a call of ``then`` or of a method of ``Reply``: exactly once, and quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.errors import PenstockError
    from penstock.types import ObjectInfo

ROOT_INODE = 1
"""Inode number of the directory that the file system is mounted on."""


class Node(NamedTuple):
    """A directory or a file of the mount, as a listing described it.

    Attributes:
        inode: Number by which the kernel knows it: one for each directory, and one for each version of a file.
        name: Last component of the path, as the kernel sees it; empty for the root.
        parent: Inode number of its directory; that of the root itself for the root.
        info: The object of a file; None for a directory.
        modified_s: Seconds since the epoch of its last change; that of the mount if the store says nothing.
        seen_s: Time of the request to the store for this record, on the monotonic clock. Its lifetime begins here.
        st_ino: Number that programs see, and that no other path has. It is a digest of the path, so it is the same in every
            version and every mount, unless that is the digest of another path of the mount, too.
    """

    inode: int
    name: bytes
    parent: int
    info: ObjectInfo | None
    modified_s: float
    seen_s: float
    st_ino: int

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.info is None


class Absent(NamedTuple):
    """The store has no object that would make a path exist.

    Attributes:
        seen_s: Time of the request to the store, on the monotonic clock.
    """

    seen_s: float


NodeThen: TypeAlias = "Callable[[Node | Absent | PenstockError], None]"
"""Receives a node, the answer that the path does not exist, or why neither is known."""

EntriesThen: TypeAlias = "Callable[[Sequence[Node] | PenstockError], None]"
"""Receives consecutive entries of a directory in the order of their keys, which does not change; none at its end."""

ReadEntries: TypeAlias = "Callable[[int, int, EntriesThen], None]"
"""Passes at most a number of entries from an offset on to a function, as soon as they are known; none at the end."""


class Attributes(NamedTuple):
    """The kernel's record of a node.

    Attributes:
        inode: Number by which the kernel asks for the node. It keeps pages and size by this number, so two versions of a file
            that are open at the same time must have different ones, or their bytes and sizes mix.
        mode: Kind and permissions, as in ``st_mode``.
        size_bytes: Length of a file in bytes.
        links_count: Number of names, as in ``st_nlink``.
        modified_ns: Time of the last change, in nanoseconds since the epoch.
        uid: Owner.
        gid: Group.
        st_ino: Number that programs see; 0 if it is `inode`. It may stay the same when a file is replaced.
    """

    inode: int
    mode: int
    size_bytes: int
    links_count: int
    modified_ns: int
    uid: int
    gid: int
    st_ino: int = 0
