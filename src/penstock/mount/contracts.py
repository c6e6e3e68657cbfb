"""The interfaces between the parts of a mount.

Requests come from the kernel on one thread, which must not wait. Whatever takes time is begun there and ends on another thread,
usually that of an engine's event loop, by a call of ``then`` or of a method of ``Reply``: exactly once, and quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.errors import PenstockError
    from penstock.types import Buffer, ObjectInfo

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
        seen_s: When the store was asked for what this record says, on the monotonic clock. Its lifetime begins here.
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
        seen_s: When the store was asked, on the monotonic clock.
    """

    seen_s: float


NodeThen: TypeAlias = "Callable[[Node | Absent | PenstockError], None]"
"""Receives a node, the answer that the path does not exist, or why neither is known."""

EntriesThen: TypeAlias = "Callable[[Sequence[Node] | PenstockError], None]"
"""Receives consecutive entries of a directory in the order of their keys, which does not change; none at its end."""

BytesThen: TypeAlias = "Callable[[Sequence[memoryview] | PenstockError], None]"
"""Receives the bytes of a read in one or more pieces. They stay as they are until nothing refers to them."""


class Directories(Protocol):
    """The tree of names. None of the methods waits, and they may be called from any thread.

    A node that ``look_up`` or a stream hands out has one more reference. The kernel gives it back with FORGET; whoever does not
    pass the node on to the kernel gives it back with ``forget``.
    """

    def node(self, inode: int) -> Node | None:
        """Return a node that the kernel was told of, or None if it has been forgotten."""

    def look_up(self, parent: int, name: bytes, then: NodeThen) -> None:
        """Find an entry of a directory."""

    def distrust(self, node: Node) -> None:
        """Ask the store for the names of the directory again: it has another version of the file `node`, or none."""

    def open_directory(self, inode: int) -> DirectoryStream:
        """Begin to read a directory."""

    def forget(self, inode: int, count: int) -> None:
        """Drop `count` of the references to a node."""

    def close(self) -> None:
        """Cancel what is in flight. What waits for it ends with ``CancelledOperationError``."""


class FollowingFiles(Protocol):
    """The order of the files of a directory, so that the next ones can be read ahead."""

    def following(self, node: Node, count_max: int) -> Sequence[Node]:
        """Return the files that come after `node` in the listing of its directory, without the directories between them.

        It may be called from any thread, returns soon and sends no request: there are fewer than `count_max`, or none, if the
        directory ends there or what follows is not known now.

        Args:
            node: A file.
            count_max: The most files to return.
        """


class DirectoryStream(Protocol):
    """An open directory. Its entries appear as the pages of the listing arrive, so the first ones are there at once."""

    def entries(self, offset: int, count_max: int, then: EntriesThen) -> None:
        """Return at most `count_max` entries from number `offset` on; an offset that was read before may be asked for again.

        The numbers begin at 0, and the directory itself and its parent (``.`` and ``..``) are not among the entries.
        """

    def close(self) -> None:
        """Drop what is held; no more pages are requested for this stream."""


class FileHandles(Protocol):
    """What makes open files; it owns the memory of all of them, within the process's byte budget.

    Its methods and those of the files may be called from any thread, and none of them waits.
    """

    def open_file(self, node: Node) -> FileHandle:
        """Open a file, of the version that `node` has. This sends no request."""

    def close(self) -> None:
        """Cancel what is in flight, and drop everything; idempotent."""


class FileHandle(Protocol):
    """One open file."""

    @property
    def keeps_pages(self) -> bool:
        """Whether the pages of the node that the kernel may have are of the version that this file reads."""

    def read(self, offset: int, length_bytes: int, then: BytesThen) -> None:
        """Read `length_bytes` bytes from `offset` on, fewer only at the end of the file."""

    def close(self) -> None:
        """Drop what is held, and cancel what is in flight. Reads that still wait end with ``CancelledOperationError``."""


