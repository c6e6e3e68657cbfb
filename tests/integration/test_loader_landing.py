"""Workers that share no memory with their loader: rows land over TCP, and the batches are those of threads."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import penstock as ps
from loading import index, pipeline, write_counted
from penstock.errors import ClosedError, ClusterLostError, ConfigError, DecodeError, PenstockError
from penstock.loader.workers import landing, messages
from penstock.loader.workers.landing import LandingChannel
from penstock.loader.workers.messages import (
    AddSlot,
    FillRows,
    JobTaken,
    MessageChannel,
    RowsDone,
    WorkerFailed,
    WorkerJob,
    pickled_by_value,
)
from penstock.loader.workers.process_pool import Worker, WorkerPool, WorkerProcess, start_process
from penstock.loader.workers.shared_memory import PackedColumn, create_memory
from resuming import assert_same, children
from servers.leaks import descriptors, nothing_left

pytestmark = pytest.mark.server
SIZES = (9, 0, 30, 14, 1, 22)


class TcpWorker(WorkerProcess):
    """A worker process of this machine that is talked to as if it were on another."""

    def _start(self) -> None:
        data = pickled_by_value(self._job)
        if TcpPool.is_lost:
            raise ClusterLostError("nothing is left")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        with theirs:
            self.process = start_process(theirs)
        self.node = f"node {self.number}"
        self.channel = LandingChannel(ours)
        self.send_raw(data)


class TcpPool(WorkerPool):
    """Starts such processes, and has some of them move when it is told to."""

    restarts = True
    is_lost = False
    ahead_bytes = 1 << 20
    moving: ClassVar[set[int]] = set()

    def _new(self, job: WorkerJob) -> Worker:
        return TcpWorker(job)

    def misplaced(self, workers: Any) -> list[Worker]:
        found = [worker for worker in workers if worker.number in self.moving]
        self.moving.clear()
        return found


class TcpWorkers:
    """What ``Loader(workers=)`` takes."""

    def __init__(self, count: int, *, fallback: bool = False) -> None:
        self._count = count
        self.fallback = fallback

    def open(self, meter: Any) -> WorkerPool:
        del meter
        return TcpPool(self._count)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    return tmp_path / "data"


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """An index of the shards."""
    return index(pipeline(folder), tmp_path / "index")


def pictured(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Rows that land one by one, rows that land together, values of any length, and few of them."""
    number = int(sample["cls"])
    picture = np.full((50, 20, 3), number % 251, np.uint8)
    return {
        "cls": number,
        "picture": picture,
        "noise": rng.random(3),
        "empty": np.empty((0, 2)),
        "raw": b"x" * number * 900,
    }


def repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A sample n mod 3 times."""
    return [{**pictured(sample, rng), "again": again} for again in range(int(sample["cls"]) % 3)]


def shuffled(folder: Path) -> Any:
    return ps.shards(f"{folder}/").shuffle(window=20, seed=1)


MADE = {
    "decoded": lambda folder: pipeline(folder, window=40, seed=3, batch=8),
    "stored": lambda folder: shuffled(folder).batch(7),
    "filtered": lambda folder: (
        shuffled(folder).decode(ps.Integer("cls")).filter(lambda s: s["cls"] % 3 != 0 and s["cls"] > 8).batch(5)
    ),
    "mapped": lambda folder: shuffled(folder).map(pictured).batch(6),
    "multiplied": lambda folder: shuffled(folder).flat_map(repeated).batch(7, drop_last=True),
}


@pytest.mark.parametrize("mode", ["require", "stream"])
@pytest.mark.parametrize("kind", sorted(MADE))
def test_the_batches_are_those_of_threads(folder: Path, place: Path, kind: str, mode: Any) -> None:
    """Two epochs, and from the middle of the second: batches and states, and either loader goes on from the other's state."""
    made = MADE[kind](folder)
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4}
    with ps.Loader(made, **options) as loader:
        expected = [(batch, loader.state_dict()) for _ in loader.epochs(2) for batch in loader]
    with ps.Loader(made, workers=TcpWorkers(2), **options) as loader:
        found = [(batch, loader.state_dict()) for _ in loader.epochs(2) for batch in loader]
        statistics = loader.statistics()
    for (left, before), (right, after) in zip(expected, found, strict=True):
        assert_same(left, right)
        assert before == after or kind == "multiplied"  # two ways to say one position: samples, and outputs after them
    assert statistics.node_wait_s.keys() <= {"node 0", "node 1"} == statistics.node_decode_s.keys()
    middle = len(expected) * 3 // 4
    for workers in (None, TcpWorkers(4)):
        with ps.Loader(made, workers=workers, **options) as loader:
            loader.load_state_dict(expected[middle][1])
            for (left, _), right in zip(expected[middle + 1 :], loader, strict=True):
                assert_same(left, right)


