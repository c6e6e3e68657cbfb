"""Nodes live exactly as long as the kernel refers to them."""

from collections import Counter
from random import Random

from penstock.mount.contracts import ROOT_INODE, Node
from penstock.mount.namespace.inodes import InodeTable
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


def test_the_root_is_never_forgotten():
    """Whatever the kernel gives back, the root stays; what was never referred to is not there to be forgotten."""
    table = InodeTable(ROOT)
    assert table.forget(ROOT_INODE, 3) is None
    assert table.get(ROOT_INODE) is ROOT
    assert table.forget(12345, 1) is None
