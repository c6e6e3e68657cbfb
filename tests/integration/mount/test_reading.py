"""Open files of a mount on a server that misbehaves, and through the node's cache; without a kernel between."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import penstock as ps
from penstock.config import KIB, MIB
from penstock.errors import ChecksumError, ObjectChangedError, PenstockError, StoreError
from penstock.fetch import Budget
from penstock.mount.nodes import Node
from penstock.mount.reading import StoreFiles
from penstock.store.base import Store
from servers.faults import KINDS
from servers.faulty import FaultyServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(110)]

SMALL = {f"small/{number:04d}": random.Random(number).randbytes(number * 37 % 9000) for number in range(300)}
LARGE = {f"large/{number}": random.Random(-number).randbytes(5 * MIB + number) for number in range(4)}
SURVIVED = ["close", "close_head", "reset", "reset_head", "stall", "stall_head", "delay", "500", "503", "slow_down"]
"""Kinds that trying again overcomes."""


@pytest.fixture
def connect_hasty(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> Callable[..., Store]:
    """Connect to the server, whose objects are ``SMALL`` and ``LARGE``, with short deadlines."""
    for key, data in (SMALL | LARGE).items():
        faulty.objects[key] = data

    def connect(**settings: Any) -> Store:
        return connect_faulty(
            transport=ps.TransportConfig(connect_s_max=2, first_byte_s_max=1, stall_s_max=1),
            retry=ps.RetryConfig(attempts_max=8, backoff_s=0.01, backoff_s_max=0.05),
            fetch=ps.FetchConfig(part_bytes=256 * KIB),
            **settings,
        )

    return connect


def nodes_of(store: Store) -> list[Node]:
    """The files of a store, in its order."""
    return [
        Node(
            inode=number + 2,
            st_ino=0,
            name=info.key.encode(),
            parent=1 if info.key < "small" else 2**40,
            info=info,
            modified_s=0.0,
            seen_s=0.0,
        )
        for number, info in enumerate(store.list())
    ]


class Listed:
    """The order of files that are all known."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def following(self, node: Node, count_max: int) -> Sequence[Node]:
        """Return the next ones."""
        return self.nodes[node.inode - 1 : node.inode - 1 + count_max]


