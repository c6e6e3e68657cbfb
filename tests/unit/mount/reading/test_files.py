"""``StoreFiles``: open files of a store in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config import MIB
from penstock.errors import CancelledOperationError, ClosedError, ObjectChangedError, PenstockError
from penstock.fetch import Budget
from penstock.mount.nodes import Node
from penstock.mount.reading import StoreFiles
from penstock.store import MemoryStore
from penstock.types import Get

BYTES = random.Random(6).randbytes(9 * MIB)


class Noted(MemoryStore):
    """Notes what is requested, and has a budget of its own."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.gets: list[Get] = []
        self.own = Budget(64 * MIB)

    def submit(self, operation: Any, sink: Any) -> Any:
        if isinstance(operation, Get):
            self.gets.append(operation)
        return super().submit(operation, sink)

    @property
    def budget(self) -> Budget:
        return self.own

    def held_bytes(self) -> int:
        used = self.own.statistics()
        return used.used_bytes - used.free_bytes


def nothing_is_held(store: Noted) -> bool:
    """Whether all memory is given back, that of answers being written when they were cancelled a moment later."""
    deadline = time.monotonic() + 10
    while store.held_bytes() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not store.held_bytes()


class Listed:
    """Files in an order."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def following(self, node: Node, count_max: int) -> Sequence[Node]:
        """Return the next ones."""
        position = node.inode - self.nodes[0].inode + 1
        return self.nodes[position : position + count_max]


def nodes_of(store: MemoryStore) -> list[Node]:
    """The files of a store, in its order."""
    return [
        Node(inode=2 + index, st_ino=0, name=info.key.encode(), parent=1, info=info, modified_s=0.0, seen_s=0.0)
        for index, info in enumerate(store.list(recursive=True))
    ]


def without_version(node: Node) -> Node:
    """Return a node as a manifest without ETags describes it."""
    assert node.info is not None
    return node._replace(info=node.info._replace(etag=None, last_modified_s=None))


def wait_read(file: Any, offset: int, length_bytes: int) -> bytes:
    """Read, and wait for the bytes."""
    ended = threading.Event()
    results: list[Any] = []

    def then(result: Sequence[memoryview] | PenstockError) -> None:
        results.append(result)
        ended.set()

    file.read(offset, length_bytes, then)
    assert ended.wait(20)
    (result,) = results
    if isinstance(result, PenstockError):
        raise result
    return b"".join(result)


def test_files_of_one_version_share_what_is_fetched() -> None:
    """The same bytes read through two open files are requested once; the last file that is closed drops them."""
    with Noted({"k": BYTES}) as store:
        files = StoreFiles(store)
        (node,) = nodes_of(store)
        one, other = files.open_file(node), files.open_file(node)
        assert wait_read(one, 3 * MIB, 1000) == wait_read(other, 3 * MIB, 1000) == BYTES[3 * MIB : 3 * MIB + 1000]
        assert len(store.gets) == 1
        one.close()
        assert wait_read(other, 3 * MIB, 1000) == BYTES[3 * MIB : 3 * MIB + 1000]
        assert len(store.gets) == 1
        other.close()
        other.close()
        assert nothing_is_held(store)
        files.close()


def test_an_open_file_keeps_its_version() -> None:
    """A file that was replaced fails for those who opened the old version, and is read by those who open the new one."""
    with Noted({"k": BYTES}) as store:
        files = StoreFiles(store)
        (node,) = nodes_of(store)
        old = files.open_file(node)
        assert wait_read(old, 0, 10) == BYTES[:10]
        store.write("k", BYTES[::-1])
        with pytest.raises(ObjectChangedError):
            wait_read(old, 5 * MIB, 10)
        (node,) = nodes_of(store)
        new = files.open_file(node)
        assert wait_read(new, 5 * MIB, 10) == BYTES[::-1][5 * MIB : 5 * MIB + 10]
        old.close()
        new.close()
        files.close()


def test_an_open_file_keeps_the_version_of_its_first_read() -> None:
    """Without an ETag in the listing, what is read first is the version of a file for as long as that can be read."""
    with Noted({"k": BYTES}) as store:
        files = StoreFiles(store)
        node = without_version(nodes_of(store)[0])
        old = files.open_file(node)
        assert wait_read(old, 0, 10) == BYTES[:10]
        store.write("k", BYTES[::-1])
        beside = files.open_file(node)
        for file in (old, beside):
            with pytest.raises(ObjectChangedError):
                wait_read(file, 5 * MIB, 10)
        new = files.open_file(node)
        assert wait_read(new, 0, 10) + wait_read(new, 5 * MIB, 10) == BYTES[::-1][:10] + BYTES[::-1][5 * MIB :][:10]
        with pytest.raises(ObjectChangedError):
            wait_read(old, 0, 10)  # or the kernel's pages of the file would be those of two versions
        old.close()
        assert files.open_file(node).keeps_pages
        for file in (beside, new):
            file.close()
        files.close()
        assert nothing_is_held(store)


@pytest.mark.parametrize("is_listed", [True, False])
def test_files_in_the_order_of_the_listing_are_requested_once_and_ahead(is_listed: bool) -> None:
    """A pass over a directory in order requests each file once, and whole, many of them before they are opened."""
    objects = {f"{index:04d}": BYTES[index : index + 3000 + index] for index in range(300)}
    with Noted(objects) as store:
        nodes = nodes_of(store) if is_listed else [without_version(node) for node in nodes_of(store)]
        files = StoreFiles(store, following=Listed(nodes).following)
        ahead = 0
        for index, node in enumerate(nodes):
            ahead += any(get.key == node.info.key for get in store.gets)  # type: ignore[union-attr]
            file = files.open_file(node)
            assert wait_read(file, 0, 1 << 17) == objects[f"{index:04d}"]
            file.close()
        assert ahead > 200
        assert sorted(get.key for get in store.gets) == sorted(objects)
        assert all(get.span is None and (get.if_match is not None) == is_listed for get in store.gets)
        files.close()
        assert nothing_is_held(store)


def test_what_is_requested_ahead_has_a_bound() -> None:
    """Files that are requested and never opened hold at most an eighth of the budget."""
    objects = {f"{index:04d}": BYTES[:MIB] for index in range(80)}
    with Noted(objects) as store:
        nodes = nodes_of(store)
        files = StoreFiles(store, following=Listed(nodes).following)
        for node in nodes[:40]:
            file = files.open_file(node)
            wait_read(file, 0, 4096)
            file.close()
            assert store.held_bytes() <= 10 * MIB
        assert 40 < len(store.gets) == len({get.key for get in store.gets})  # nothing was dropped and requested again
        files.close()
        assert nothing_is_held(store)


def test_a_file_replaced_after_it_was_requested_ahead() -> None:
    """What was requested ahead of another version than is opened is dropped, and the new version is read."""
    objects = {f"{index:04d}": BYTES[:5000] for index in range(60)}
    with Noted(objects) as store:
        nodes = nodes_of(store)
        files = StoreFiles(store, following=Listed(nodes).following)
        for node in nodes[:20]:
            file = files.open_file(node)
            wait_read(file, 0, 5000)
            file.close()
        for key in objects:
            store.write(key, b"new" + BYTES[:5000])
        for node in nodes_of(store)[20:40]:
            file = files.open_file(node)
            assert wait_read(file, 0, 10_000) == b"new" + BYTES[:5000]
            file.close()
        files.close()
        assert nothing_is_held(store)


def test_closing_everything_ends_what_waits() -> None:
    """After ``close`` no file can be opened or read, and reads that waited have ended."""
    with Noted({"k": BYTES}) as store:
        files = StoreFiles(store)
        (node,) = nodes_of(store)
        file = files.open_file(node)
        results: list[Any] = []
        ended = threading.Event()
        with store._bucket.lock:  # nothing is answered meanwhile
            file.read(0, 10, lambda result: (results.append(result), ended.set()))  # type: ignore[arg-type,return-value]
            files.close()
            files.close()
        assert ended.wait(10)
        assert [type(result) for result in results] == [CancelledOperationError]
        with pytest.raises(ClosedError):
            files.open_file(node)
        with pytest.raises(ClosedError):
            wait_read(file, 0, 10)
        file.close()
    assert nothing_is_held(store)
