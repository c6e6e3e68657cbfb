"""Inode numbers, and the nodes that the kernel refers to.

The number of a path is a digest of its key, so nothing has to be stored to keep it stable over mounts and processes. Digests of
two keys may be equal, by chance or because somebody looked for such keys: the path that is seen later then gets a number that
no digest has, and both keep theirs as long as the mount lives.

A file's ``st_ino`` is the number of its path in all versions. Its ``inode`` is another one if the kernel still refers to an
older version, because the kernel keeps pages and size by it.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from penstock.mount.contracts import ROOT_INODE, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

        Cost: About 1 µs per node. What ``describe`` does is written out here, because this bounds how fast a tree is walked.
        """
        nodes, further, number_of, mounted_s = self._nodes, self._further, self._number, self._mounted_s
        shared, versions = self._shared, self._versions
        found = []
        for name, info in zip(names, infos, strict=True):
            key, _, etag, modified_s, is_prefix, _, _ = info
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