@pytest.mark.parametrize("mode", ["require", "stream"])
@pytest.mark.parametrize("kills_count", [6, pytest.param(100, marks=pytest.mark.heavy)])
def test_workers_are_killed_and_moved_at_random_moments(tmp_path: Path, mode: Any, kills_count: int) -> None:
    """Whoever is killed, or moves while batches that it has filled wait for others: the batches stay what they are."""
    write_counted(tmp_path / "data", (90, 30, 144, 11, 222))
    made = shuffled(tmp_path / "data").map(pictured).batch(8)
    options: dict[str, Any] = {
        "index": mode,
        "index_dir": index(made, tmp_path / "index"),
        "lanes": 4,
        "prefetch_batches": 3,
    }
    chosen, kills = random.Random(kills_count), 0
    with ps.Loader(made, **options) as plain, ps.Loader(made, workers=TcpWorkers(2), **options) as loader:
        while kills < kills_count:
            for left, right in zip(plain, loader, strict=True):
                assert_same(left, right)
                if kills < kills_count and chosen.random() < 0.2:
                    time.sleep(chosen.random() / 20)
                    workers = loader._session._running.backend._workers  # type: ignore[union-attr]
                    if chosen.random() < 0.5:
                        os.kill(chosen.choice(workers).process.pid, signal.SIGKILL)
                    else:
                        TcpPool.moving.add(chosen.randrange(len(workers)))
                    kills += 1


@pytest.mark.parametrize("mode", ["require", "stream"])
@pytest.mark.parametrize("kind", ["mapped", "multiplied"])
def test_without_workers_it_goes_on_in_threads(
    tmp_path: Path, kind: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the batch after the last one, if that is wanted; otherwise it is an error. The next epoch has workers again."""
    write_counted(tmp_path / "data", (90, 30, 144, 11, 222))  # more than the blocks that are made ahead of stages
    made = MADE[kind](tmp_path / "data")
    place = index(made, tmp_path / "index")
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4, "prefetch_batches": 1}
    with ps.Loader(made, **options) as loader:
        expected = [(batch, loader.state_dict()) for _ in loader.epochs(2) for batch in loader]
    before_all = children()
    for fallback in (True, False):
        with ps.Loader(made, workers=TcpWorkers(2, fallback=fallback), **options) as loader:
            found = []
            first = iter(loader)
            for _ in range(3):
                found.append((next(first), loader.state_dict()))
            monkeypatch.setattr(TcpPool, "is_lost", True)
            for worker in children() - before_all:
                os.kill(worker, signal.SIGKILL)
            if not fallback:
                with pytest.raises(ClusterLostError, match="nothing is left"):
                    list(first)
                continue
            found += [(batch, loader.state_dict()) for batch in first]
            monkeypatch.setattr(TcpPool, "is_lost", False)
            found += [(batch, loader.state_dict()) for batch in loader]
            assert len(children() - before_all) == 2
        for (left, before), (right, after) in zip(expected, found, strict=True):
            assert_same(left, right)
            assert before == after or kind == "multiplied"


def test_nothing_is_left(folder: Path, place: Path) -> None:
    """Threads and descriptors of channels, heaps and slots end with the loader, also in the middle."""
    made = MADE["mapped"](folder)

    def read_some() -> None:
        with ps.Loader(made, workers=TcpWorkers(2), lanes=4, index="require", index_dir=place) as loader:
            next(iter(loader))

    read_some()
    with nothing_left():
        for _ in range(3):
            read_some()


def long_text(sample: dict[str, Any]) -> dict[str, Any]:
    """Values that are too long to travel with the message."""
    return {"cls": int(sample["cls"]), "text": "d" * 20_000}


@pytest.mark.parametrize("workers_count", [1, 4])
def test_descriptors_of_memory_do_not_grow_with_the_workers(tmp_path: Path, workers_count: int) -> None:
    """A slot takes two, however many channels have rows land there; a heap takes none."""
    write_counted(tmp_path / "data", [60] * 8)
    made = shuffled(tmp_path / "data").map(long_text).batch(8)
    before = descriptors()
    with ps.Loader(made, workers=TcpWorkers(workers_count), lanes=8, index="stream") as loader:
        for step, _ in enumerate(loader):
            if step == 30:
                break
        taken = [each for each in descriptors() - before if "memfd" in each]
        assert len(taken) == 2 * loader.statistics().slots_count


@pytest.mark.parametrize("free_count", [2, 3])
def test_the_limit_of_open_files_is_no_lost_connection(
    tmp_path: Path, free_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that keeps all batches meets it: the error names the limit, and no healthy worker is replaced."""
    write_counted(tmp_path / "data", [60] * 8)
    made = shuffled(tmp_path / "data").map(long_text).batch(8)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ps.Loader(made, workers=TcpWorkers(2), lanes=8, index="stream") as loader:
        kept = []
        try:
            with pytest.raises(PenstockError, match=r"Too many open files.*ulimit -n"):  # noqa: PT012
                for batch in loader:
                    if not kept:
                        os.close(lowest := os.dup(0))
                        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free_count, limits[1]))
                    kept.append(batch)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "restarted" not in caplog.text