class Answers:
    """Collects what reads bring."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)
        self._results: dict[int, Any] = {}

    def begin(self, file: Any, offset: int, length_bytes: int) -> int:
        """Send a read, and return its number."""
        number = len(self._results)
        self._results[number] = None

        def then(result: Sequence[memoryview] | PenstockError) -> None:
            self._results[number] = result if isinstance(result, PenstockError) else b"".join(result)
            self._ended.release()

        file.read(offset, length_bytes, then)
        return number

    def wait(self) -> list[Any]:
        """Wait for all of them, and return bytes or errors in the order in which they were sent."""
        for _ in self._results:
            assert self._ended.acquire(timeout=100), "a read was never answered"
        results, self._results = list(self._results.values()), {}
        return results


def read_whole(files: StoreFiles, node: Node, *, deep: int = 3) -> bytes | PenstockError:
    """Read a file in sequence, as the kernel does for a program: some requests at a time."""
    assert node.info is not None
    file, answers = files.open_file(node), Answers()
    whole = b""
    try:
        for start in range(0, node.info.size_bytes, deep * 128 * KIB):
            for number in range(deep):
                answers.begin(file, start + number * 128 * KIB, 128 * KIB)
            for result in answers.wait():
                if isinstance(result, PenstockError):
                    return result
                whole += result
    finally:
        file.close()
    return whole


def read_all(files: StoreFiles, nodes: list[Node], *, threads_count: int = 8) -> dict[str, bytes | PenstockError]:
    """Read files by several threads, in their order."""
    results: dict[str, bytes | PenstockError] = {}
    waiting = iter(nodes)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                node = next(waiting, None)
            if node is None:
                return
            assert node.info is not None
            results[node.info.key] = read_whole(files, node)

    threads = [threading.Thread(target=work) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_trying_again_overcomes_is_read_exactly(faulty: FaultyServer, connect_hasty: Callable[..., Store]) -> None:
    """A twentieth of all requests is cut, reset, stalled or refused, and every file is read exactly."""
    store = connect_hasty()
    nodes = nodes_of(store)
    faulty.random_faults(SURVIVED, ratio=0.05, seed=1, seconds=30)
    files = StoreFiles(store, following=Listed(nodes).following)
    assert read_all(files, nodes) == SMALL | LARGE
    files.close()


def test_under_every_kind_of_fault_it_is_exact_or_a_typed_error(
    faulty: FaultyServer, connect_hasty: Callable[..., Store]
) -> None:
    """Every kind of misbehaviour on a twentieth of all requests: no wrong byte, no other error, and nothing hangs."""
    store = connect_hasty()
    nodes = nodes_of(store)
    faulty.random_faults([kind for kind in KINDS if kind != "change"], ratio=0.05, seed=2, seconds=30)
    files = StoreFiles(store, following=Listed(nodes).following)
    results = read_all(files, nodes)
    wrong = {
        key: result
        for key, result in results.items()
        if not isinstance(result, StoreError) and result != (SMALL | LARGE)[key]
    }
    assert wrong == {}
    failed = [result for result in results.values() if isinstance(result, StoreError)]
    assert len(failed) < len(results) / 4
    faulty.heal()
    assert read_all(files, nodes) == SMALL | LARGE  # a failure leaves nothing broken
    files.close()


def test_a_version_is_never_mixed_with_another(faulty: FaultyServer, connect_hasty: Callable[..., Store]) -> None:
    """A file that is replaced while it is read ends with the one error that says so; opened anew, it is the new one."""
    store = connect_hasty()
    node = next(node for node in nodes_of(store) if node.name == b"large/2")
    files = StoreFiles(store)
    file, answers = files.open_file(node), Answers()
    answers.begin(file, 0, 128 * KIB)
    assert answers.wait() == [LARGE["large/2"][: 128 * KIB]]
    new = random.Random(77).randbytes(len(LARGE["large/2"]))
    faulty.objects["large/2"] = new
    answers.begin(file, 4 * MIB, 128 * KIB)
    (error,) = answers.wait()
    assert isinstance(error, ObjectChangedError)
    node = next(node for node in nodes_of(store) if node.name == b"large/2")
    assert read_whole(files, node) == new
    file.close()
    files.close()


def test_a_small_file_is_compared_with_the_stores_checksum(
    faulty: FaultyServer, connect_hasty: Callable[..., Store]
) -> None:
    """A small file whose bytes do not match its checksum is an error, however often it is tried."""
    store = connect_hasty()
    node = next(node for node in nodes_of(store) if node.name == b"small/0007")
    faulty.random_faults(["corrupt"], ratio=1.0)
    files = StoreFiles(store)
    assert isinstance(read_whole(files, node), ChecksumError)
    faulty.heal()
    assert read_whole(files, node) == SMALL["small/0007"]
    files.close()


def test_random_reads_are_one_request_each(faulty: FaultyServer, connect_hasty: Callable[..., Store]) -> None:
    """Reads all over a large file bring what was asked for and no more, whatever the threads do at the same time."""
    store = connect_hasty(hedge=ps.HedgeConfig(ratio_max=0))
    node = next(node for node in nodes_of(store) if node.name == b"large/1")
    data = LARGE["large/1"]
    files = StoreFiles(store)
    file, answers = files.open_file(node), Answers()
    offsets = [number * 300_000 + 100_000 for number in range(16)]
    random.Random(5).shuffle(offsets)
    before = len(faulty.requests)
    for offset in offsets:
        answers.begin(file, offset, 70_000)
    assert answers.wait() == [data[offset : offset + 70_000] for offset in offsets]
    assert sorted(request.span for request in faulty.requests[before:]) == sorted(
        (offset, offset + 70_000) for offset in offsets
    )
    file.close()
    files.close()


def test_a_warm_cache_answers_without_a_request_or_a_thread(
    faulty: FaultyServer, connect_hasty: Callable[..., Store], tmp_path: Path
) -> None:
    """What the cache has is given in the call that asks for it; each byte was fetched once, in whole blocks."""
    config = ps.CacheConfig(tmp_path / "cache", 64 * MIB, block_bytes=256 * KIB, metadata_ttl_s=math.inf)
    store = connect_hasty(cache=config, hedge=ps.HedgeConfig(ratio_max=0))
    nodes = nodes_of(store)
    files = StoreFiles(store, following=Listed(nodes).following)
    assert read_all(files, nodes) == SMALL | LARGE
    gets = [request for request in faulty.requests if request.is_read]
    fetched_bytes = sum(request.span[1] - request.span[0] for request in gets if request.span)
    assert fetched_bytes == sum(map(len, LARGE.values()))
    assert all(request.span[0] % (256 * KIB) == 0 for request in gets if request.span)
    files.close()
    store.close()  # what is stored after it was read is on the disk then
    files = StoreFiles(connect_hasty(cache=config))
    before = len(faulty.requests)
    assert read_all(files, nodes) == SMALL | LARGE  # from the disk, past which large blocks were written
    for node in nodes:
        assert node.info is not None
        data = (SMALL | LARGE)[node.info.key]
        file = files.open_file(node)
        for offset in range(0, len(data), MIB):
            for _ in range(
                3
            ):  # the system may have taken back the pages of the cache's files; the first read brings them
                results: SimpleQueue[Any] = SimpleQueue()
                file.read(offset, MIB, results.put)
                is_given_at_once = not results.empty()
                assert b"".join(results.get(timeout=30)) == data[offset : offset + MIB]
                if is_given_at_once:
                    break
            assert is_given_at_once
        file.close()
    assert len(faulty.requests) == before
    files.close()


def test_thirty_two_files_stay_within_the_budget(faulty: FaultyServer, connect_hasty: Callable[..., Store]) -> None:
    """Many files that are read at once, and then left open, hold the budget at most, and what single reads wait for."""
    for number in range(32):
        faulty.objects[f"large/{number}"] = LARGE[f"large/{number % 4}"]
    store = connect_hasty()
    nodes = [node for node in nodes_of(store) if node.name.startswith(b"large")]
    budget = Budget(8 * MIB)
    files = StoreFiles(store, budget=budget)
    opened = [(node, files.open_file(node)) for node in nodes]
    answers = Answers()
    for start in range(0, 5 * MIB, 512 * KIB):
        for _, file in opened:
            answers.begin(file, start, 512 * KIB)
        results = answers.wait()
        assert results == [faulty.objects[node.name.decode()][start : start + 512 * KIB] for node, _ in opened]
        assert budget.statistics().used_bytes <= 8 * MIB + 32 * MIB
    files.close()
    del file, opened, results
    deadline_s = time.monotonic() + 60
    while budget.statistics().used_bytes > budget.statistics().free_bytes:  # what is cancelled ends a little later
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)
