"""Inode numbers, and the nodes that the kernel refers to.

The number of a path is a digest of its key, so nothing has to be stored to keep it stable over mounts and processes. Digests of
two keys may be equal, by chance or because somebody searched for such keys. The path that is seen later then gets a number
that no digest has, and both paths keep their numbers as long as the mount lives.

A file's ``st_ino`` is the number of its path in all versions. Its ``inode`` is another number if the kernel still refers to an
older version, because the kernel keeps pages and size by inode.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from typing import TYPE_CHECKING, TypeAlias

from penstock.mount.nodes import ROOT_INODE, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.mount.namespace.listing import DirectoryListing
    from penstock.types import Key, ObjectInfo


_node = partial(
    tuple.__new__, Node
)  # without the __new__ of NamedTuple, which is written in Python: 0.1 instead of 0.4 µs
_BASE = 1 << 62  # keeps the numbers of digests apart from all others, and the sign bit clear
_MASK = _BASE - 1

_Path: TypeAlias = tuple[int, bytes, bool]  # number of the directory, name, and whether it is a directory itself


def key_number(key: Key) -> int:
    """Return the number of a file's key or a directory's prefix, in [2**62, 2**63).

    Cost: 0.6 µs. Names differ in a few digits, so the digest must be a good one: ``hash()`` of tuples of integers takes
    half of this time, but is the same for integers that differ by a multiple of 2**61 - 1.
    """
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()) & _MASK | _BASE


class InodeTable:
    """The nodes that the kernel refers to, and how many references there are. Callers hold a lock.

    Args:
        root: The node of the root, which is never forgotten.
        number: Function that numbers keys, as ``key_number`` does.

    Cost: About 600 bytes per node, with its object; the kernel needs more for it.
    """

    __slots__ = ("_further", "_mounted_s", "_nodes", "_number", "_shared", "_spare", "_versions")

    def __init__(self, root: Node, *, number: Callable[[Key], int] = key_number) -> None:
        self._nodes: dict[int, Node] = {ROOT_INODE: root}
        self._further: dict[int, int] = {}  # references beyond the first one: most nodes have no other
        self._shared: dict[int, dict[_Path, int]] = {}  # by digest, if that of several paths: the number of each
        self._versions: dict[int, list[int]] = {}  # by st_ino: nodes of the path with another number than that
        self._spare = count(ROOT_INODE + 1)
        self._mounted_s = root.modified_s
        self._number = number

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, inode: int) -> Node | None:
        """Return a node that is referred to."""
        return self._nodes.get(inode)

    def describe(self, parent: int, name: bytes, info: ObjectInfo, seen_s: float) -> Node:
        """Return the node of an entry, without a reference."""
        st_ino = self._path_number(self._number(info.key), (parent, name, info.is_prefix))
        modified_s = self._mounted_s if info.last_modified_s is None else info.last_modified_s
        node = Node(st_ino, name, parent, None if info.is_prefix else info, modified_s, seen_s, st_ino)
        for inode in (st_ino, *self._versions.get(st_ino, ())):
            known = self._nodes.get(inode)
            if known is not None and _version(known) == _version(node):
                return node._replace(inode=inode)
        return node._replace(inode=next(self._spare)) if st_ino in self._nodes else node

    def refer(self, parent: int, names: Sequence[bytes], infos: Sequence[ObjectInfo], seen_s: float) -> list[Node]:
        """Return the nodes of entries of one directory, each with one more reference.

        Cost: About 1 µs per node. The code of ``describe`` is repeated here, because this bounds how fast a tree is walked.
        """
        nodes, further, number_of, mounted_s = self._nodes, self._further, self._number, self._mounted_s
        shared, versions = self._shared, self._versions
        found = []
        for name, info in zip(names, infos, strict=True):
            key, _, etag, modified_s, is_prefix, *_ = info
            inode = number_of(key)
            known = nodes.get(inode)
            if modified_s is None:
                modified_s = mounted_s
            if known is None and inode not in shared and inode not in versions:
                node = _node((inode, name, parent, None if is_prefix else info, modified_s, seen_s, inode))
            elif known is not None and (before := known[3]) is not None and etag is not None and before[:3] == info[:3]:
                if before is info and known[5] == seen_s:
                    node = known  # from the same page of a listing
                else:
                    node = _node((inode, name, parent, info, modified_s, seen_s, inode))
            else:
                node = self.describe(parent, name, info, seen_s)
                inode = node.inode
                known = nodes.get(inode)
                if known is None and inode != node.st_ino:
                    versions.setdefault(node.st_ino, []).append(inode)
            if known is not None:
                further[inode] = further.get(inode, 0) + 1
            nodes[inode] = node
            found.append(node)
        return found

    def forget(self, inode: int, count: int) -> Node | None:
        """Drop `count` references; return the node if they were the last."""
        left = self._further.pop(inode, 0) + 1 - count
        if left > 1:
            self._further[inode] = left - 1
        node = self._nodes.pop(inode, None) if left <= 0 and inode != ROOT_INODE else None
        if node is not None and inode != node.st_ino:
            self._versions[node.st_ino].remove(inode)
            if not self._versions[node.st_ino]:
                del self._versions[node.st_ino]
        return node

    def _path_number(self, digest: int, path: _Path) -> int:
        """Return the number of a path: its digest, unless that is the number of another path."""
        numbers = self._shared.get(digest)
        if numbers is None:
            inode = next(iter(self._versions.get(digest, ())), digest)
            known = self._nodes.get(inode)
            if known is None or _path(known) == path:
                return digest
            numbers = self._shared[digest] = {_path(known): digest}
        return numbers.get(path) or numbers.setdefault(path, next(self._spare))


def _path(node: Node) -> _Path:
    return node.parent, node.name, node.info is None


def _version(node: Node) -> tuple[object, ...] | None:
    if node.info is None:
        return None
    info = node.info
    return (info.size_bytes, info.etag) if info.etag is not None else (info.size_bytes, info.last_modified_s)


HIDDEN_FOLDERS_MAX = 10_000
"""Directories for which the number of hidden keys is remembered."""


@dataclass(slots=True, eq=False)
class Folder:
    """The state of one directory.

    Attributes:
        prefix: Prefix of its keys: empty, or ends with a slash.
        inode: Inode number by which the kernel refers to it; None if it does not.
        listing: Newest listing of the directory, or None.
        is_read: Whether a program has read entries of `listing`.
        queries_count: Names that the store was asked for one by one since `listing` was begun.
    """

    prefix: str
    inode: int | None = None
    listing: DirectoryListing | None = None
    is_read: bool = False
    queries_count: int = 0

    def sub_prefixes_after(self, prefix: str) -> list[str]:
        """Return the prefixes of the directories in it that come after `prefix`, as far as they are known."""
        if self.listing is None:
            return []
        known = self.listing.sub_prefixes
        return known[bisect_right(known, prefix) :]


class FolderTable:
    """The folders that the kernel refers to or that have a listing. Callers hold a lock.

    Args:
        entries_max: The most entries that listings hold together; the listing that was not used for the longest time is dropped
            first. One listing may be longer than that.
    """

    __slots__ = ("_by_inode", "_by_prefix", "_entries_count", "_entries_max", "_hidden", "_listed")

    def __init__(self, *, entries_max: int) -> None:
        self._by_inode: dict[int, Folder] = {}
        self._by_prefix: dict[str, Folder] = {}
        self._listed: OrderedDict[str, Folder] = OrderedDict()  # those with a listing, the last used one last
        self._entries_max = entries_max
        self._entries_count = 0
        self._hidden: dict[str, int] = {}

    @property
    def entries_count(self) -> int:
        """Number of entries that listings hold."""
        return self._entries_count

    @property
    def hidden_count(self) -> int:
        """Number of keys in the directories that were listed so far that are not visible."""
        return sum(self._hidden.values())

    def listings(self) -> list[DirectoryListing]:
        """Return all listings that are kept."""
        return [folder.listing for folder in self._listed.values() if folder.listing is not None]

    def get(self, inode: int) -> Folder | None:
        """Return a folder that the kernel refers to by its inode number."""
        return self._by_inode.get(inode)

    def at(self, prefix: str) -> Folder:
        """Return the folder of a prefix, which is made if it is new."""
        folder = self._by_prefix.get(prefix)
        if folder is None:
            folder = self._by_prefix[prefix] = Folder(prefix)
        return folder

    def refer(self, inode: int, prefix: str) -> None:
        """Note that the kernel refers to the folder of a prefix by this number."""
        folder = self._by_inode[inode] = self.at(prefix)
        folder.inode = inode

    def forget(self, inode: int) -> None:
        """Note that the kernel no longer refers to a folder."""
        folder = self._by_inode.pop(inode, None)
        if folder is not None and folder.inode == inode:
            folder.inode = None
            self._drop_unused(folder)

    def set_listing(self, folder: Folder, listing: DirectoryListing | None) -> None:
        """Replace the listing of a folder."""
        if folder.listing is not None:
            self._entries_count -= folder.listing.entries_count
        folder.listing, folder.is_read, folder.queries_count = listing, False, 0
        self._listed.pop(folder.prefix, None)
        if listing is not None:
            self._entries_count += listing.entries_count
            self._listed[folder.prefix] = folder

    def use(self, folder: Folder) -> None:
        """Note that the listing of a folder is used."""
        if folder.prefix in self._listed:
            self._listed.move_to_end(folder.prefix)

    def grow(self, added_count: int) -> None:
        """Note that a listing has grown, and drop others for it."""
        self._entries_count += added_count
        while self._entries_count > self._entries_max and len(self._listed) > 1:
            oldest = next(iter(self._listed.values()))
            self.set_listing(oldest, None)
            self._drop_unused(oldest)

    def note_hidden(self, prefix: str, hidden_count: int) -> bool:
        """Remember how many keys of a directory are hidden; whether it is new."""
        before = self._hidden.get(prefix, 0)
        if hidden_count:
            self._hidden[prefix] = hidden_count
        else:
            self._hidden.pop(prefix, None)
        while len(self._hidden) > HIDDEN_FOLDERS_MAX:
            del self._hidden[next(iter(self._hidden))]
        return hidden_count > before

    def above(self, folder: Folder) -> Iterator[Folder]:
        """Iterate the parents of a folder, up to the root."""
        prefix = folder.prefix
        while prefix:
            prefix = prefix[: prefix.rfind("/", 0, -1) + 1]
            parent = self._by_prefix.get(prefix)
            if parent is None:
                return
            yield parent

    def _drop_unused(self, folder: Folder) -> None:
        if folder.inode is None and folder.listing is None:
            self._by_prefix.pop(folder.prefix, None)


FIRST_AHEAD = 4
"""Directories to list ahead when a walk is first seen; if it was none, this many requests were wasted."""

AHEAD_MAX = 64
"""The most directories to list ahead: at 30 ms per listing, 2 000 directories per second."""

_PREDICTED_MAX = 16 * AHEAD_MAX


class WalkAhead:
    """Chooses the directories to list ahead. Callers hold a lock.

    Args:
        folders: The folders that are known.
        is_listed: Whether a folder has a listing that may still be used.
    """

    __slots__ = ("_ahead_count", "_current", "_folders", "_is_listed", "_predicted")

    def __init__(self, folders: FolderTable, *, is_listed: Callable[[Folder], bool]) -> None:
        self._is_listed = is_listed
        self._folders = folders
        self._ahead_count = 0
        self._current: Folder | None = None
        self._predicted: set[str] = set()  # prefixes of directories that were listed ahead and not opened yet

    def opened(self, folder: Folder) -> list[Folder]:
        """Note that a program opens a directory; return the directories to list ahead."""
        if folder.prefix in self._predicted:
            self._predicted.discard(folder.prefix)
            self._ahead_count = min(2 * self._ahead_count, AHEAD_MAX)
        elif any(parent.is_read for parent in islice(self._folders.above(folder), 1)):
            # Several programs may walk at the same time, and each of them is predicted now and then.
            self._ahead_count = max(FIRST_AHEAD, self._ahead_count // 2)
        else:
            self._ahead_count = 0
        self._current = folder
        return self.extend()

    def extend(self) -> list[Folder]:
        """Return the directories to list ahead that are known by now, after a page has arrived."""
        if not self._ahead_count or self._current is None:
            return []
        ahead = list(islice(self._following(self._current), self._ahead_count))
        missing = [folder for folder in ahead if not self._is_listed(folder)]
        if len(self._predicted) > _PREDICTED_MAX:  # a walk that leaves most directories out
            self._predicted.clear()
        self._predicted.update(folder.prefix for folder in missing)
        return missing

    def _following(self, folder: Folder) -> Iterator[Folder]:
        """Iterate the directories after `folder` in the order of a walk, as far as listings show them."""
        yield from self._inside(folder, "")
        for parent in self._folders.above(folder):
            if not parent.is_read:
                return
            yield from self._inside(parent, folder.prefix)
            folder = parent

    def _inside(self, folder: Folder, after: str) -> Iterator[Folder]:
        for prefix in folder.sub_prefixes_after(after):
            child = self._folders.at(prefix)
            yield child
            yield from self._inside(child, "")