def test_what_does_not_go_together_is_refused(folder: Path) -> None:
    """Processes and workers at once, a stride, and what is no cluster's workers."""
    made = MADE["stored"](folder)
    for options in ({"processes": 2}, {"stride": (0, 2)}):
        with pytest.raises(ConfigError, match="workers="):
            ps.Loader(made, workers=TcpWorkers(1), **options)
    with pytest.raises(ConfigError, match="must be workers of a cluster"):
        ps.Loader(made, workers=4)  # type: ignore[arg-type]


def raise_of_there(sample: dict[str, Any]) -> dict[str, Any]:
    """Raise an error of a package that the machine of the loader lacks."""
    module = types.ModuleType("only_there")
    exec("class ThereError(Exception): pass", module.__dict__)
    sys.modules["only_there"] = module
    raise module.ThereError(f"sample {int(sample['cls'])} is broken")


def test_an_error_of_a_package_that_only_the_workers_have(folder: Path) -> None:
    """It arrives as text; the loader does not wait for a worker whose message it cannot read."""
    made = shuffled(folder).map(raise_of_there).batch(6)
    with ps.Loader(made, workers=TcpWorkers(2), lanes=4) as loader, pytest.raises(DecodeError) as caught:
        list(loader)
    assert "ThereError: sample" in str(caught.value.__cause__)


class RestlessPool(TcpPool):
    """Moves its first worker four times, and then kills it, before any batch is done."""

    calls_count = 0

    def misplaced(self, workers: Any) -> list[Worker]:
        self.calls_count += 1
        if self.calls_count == 5:
            workers[0].process.kill()
        return workers[:1] if self.calls_count < 5 else []


