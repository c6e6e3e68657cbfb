"""Open files against the plain reference: any reads from several threads, with failures and changes underneath."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from penstock.config import KIB, MIB, FetchConfig, RetryConfig
from penstock.errors import (
    CancelledOperationError,
    ObjectChangedError,
    PenstockError,
    StoreError,
)
from penstock.fetch import Budget
from penstock.mount.nodes import Node
from penstock.mount.reading import StoreFiles
from penstock.store import Faulty, Hedged, Limited, MemoryStore, Retrying
from penstock.store.base import Wrapper
from penstock.types import ObjectInfo

BYTES = random.Random(8).randbytes(9 * MIB)
SIZES = st.one_of(
    st.integers(0, 3000), st.integers(60_000, 140_000), st.integers(900_000, 1_200_000), st.integers(2 * MIB, 7 * MIB)
)
WAIT_S_MAX = 60.0


class Budgeted(Wrapper):
    """A store with a budget of its own."""

    own: Budget

    def submit(self, operation: Any, sink: Any) -> Any:
        return self.inner.submit(operation, sink)

    @property
    def budget(self) -> Budget:
        return self.own


def stack(memory: MemoryStore, *, budget_bytes: int, fault_ratio: float, seed: int, attempts_max: int) -> Budgeted:
    """The default stack's wrappers over memory, with answers cut in half now and then."""
    retry = RetryConfig(attempts_max=attempts_max, backoff_s=0.0, backoff_s_max=0.0)
    faulty = Faulty(memory, ratio=fault_ratio, seed=seed)
    store = Budgeted(Hedged(Retrying(Limited(faulty, requests_max=7), config=retry)))
    store.own = Budget(budget_bytes)
    store.fetch_config = FetchConfig(part_bytes=256 * KIB)
    return store


def node_of(number: int, info: ObjectInfo) -> Node:
    """The file of an object."""
    return Node(inode=number + 2, st_ino=0, name=info.key.encode(), parent=1, info=info, modified_s=0.0, seen_s=0.0)


