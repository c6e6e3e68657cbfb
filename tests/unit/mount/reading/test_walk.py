"""``DirectoryWalk``: which files are requested before they are opened."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.config import GIB
from penstock.mount.nodes import Node
from penstock.mount.reading.walk import DEPTH_MAX, DirectoryWalk
from penstock.types import ObjectInfo


def nodes_of(count: int) -> list[Node]:
    """Files of one directory."""
    return [
        Node(
            inode=100 + index,
            st_ino=0,
            name=b"%06d" % index,
            parent=1,
            info=ObjectInfo(f"{index:06d}", 1000, '"e"', 0.0),
            modified_s=0.0,
            seen_s=0.0,
        )
        for index in range(count)
    ]


class Listed:
    """The order of files that are all known."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.calls_count = 0
        self.named_count = 0
        self._positions = {node.inode: index for index, node in enumerate(nodes)}

    def following(self, node: Node, count_max: int) -> Sequence[Node]:
        """Return the next ones."""
        self.calls_count += 1
        position = self._positions[node.inode] + 1
        following = self.nodes[position : position + count_max]
        self.named_count += len(following)
        return following


def requested_by(nodes: list[Node], order: list[Node], *, waits: bool = True) -> list[int]:
    """Read files in an order, and return the inodes that were requested ahead, in the order of the requests."""
    walk = DirectoryWalk(Listed(nodes).following, bytes_max=GIB)
    requested: list[int] = []
    for node in order:
        requested += [following.inode for following in walk.read(node, waits=waits)]
    return requested


def test_files_in_order_are_requested_ahead_once() -> None:
    """Who reads in the order of the listing finds nearly all files requested, each once, a bounded number ahead."""
    nodes = nodes_of(2000)
    walk = DirectoryWalk(Listed(nodes).following, bytes_max=GIB)
    requested: list[int] = []
    for index, node in enumerate(nodes):
        requested += [following.inode for following in walk.read(node, waits=True)]
        assert len([inode for inode in requested if inode > node.inode]) <= DEPTH_MAX
        assert len(requested) <= 3 * index + 4
    assert len(requested) == len(set(requested)) > 1950


def test_no_more_bytes_are_requested_than_may_be_held() -> None:
    """Nothing is requested that would have to be dropped before it is read, and what is read makes room."""
    nodes = nodes_of(500)
    walk = DirectoryWalk(Listed(nodes).following, bytes_max=8 * 1000)
    requested: list[int] = []
    for node in nodes:
        requested += [following.inode for following in walk.read(node, waits=True)]
        assert len([inode for inode in requested if inode > node.inode]) <= 8
    assert len(requested) == len(set(requested)) > 480
    assert walk.take_given_up() == []


def test_threads_may_read_a_little_out_of_order() -> None:
    """16 threads that take the files in order open them nearly in order, which is enough."""
    nodes = nodes_of(2000)
    shuffle = random.Random(2)
    order: list[Node] = []
    for first in range(0, 2000, 16):
        group = nodes[first : first + 16]
        shuffle.shuffle(group)
        order += group
    assert len(requested_by(nodes, order)) > 1900


def test_random_order_requests_next_to_nothing() -> None:
    """Files in random order are left alone, in a large directory and in small ones."""
    for count, most in ((4000, 8), (200, 40), (30, 40)):
        nodes = nodes_of(count)
        order = list(nodes)
        random.Random(4).shuffle(order)
        assert len(requested_by(nodes, order)) <= most


def test_a_directory_that_wastes_requests_is_left_alone() -> None:
    """When files were requested for nothing again and again, no more are requested."""
    nodes = nodes_of(4000)
    walk = DirectoryWalk(Listed(nodes).following, bytes_max=GIB)
    wasted = 0
    for first in range(0, 4000, 40):
        for node in nodes[first : first + 5]:  # then the program goes elsewhere
            walk.read(node, waits=True)
            wasted += len(walk.take_given_up())
    assert 0 < wasted < 100


def test_nothing_is_requested_while_nobody_waits() -> None:
    """Files that are at hand, as in a warm cache, cause no requests."""
    nodes = nodes_of(500)
    assert requested_by(nodes, nodes, waits=False) == []


def test_the_order_is_asked_for_many_files_at_a_time() -> None:
    """Asking what follows costs one call for many files."""
    nodes = nodes_of(2000)
    listed = Listed(nodes)
    walk = DirectoryWalk(listed.following, bytes_max=GIB)
    for node in nodes:
        walk.read(node, waits=True)
    assert listed.calls_count < 200


def test_random_order_asks_for_few_files() -> None:
    """Asking what follows is not free, so random order causes less than one file to be named for each."""
    nodes = nodes_of(4000)
    listed = Listed(nodes)
    walk = DirectoryWalk(listed.following, bytes_max=GIB)
    for node in random.Random(9).sample(nodes, len(nodes)):
        walk.read(node, waits=True)
    assert listed.named_count < 4000


def test_order_is_noticed_after_much_disorder() -> None:
    """A program that reads in order after many files in random order is noticed within a hundred files."""
    nodes = nodes_of(3000)
    walk = DirectoryWalk(Listed(nodes).following, bytes_max=GIB)
    for node in random.Random(9).sample(nodes[:1000], 1000):
        walk.read(node, waits=True)
    walk.take_given_up()
    requested = [following for node in nodes[1000:1200] for following in walk.read(node, waits=True)]
    assert len(requested) > 90


def test_the_end_of_a_directory_is_no_trouble() -> None:
    """At the end nothing follows, and a second pass over the directory is noticed as the first was."""
    nodes = nodes_of(50)
    requested = requested_by(nodes, nodes + nodes)
    assert len(requested) > 80