class Reply(Protocol):
    """The reply to one request of the kernel. One method is called once, on any thread.

    A second call is refused and logged. What a method is given may be dropped or changed as soon as it returns.
    """

    @property
    def entries_max(self) -> int:
        """Largest number of entries that could fit into the reply to READDIR or READDIRPLUS."""

    def error(self, number: int) -> None:
        """Reply with an errno."""

    def entry(self, attributes: Attributes, *, lifetime_s: float) -> bool:
        """Reply to LOOKUP. The kernel may use the name and the attributes for `lifetime_s` seconds.

        Inode 0 says that the name does not exist, and that the kernel may remember this. Any other inode gives the kernel a
        reference, which it drops by ``forget``, possibly before this call returns: count it before the call. Returns False if
        the kernel no longer waited, and so took no reference.
        """

    def attributes(self, attributes: Attributes, *, lifetime_s: float) -> None:
        """Reply to GETATTR."""

    def opened(self, handle: int, *, keeps_cache: bool = False, is_direct: bool = False, backing: int = 0) -> bool:
        """Reply to OPEN and OPENDIR; `keeps_cache` keeps the kernel's pages of the file, `is_direct` goes past them.

        With the number of a `backing` file (``FuseSession.open_backing``), the kernel reads from that file and sends no READ.
        While a node is open in this way, it cannot be opened in another one, nor the other way round: programs get ``EIO``.

        For a directory, `keeps_cache` lets the kernel remember its entries, and use those that it remembers. Returns False if
        the kernel no longer waited: the handle is not open, and will not be released.
        """

    def data(self, pieces: Sequence[Buffer]) -> None:
        """Reply to READ, without copying the pieces into one."""

    def directory(self, entries: Iterable[tuple[Attributes, bytes, int]], *, lifetime_s: float) -> int:
        """Reply to READDIR and READDIRPLUS: entries with their names and the offset after each; none at the end.

        Entries are taken until the reply is full. Returns how many of them gave the kernel a reference, which is 0 for READDIR:
        the first ones, but for ``.`` and ``..``, which give none. As with ``entry``, count before the call, and take back
        afterwards what was too much.
        """

    def extended(self, value: bytes) -> None:
        """Reply to GETXATTR and LISTXATTR, which may have asked for the length alone or for less room than that."""

    def statistics(self, *, blocks: int, files: int, block_bytes: int) -> None:
        """Reply to STATFS."""

    def ok(self) -> None:
        """Reply without a body."""


class Attributes(NamedTuple):
    """What the kernel is told of a node.

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


class FileSystem(Protocol):
    """Answers the kernel's requests. Each method is called on the session's thread and must not wait."""

    def look_up(self, parent: int, name: bytes, reply: Reply) -> None:
        """Find an entry of a directory: ``reply.entry``."""

    def forget(self, inode: int, count: int) -> None:
        """The kernel has dropped `count` references to a node."""

    def get_attributes(self, inode: int, reply: Reply) -> None:
        """Describe a node: ``reply.attributes``."""

    def open(self, inode: int, flags: int, reply: Reply) -> None:
        """Open a file: ``reply.opened``."""

    def read(self, handle: int, offset: int, length_bytes: int, reply: Reply) -> None:
        """Read an open file: ``reply.data``."""

    def release(self, handle: int, reply: Reply) -> None:
        """Close an open file: ``reply.ok``."""

    def open_directory(self, inode: int, reply: Reply) -> None:
        """Open a directory: ``reply.opened``."""

    def read_directory(self, handle: int, offset: int, reply: Reply) -> None:
        """Read an open directory: ``reply.directory``."""

    def release_directory(self, handle: int, reply: Reply) -> None:
        """Close an open directory: ``reply.ok``."""

    def get_statistics(self, reply: Reply) -> None:
        """Describe the file system: ``reply.statistics``."""

    def get_extended_attribute(self, inode: int, name: bytes, reply: Reply) -> None:
        """Read an extended attribute: ``reply.extended``."""

    def list_extended_attributes(self, inode: int, reply: Reply) -> None:
        """List the names of the extended attributes, each ended by NUL: ``reply.extended``."""

    def close(self) -> None:
        """The file system was unmounted: drop everything, and cancel what is in flight."""
