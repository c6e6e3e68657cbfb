"""Answers the kernel's requests from the tree of names and the open files.

Each version of a file is a node of its own, so the size, the time and the pages that the kernel keeps for a node are right as
long as the kernel refers to it. Only names expire: then the kernel looks the name up again and may get another node.
"""

from __future__ import annotations

import errno
import logging
import stat
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from penstock.errors import ObjectChangedError, ObjectMissingError, PenstockError, errno_of
from penstock.mount.namespace.names import NAME_BYTES_MAX, STORAGE_CLASS
from penstock.mount.nodes import Absent, Attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.mount.fuse.answering import KernelReply
    from penstock.mount.namespace.directories import StoreDirectories
    from penstock.mount.nodes import Node, ReadEntries
    from penstock.mount.reading.files import StoreFile, StoreFiles

_log = logging.getLogger("penstock")

_SHOWN_BYTES = 1 << 50
"""Size of the file system as ``df`` shows it: 1 PiB, because a bucket has none."""
_BLOCK_BYTES = 1 << 12
_ABSENT = Attributes(0, 0, 0, 0, 0, 0, 0)
_DOTS_COUNT = 2
_attributes = partial(tuple.__new__, Attributes)  # without the __new__ of NamedTuple, which is written in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Owner and permissions of all nodes, which a store does not have.

    Attributes:
        uid: Owner of all files and directories.
        gid: Group of all files and directories.
        file_mode: Permissions of files, such as 0o444.
        directory_mode: Permissions of directories, such as 0o555.
    """

    uid: int
    gid: int
    file_mode: int = 0o444
    directory_mode: int = 0o555

    def attributes(self, node: Node) -> Attributes:
        """Return the kernel's attributes of a node.

        A directory has one link, which says, as on btrfs, that the number of directories in it is not known.
        """
        inode, _, _, info, modified_s, _, st_ino = node
        modified_ns = int(modified_s * 1e9) if modified_s > 0 else 0
        if info is None:
            mode = stat.S_IFDIR | self.directory_mode
            return _attributes((inode, mode, 0, 1, modified_ns, self.uid, self.gid, st_ino))
        mode = stat.S_IFREG | self.file_mode
        return _attributes((inode, mode, info[1], 1, modified_ns, self.uid, self.gid, st_ino))

    def entries(self, nodes: Sequence[Node], following: int) -> Iterator[tuple[Attributes, bytes, int]]:
        """Iterate entries of a directory as a reply takes them; `following` is the offset after the first one.

        Cost: 0.3 us per file. The code of ``attributes`` is repeated here, because this bounds how fast a tree is walked.
        """
        mode, uid, gid = stat.S_IFREG | self.file_mode, self.uid, self.gid
        for offset, node in enumerate(nodes, following):
            inode, name, _, info, modified_s, _, st_ino = node
            if info is None:
                yield self.attributes(node), name, offset
            else:
                modified_ns = int(modified_s * 1e9) if modified_s > 0 else 0
                yield _attributes((inode, mode, info[1], 1, modified_ns, uid, gid, st_ino)), name, offset


class StoreFileSystem:
    """A read-only file system over a store; ``FileSystem`` in `fuse/dispatching.py` describes its methods.

    Args:
        directories: The tree of names.
        files: Opens files.
        view: Owner and permissions.
        ttl_s: Seconds, since the store was asked, for which the kernel may use a name and its node;
            ``math.inf`` for as long as the mount lives.
        negative_ttl_s: The same for names that do not exist.
    """

    def __init__(
        self,
        directories: StoreDirectories,
        files: StoreFiles,
        *,
        view: NodeView,
        ttl_s: float,
        negative_ttl_s: float,
    ) -> None:
        self._directories = directories
        self._files = files
        self._view = view
        self._ttl_s = ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._numbers = count(1)
        self._open_files: dict[int, tuple[StoreFile, Node]] = {}
        self._open_directories: dict[int, tuple[ReadEntries, int]] = {}
        self._forget_names: Callable[[], object] = lambda: None  # until there is a session

    def when_outdated(self, forget_names: Callable[[], object]) -> None:
        """Set what makes the kernel look up names again; it is called when a file turns out to have changed."""
        self._forget_names = forget_names

    # ── names ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def look_up(self, parent: int, name: bytes, reply: KernelReply) -> None:
        """Find an entry of a directory."""
        if len(name) > NAME_BYTES_MAX:
            reply.error(errno.ENAMETOOLONG)
            return
        self._directories.look_up(parent, name, partial(self._found, reply))

    def _found(self, reply: KernelReply, answer: Node | Absent | PenstockError) -> None:
        if isinstance(answer, PenstockError):
            _refuse(reply, answer)
        elif isinstance(answer, Absent):
            lifetime_s = answer.seen_s + self._negative_ttl_s - monotonic()
            if lifetime_s > 0:
                reply.entry(_ABSENT, lifetime_s=lifetime_s)
            else:
                reply.error(errno.ENOENT)
        elif not reply.entry(self._view.attributes(answer), lifetime_s=self._lifetime_s(answer)):
            self._directories.forget(answer.inode, 1)

    def _lifetime_s(self, node: Node) -> float:
        return max(0.0, node.seen_s + self._ttl_s - monotonic())

    def forget(self, inode: int, count: int) -> None:
        """The kernel has dropped `count` references to a node."""
        self._directories.forget(inode, count)

    def get_attributes(self, inode: int, reply: KernelReply) -> None:
        """Describe a node. The attributes of a node never change, so the store is not asked."""
        node = self._directories.node(inode)
        if node is None:
            reply.error(errno.ESTALE)
        else:
            reply.attributes(self._view.attributes(node), lifetime_s=self._ttl_s)

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, inode: int, flags: int, reply: KernelReply) -> None:
        """Open a file. The kernel's pages of it stay if they belong to its version."""
        node = self._directories.node(inode)
        if node is None or node.is_directory:
            reply.error(errno.ESTALE if node is None else errno.EISDIR)
            return
        try:
            file = self._files.open_file(node)
        except PenstockError as error:
            _refuse(reply, error)
            return
        handle = next(self._numbers)
        self._open_files[handle] = file, node
        if not reply.opened(handle, keeps_cache=file.keeps_pages):
            self._close_file(handle)

    def read(self, handle: int, offset: int, length_bytes: int, reply: KernelReply) -> None:
        """Read an open file."""
        file, node = self._open_files[handle]
        if offset >= (node.info.size_bytes if node.info is not None else 0):
            reply.data(())
            return
        file.read(offset, length_bytes, partial(self._read, node, reply))

    def _read(self, node: Node, reply: KernelReply, answer: Sequence[memoryview] | PenstockError) -> None:
        if not isinstance(answer, PenstockError):
            reply.data(answer)
            return
        if isinstance(answer, ObjectChangedError | ObjectMissingError):
            self._directories.drop_listing_of(node)
            self._forget_names()
            _refuse(reply, answer, number=errno.ESTALE)
            return
        _refuse(reply, answer)

    def release(self, handle: int, reply: KernelReply) -> None:
        """Close an open file."""
        self._close_file(handle)
        reply.ok()

    def _close_file(self, handle: int) -> None:
        file, _ = self._open_files.pop(handle)
        file.close()

    # ── directories ────────────────────────────────────────────────────────────────────────────────────────────────

    def open_directory(self, inode: int, reply: KernelReply) -> None:
        """Open a directory."""
        try:
            read = self._directories.open_directory(inode)
        except PenstockError as error:
            _refuse(reply, error)
            return
        handle = next(self._numbers)
        self._open_directories[handle] = read, inode
        if not reply.opened(handle):
            del self._open_directories[handle]

    def read_directory(self, handle: int, offset: int, reply: KernelReply) -> None:
        """Read an open directory. Offset 0 is ``.``, 1 is ``..``, and entry number n has the offset n + 2."""
        read, inode = self._open_directories[handle]
        index = max(0, offset - _DOTS_COUNT)
        read(index, reply.entries_max, partial(self._listed, inode, offset, reply))

    def _listed(self, inode: int, offset: int, reply: KernelReply, answer: Sequence[Node] | PenstockError) -> None:
        if isinstance(answer, PenstockError):
            _refuse(reply, answer)
            return
        lifetime_s = self._lifetime_s(answer[0]) if answer else 0.0
        taken_count = reply.directory(self._described(inode, offset, answer), lifetime_s=lifetime_s)
        for node in answer[taken_count:]:
            self._directories.forget(node.inode, 1)

    def _described(self, inode: int, offset: int, nodes: Sequence[Node]) -> Iterator[tuple[Attributes, bytes, int]]:
        here = self._directories.node(inode)
        above = self._directories.node(here.parent) if here is not None else None
        for number, (name, node) in enumerate(((b".", here), (b"..", above)), 1):
            if offset < number and node is not None:
                yield self._view.attributes(node), name, number
        yield from self._view.entries(nodes, max(offset, _DOTS_COUNT) + 1)

    def release_directory(self, handle: int, reply: KernelReply) -> None:
        """Close an open directory."""
        del self._open_directories[handle]
        reply.ok()

    # ── the rest ───────────────────────────────────────────────────────────────────────────────────────────────────

    def get_statistics(self, reply: KernelReply) -> None:
        """Describe the file system: it is full, because nothing can be written."""
        reply.statistics(blocks=_SHOWN_BYTES // _BLOCK_BYTES, files=0, block_bytes=_BLOCK_BYTES)

    def get_extended_attribute(self, inode: int, name: bytes, reply: KernelReply) -> None:
        """Read ``user.etag`` or ``user.storage_class``."""
        # `ls -l` asks for access control lists and labels of each file
        value = self._extended(inode).get(name) if name.startswith(b"user.") else None
        if value is None:
            reply.error(errno.ENODATA)
        else:
            reply.extended(value)

    def list_extended_attributes(self, inode: int, reply: KernelReply) -> None:
        """List the names of the extended attributes that are known."""
        reply.extended(b"".join(name + b"\0" for name in self._extended(inode)))

    def _extended(self, inode: int) -> dict[bytes, bytes]:
        node = self._directories.node(inode)
        if node is None or node.info is None:
            return {}
        found: dict[bytes, bytes] = {}
        if node.info.etag is not None:
            found[b"user.etag"] = node.info.etag.strip('"').encode()
        storage_class = node.info.headers.get(STORAGE_CLASS)
        if storage_class is not None:
            found[b"user.storage_class"] = storage_class
        return found

    def close(self) -> None:
        """The file system was unmounted: drop everything, and cancel the requests in flight."""
        self._directories.close()
        for handle in list(self._open_files):
            self._close_file(handle)
        self._files.close()
        self._open_directories.clear()


def _refuse(reply: KernelReply, error: PenstockError, *, number: int | None = None) -> None:
    """Answer with the error's number. The log has all of the error: a warning, unless the program looked for a missing name."""
    number = errno_of(error) if number is None else number
    level = logging.INFO if number == errno.ENOENT else logging.WARNING
    _log.log(level, "A request of a program failed: %s", error)
    reply.error(number)
