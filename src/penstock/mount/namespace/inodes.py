"""Inode numbers, and the nodes that the kernel refers to.

Numbers are hashes of paths, so nothing has to be stored to keep them stable. A file's ``inode`` also depends on its version,
because the kernel keeps pages and size by it; its ``st_ino`` does not. ``hash()`` of a tuple of integers is not randomised, and
takes a third of the time of BLAKE2 (0.2 instead of 0.6 µs).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.mount.contracts import ROOT_INODE, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.types import ObjectInfo

_node = partial(
    tuple.__new__, Node
)  # without the __new__ of NamedTuple, which is written in Python: 0.1 instead of 0.4 µs
_BASE = 1 << 62  # keeps 0 and the root's number out, and the sign bit clear
_MASK = _BASE - 1


def path_number(parent: int, name: bytes) -> int:
    """Return the number of the path `name` below the directory of number `parent`, in [2**62, 2**63)."""
    return hash((parent, int.from_bytes(name, "little"))) & _MASK | _BASE


def version_number(number: int, info: ObjectInfo) -> int:
    """Return the number of one version of the file whose path has the number `number`, in [2**62, 2**63)."""
    if info.etag is not None:
        return hash((number, info.etag, info.size_bytes)) & _MASK | _BASE
    return hash((number, info.size_bytes, info.last_modified_s)) & _MASK | _BASE


class InodeTable:
    """The nodes that the kernel refers to, and how many references there are. Callers hold a lock.

    Args:
        root: The node of the root, which is never forgotten.
        number: Function that numbers paths.

    Cost: About 600 bytes per node, with its object; the kernel needs more for it.
    """

    __slots__ = ("_displaced", "_further", "_mounted_s", "_nodes", "_number")

    def __init__(self, root: Node, *, number: Callable[[int, bytes], int] = path_number) -> None:
        self._nodes: dict[int, Node] = {ROOT_INODE: root}
        self._further: dict[int, int] = {}  # references beyond the first one: most nodes have no other
        self._displaced: dict[tuple[object, ...], int] = {}  # nodes whose own number was taken
        self._mounted_s = root.modified_s
        self._number = number

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, inode: int) -> Node | None:
        """Return a node that is referred to."""
        return self._nodes.get(inode)

    def describe(self, parent: int, name: bytes, info: ObjectInfo, seen_s: float) -> Node:
        """Return the node of an entry, without a reference."""
        number = self._number(parent, name)
        modified_s = self._mounted_s if info.last_modified_s is None else info.last_modified_s
        if info.is_prefix:
            node = Node(number, name, parent, None, modified_s, seen_s, number)
        else:
            node = Node(version_number(number, info), name, parent, info, modified_s, seen_s, number)
        known = self._nodes.get(node.inode)
        if (known is not None and not _is_same(known, node)) or self._displaced:
            return node._replace(inode=self._own_number(node))
        return node

    def refer(self, parent: int, names: Sequence[bytes], infos: Sequence[ObjectInfo], seen_s: float) -> list[Node]:
        """Return the nodes of entries of one directory, each with one more reference.

        Cost: About 1 µs per node. What ``describe`` does is written out here, because this bounds how fast a tree is walked.
        """
        nodes, further, number_of, mounted_s = self._nodes, self._further, self._number, self._mounted_s
        found = []
        for name, info in zip(names, infos, strict=True):
            _, size_bytes, etag, modified_s, is_prefix, _, _ = info
            number = number_of(parent, name)
            if is_prefix:
                inode = number
            elif etag is None:
                inode = version_number(number, info)
            else:
                inode = hash((number, etag, size_bytes)) & _MASK | _BASE
            known = nodes.get(inode)
            if known is None and not self._displaced:
                if modified_s is None:
                    modified_s = mounted_s
                node = _node((inode, name, parent, None if is_prefix else info, modified_s, seen_s, number))
            elif known is not None and known[3] is info and known[5] == seen_s and known[1] == name:
                node = known  # from the same page of a listing
                further[inode] = further.get(inode, 0) + 1
            else:
                node = self.describe(parent, name, info, seen_s)
                inode = node.inode
                if inode in nodes:
                    further[inode] = further.get(inode, 0) + 1
            nodes[inode] = node
            found.append(node)
        return found

    def forget(self, inode: int, count: int) -> Node | None:
        """Drop `count` references; return the node if they were the last."""
        left = self._further.pop(inode, 0) + 1 - count
        if left > 1:
            self._further[inode] = left - 1
        return self._nodes.pop(inode, None) if left <= 0 and inode != ROOT_INODE else None

    def _own_number(self, node: Node) -> int:
        """Return another number for a node whose own is taken; it keeps that number as long as the mount lives."""
        key = (node.parent, node.name, _version(node))
        if key in self._displaced:
            return self._displaced[key]
        taken = set(self._displaced.values())
        inode = node.inode
        while inode in taken or not self._is_free(inode, node):
            inode = (inode + 1) & _MASK | _BASE
        if inode != node.inode:
            self._displaced[key] = inode
        return inode

    def _is_free(self, inode: int, node: Node) -> bool:
        known = self._nodes.get(inode)
        return known is None or _is_same(known, node)


def _is_same(one: Node, other: Node) -> bool:
    return one.parent == other.parent and one.name == other.name and _version(one) == _version(other)


def _version(node: Node) -> tuple[object, ...] | None:
    if node.info is None:
        return None
    info = node.info
    return (info.size_bytes, info.etag) if info.etag is not None else (info.size_bytes, info.last_modified_s)