def test_a_worker_that_moves_has_not_died(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only deaths count towards the error that nothing can be done."""
    made = MADE["stored"](folder)
    with ps.Loader(made, lanes=4) as loader:
        expected = list(loader)
    monkeypatch.setattr(TcpWorkers, "open", lambda self, meter: RestlessPool(2))
    with ps.Loader(made, workers=TcpWorkers(2), lanes=4) as loader:
        for left, right in zip(expected, loader, strict=True):
            assert_same(left, right)


def test_closed_while_its_workers_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that closes the loader just then leaves no pool behind."""
    pools: list[WorkerPool] = []
    with ps.Loader(MADE["stored"](folder), workers=TcpWorkers(2), lanes=4) as loader:

        def open_late(self: TcpWorkers, meter: Any) -> WorkerPool:
            del self, meter
            closer = threading.Thread(target=loader.close)
            closer.start()
            closer.join()
            pools.append(TcpPool(2))
            return pools[0]

        monkeypatch.setattr(TcpWorkers, "open", open_late)
        with pytest.raises(ClosedError):
            list(loader)
    assert pools[0]._closed


@pytest.fixture
def ends() -> Iterator[tuple[LandingChannel, MessageChannel]]:
    """The loader's end and the worker's, in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = MessageChannel(socket.create_connection(listener.getsockname()))
        ours = LandingChannel(listener.accept()[0])
    yield ours, theirs
    ours.close()
    theirs.close()


def test_memory_of_values_that_never_arrive_is_freed(ends: tuple[LandingChannel, MessageChannel]) -> None:
    """A worker that ends between its message and the values leaves no descriptor."""
    ours, theirs = ends
    memory = create_memory(64)
    with nothing_left():
        ours.send(AddSlot(0), memory=memory)
        ours.send(FillRows(0, np.arange(2).tobytes(), 0))
        column = PackedColumn("bytes", [50, 50], None, [])
        theirs.send(RowsDone(0, {}, ["raw"], [column], None, [], None, {}, [], []), data=[b"x" * 50])
        theirs.end()
        with pytest.raises(EOFError):
            ours.receive()
    os.close(memory.descriptor)


@pytest.mark.parametrize("error_type", [EOFError, ModuleNotFoundError])
def test_memory_whose_message_cannot_be_received_is_freed(error_type: type[Exception]) -> None:
    """A worker that ends between a descriptor and its message leaves none, nor does a message that cannot be read here."""
    first, second = socket.socketpair()
    memory = create_memory(64)
    ours = MessageChannel(first)
    data = pickled_by_value(Called("fail"))
    with nothing_left():
        socket.send_fds(second, [messages._HEAD.pack(len(data), 64)], [memory.descriptor])
        if error_type is ModuleNotFoundError:
            second.sendall(data)
        second.shutdown(socket.SHUT_RDWR)
        with pytest.raises(error_type):
            ours.receive()
    second.close()
    ours.close()
    os.close(memory.descriptor)


class Called:
    """Unpickling it calls a function of this module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return globals()[self._name], ()


def test_a_worker_that_starts_slowly_gets_a_large_job(
    ends: tuple[LandingChannel, MessageChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that imports its modules reads nothing for a while; afterwards silence ends the connection early."""
    monkeypatch.setattr(landing, "SILENCE_S_MAX", 1)
    ours, theirs = ends
    job = pickled_by_value(b"x" * (24 << 20))
    sender = threading.Thread(target=ours.send_raw, args=(job,))
    sender.start()
    time.sleep(3)
    assert len(theirs.receive()[0]) == 24 << 20
    sender.join()
    theirs.send(JobTaken())
    end = time.monotonic() + 20
    while ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) != 1000:
        assert time.monotonic() < end
        time.sleep(0.01)


def fail() -> None:
    raise ModuleNotFoundError("No module named 'only_there'")


def miss() -> None:
    raise FileNotFoundError("only_there")


@pytest.mark.parametrize("name", ["fail", "miss"])
def test_a_message_that_cannot_be_read_is_an_error(ends: tuple[LandingChannel, MessageChannel], name: str) -> None:
    """Neither the thread nor the loader keeps waiting."""
    ours, theirs = ends
    theirs.send_raw(pickled_by_value(Called(name)))
    message, _ = ours.receive()
    assert isinstance(message, WorkerFailed)
    assert "only_there" in str(message.error.revived())
    with pytest.raises(EOFError):
        ours.receive()


@pytest.mark.parametrize("name", ["fail", "miss"])
def test_a_worker_that_cannot_read_its_job_ends_with_its_loader(name: str) -> None:
    """It says what it lacks, and listens on: nobody else ends it on another machine."""
    first, second = socket.socketpair()
    ours = MessageChannel(first)
    with second:
        process = start_process(second)
    try:
        ours.send_raw(pickled_by_value(Called(name)))
        message, _ = ours.receive()
        assert "only_there" in str(message.error.revived())
        ours.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


CLOSING: list[LandingChannel] = []


def close_ours() -> None:
    CLOSING.pop().close()


def test_a_finaliser_closes_it_in_its_own_thread(ends: tuple[LandingChannel, MessageChannel]) -> None:
    """The collector runs in any thread, also in one that receives; nothing is left then."""
    ours, theirs = ends
    CLOSING.append(ours)
    theirs.send_raw(pickled_by_value(Called("close_ours")))
    ours._thread.join(20)
    assert ours.is_ended
    assert (ours._ready, ours._socket.fileno()) == (-1, -1)


def test_an_interrupted_call_loses_no_message(ends: tuple[LandingChannel, MessageChannel]) -> None:
    """Whether the message was taken is not known: the channel ends, and its worker is replaced."""
    ours, theirs = ends

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            ours.receive()
    finally:
        signal.signal(signal.SIGALRM, before)
    theirs.send(JobTaken())
    with pytest.raises(EOFError):
        ours.receive()
