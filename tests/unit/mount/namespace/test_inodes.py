"""Nodes live exactly as long as the kernel refers to them, and have numbers of their own."""

from collections import Counter
from random import Random

import pytest

from penstock.mount.namespace.inodes import InodeTable, key_number
from penstock.mount.nodes import ROOT_INODE, Node
from penstock.types import ObjectInfo

ROOT = Node(ROOT_INODE, b"", ROOT_INODE, None, 0.0, 0.0, ROOT_INODE)
INFOS = [ObjectInfo(f"key-{number}", number, f'"{number}"', 1.0) for number in range(5)]
INFOS.append(ObjectInfo("folder/", 0, is_prefix=True))
NAMES = [b"key-%d" % number for number in range(5)] + [b"folder"]


def test_a_node_is_kept_until_its_last_reference_is_given_back():
    """After any references and returns, in any portions and from any page, a node is there while references are left."""
    random = Random(5)
    table = InodeTable(ROOT)
    counts: Counter[int] = Counter()
    for _ in range(3000):
        if random.random() < 0.5:
            chosen = random.sample(range(len(INFOS)), random.randint(1, len(INFOS)))
            seen_s = float(random.randint(0, 1))  # of the same page as before, or of another
            nodes = table.refer(ROOT_INODE, [NAMES[at] for at in chosen], [INFOS[at] for at in chosen], seen_s)
            counts.update(node.inode for node in nodes)
        elif counts:
            inode = random.choice(list(counts))
            count = random.randint(1, counts[inode])
            forgotten = table.forget(inode, count)
            counts[inode] -= count
            assert (forgotten is not None) == (counts[inode] == 0)
            counts += Counter()  # drops those without references
        assert len(table) == len(counts) + 1
        assert all(table.get(inode) is not None for inode in counts)


@pytest.mark.parametrize("bits", [62, 2, 0])
def test_paths_and_versions_have_numbers_of_their_own(bits: int) -> None:
    """Of all that is referred to, each path has one ``st_ino``, and each version of it one node, whatever the digests are."""
    random = Random(7)
    table = InodeTable(ROOT, number=lambda key: 1 << 62 | key_number(key) & (1 << bits) - 1)
    names = ["007", "7", "1_000", "1000", "\u0661", "e\u0301", "\u00e9", "20240901120005", "20240101120006"]
    infos = [ObjectInfo(f"{name}/", 0, is_prefix=True) for name in names]
    infos += [ObjectInfo(name, 5, etag, 1.0) for name in names for etag in ('"1"', '"2"')]
    infos += [ObjectInfo(name, 5, None, modified_s) for name in names for modified_s in (1.0, 2.0)]
    known: dict[int, Node] = {}  # by the number of the info
    for turn in range(5000):
        at = random.randrange(len(infos))
        if random.random() < 0.5:
            (node,) = table.refer(ROOT_INODE, [infos[at].key.rstrip("/").encode()], [infos[at]], turn)
            before = known.setdefault(at, node)
            assert (node.inode, node.st_ino) == (before.inode, before.st_ino)
            assert node.info == (None if infos[at].is_prefix else infos[at])
        elif at in known and table.forget(known[at].inode, 1) is not None:
            del known[at]
        assert len({node.inode for node in known.values()}) == len(known) == len(table) - 1
        paths = {(infos[at].key, node.st_ino) for at, node in known.items()}
        assert len({key for key, _ in paths}) == len({st_ino for _, st_ino in paths}) == len(paths)
    for at, node in known.items():
        while table.forget(node.inode, 1) is None:
            assert table.describe(ROOT_INODE, node.name, infos[at], 0).inode == node.inode
    assert len(table) == 1


def test_the_root_is_never_forgotten():
    """Whatever the kernel gives back, the root stays; what was never referred to is not there to be forgotten."""
    table = InodeTable(ROOT)
    assert table.forget(ROOT_INODE, 3) is None
    assert table.get(ROOT_INODE) is ROOT
    assert table.forget(12345, 1) is None