class Listed:
    """The order of files that are all known."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def following(self, node: Node, count_max: int) -> Sequence[Node]:
        """Return the next ones."""
        position = node.inode - 1
        return self.nodes[position : position + count_max]


class Program:
    """A thread that opens, reads and closes files, and compares what it reads with what it must be."""

    def __init__(self, files: StoreFiles, nodes: list[Node], contents: dict[str, bytes], seed: int) -> None:
        self.files = files
        self.nodes = nodes
        self.contents = contents
        self.random = random.Random(seed)
        self.errors: list[PenstockError] = []
        self.wrong: list[str] = []
        self.replies_count = 0
        self._lock = threading.Lock()
        self._pending = threading.Semaphore(0)
        self._pending_count = 0

    def run(self) -> None:
        """Read a number of files in different manners."""
        for _ in range(4):
            node = self.random.choice(self.nodes)
            file = self.files.open_file(node)
            assert node.info is not None
            for offset, length_bytes in self.spans(node.info.size_bytes):
                self.begin(file, node.info, offset, length_bytes)
                if self.random.random() < 0.5:
                    self.wait()
            if self.random.random() < 0.7:
                self.wait()
            file.close()
            self.wait()

    def spans(self, size_bytes: int) -> list[tuple[int, int]]:
        """Reads in sequence, at random, or backwards."""
        step = self.random.choice([4096, 128 * KIB, 512 * KIB, MIB])
        count = min(12, size_bytes // step + 2)
        first = self.random.choice([0, 0, self.random.randrange(size_bytes + 1)])
        sequence = [(first + index * step, step) for index in range(count)]
        match self.random.randrange(4):
            case 0:
                return [(self.random.randrange(size_bytes + 100), self.random.randrange(1, MIB)) for _ in range(count)]
            case 1:
                return sequence[::-1]
        return sequence

    def begin(self, file: Any, info: ObjectInfo, offset: int, length_bytes: int) -> None:
        """Send a read; its result is checked on the thread that brings it."""
        wanted = self.contents[info.etag or ""][offset : offset + length_bytes]
        calls: list[None] = []

        def then(result: Sequence[memoryview] | PenstockError) -> None:
            calls.append(None)
            if isinstance(result, PenstockError):
                self.errors.append(result)
            elif b"".join(result) != wanted or len(calls) > 1:
                self.wrong.append(f"{info.key} [{offset}, {offset + length_bytes}), call {len(calls)}")
            with self._lock:
                self.replies_count += 1
            self._pending.release()

        self._pending_count += 1
        file.read(offset, length_bytes, then)

    def wait(self) -> None:
        """Wait until everything that was sent has been answered."""
        while self._pending_count:
            assert self._pending.acquire(timeout=WAIT_S_MAX), "a read was never answered"
            self._pending_count -= 1


def run_programs(programs: list[Program], *, meanwhile: Any = None) -> None:
    """Run programs side by side."""
    failures: list[BaseException] = []

    def work(program: Program) -> None:
        try:
            program.run()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join()
    assert failures == []


def wait_empty(budget: Budget) -> None:
    """Wait until nothing is charged but free buffers: requests that were cancelled end a little later."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        gc.collect()
        used = budget.statistics()
        if used.used_bytes == used.free_bytes:
            return
        assert time.monotonic() < deadline_s, used
        threading.Event().wait(0.01)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6),
    budget_bytes=st.sampled_from([1 * MIB, 4 * MIB, 64 * MIB]),
    fault_ratio=st.sampled_from([0.0, 0.1, 0.3]),
    attempts_max=st.sampled_from([1, 12]),
    changes=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_reads_are_right_or_fail(
    sizes: list[int], budget_bytes: int, fault_ratio: float, attempts_max: int, changes: bool, seed: int
) -> None:
    """Whatever fails or changes, each read is answered once, with the right bytes of its version or a typed error."""
    memory = MemoryStore({f"k{number}": BYTES[number : number + size] for number, size in enumerate(sizes)})
    store = stack(memory, budget_bytes=budget_bytes, fault_ratio=fault_ratio, seed=seed, attempts_max=attempts_max)
    infos = list(memory.list())
    contents = {info.etag or "": bytes(memory.read(info.key).data) for info in infos}
    nodes = [node_of(number, info) for number, info in enumerate(infos)]
    files = StoreFiles(store, following=Listed(nodes).following)
    programs = [Program(files, nodes, contents, seed + number) for number in range(4)]

    def change() -> None:
        if changes:
            for info in infos:
                memory.write(info.key, BYTES[-info.size_bytes or len(BYTES) :])

    run_programs(programs, meanwhile=change)
    assert [program.wrong for program in programs] == [[]] * len(programs)
    kinds = {type(error) for program in programs for error in program.errors}
    allowed: set[type[PenstockError]] = {CancelledOperationError}
    if changes:
        allowed.add(ObjectChangedError)
    if fault_ratio:
        allowed |= {kind for kind in kinds if issubclass(kind, StoreError)}
    assert kinds <= allowed
    files.close()
    store.close()
    del files, programs
    wait_empty(store.own)


def test_many_threads_hammer_a_few_files() -> None:
    """64 threads that open, read and close the same files at once get their bytes, and leave nothing behind."""
    memory = MemoryStore({f"k{number}": BYTES[number : number + 700_000 * number] for number in range(8)})
    store = stack(memory, budget_bytes=16 * MIB, fault_ratio=0.02, seed=3, attempts_max=12)
    infos = list(memory.list())
    contents = {info.etag or "": bytes(memory.read(info.key).data) for info in infos}
    nodes = [node_of(number, info) for number, info in enumerate(infos)]
    files = StoreFiles(store, following=Listed(nodes).following)
    programs = [Program(files, nodes, contents, number) for number in range(64)]
    run_programs(programs)
    assert [program.wrong for program in programs if program.wrong] == []
    assert {type(error) for program in programs for error in program.errors} <= {CancelledOperationError}
    assert sum(program.replies_count for program in programs) > 500
    files.close()
    store.close()
    del files, programs
    wait_empty(store.own)
