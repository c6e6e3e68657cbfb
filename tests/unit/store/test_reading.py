"""``read_into``: bad requests, memory that is given back, and errors in between."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest

from penstock.config import KIB, FetchConfig
from penstock.errors import CancelledOperationError, ChecksumError, ConfigError, StoreError
from penstock.fetch import Budget, PlanItem
from penstock.store.base import Store, Wrapper
from penstock.store.faulty import Faulty
from penstock.store.memory import MemoryStore
from penstock.types import ByteRange, Completion, Get, Operation, Sink, Transfer

DATA = os.urandom(3_000_000)
SMALL_PARTS = FetchConfig(part_bytes=64 * KIB, requests_min=4, requests_max=8)


@pytest.fixture
def memory() -> Any:
    with MemoryStore() as store:
        store.write("k", DATA)
        store.fetch_config = SMALL_PARTS
        yield store


class Late(Wrapper):
    """Lets no GET end before it was cancelled and ``may_end`` is set, and writes to its landing just before it ends."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.fetch_config = SMALL_PARTS
        self.may_end = threading.Event()
        self.cancelled = threading.Event()

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        return LateTransfer(self, operation, sink) if isinstance(operation, Get) else self.inner.submit(operation, sink)


class LateTransfer:
    """A request that is answered after it was given up."""

    def __init__(self, owner: Late, operation: Operation, sink: Sink) -> None:
        self.owner, self.operation, self.sink = owner, operation, sink
        self.thread = threading.Thread(target=self._end, daemon=True)

    def cancel(self) -> None:
        self.thread.start()
        self.owner.cancelled.set()

    def unanswered_s(self) -> float:
        return 0.0

    def _end(self) -> None:
        assert self.owner.may_end.wait(30)
        landing = self.sink.landing
        assert landing is not None
        landing.append(b"\xee" * landing.length_bytes)
        self.sink.done(Completion(self.operation, error=CancelledOperationError("cancelled")))


@pytest.mark.parametrize("end", ["close", "drop", "with"])
def test_nothing_writes_to_memory_that_was_given_back(memory: MemoryStore, end: str) -> None:
    """However the iterator ends early, it waits for the requests that may still write to its buffers."""
    late = Late(memory)
    buffer = bytearray(len(DATA))
    late_answers = threading.Thread(target=lambda: late.cancelled.wait(30) and late.may_end.set())
    late_answers.start()
    landed = late.read_into([("k", None, buffer)])
    landed._ahead.start()
    if end == "close":
        landed.close()
    elif end == "with":
        with landed:
            pass
    else:
        del landed
    given_back = bytes(buffer)
    buffer[:] = DATA
    late_answers.join(30)
    assert b"\xee" * 1000 in given_back  # the late bytes came before
    assert buffer == DATA


def test_no_reference_to_the_memory_is_kept(memory: MemoryStore) -> None:
    """After the end, an error or an early close, the caller may resize the buffer, and the budget has everything back."""
    memory_budget = Budget(10_000_000)
    store = type("Own", (Wrapper,), {"submit": lambda self, *args: self.inner.submit(*args), "budget": memory_budget})(
        memory
    )
    gc.disable()
    try:
        for requests in ([None], [ByteRange(10, 2_000_010)], [ByteRange(i, i + 50) for i in range(0, 5000, 100)]):
            buffers = [bytearray(span.length_bytes if span else len(DATA)) for span in requests]
            assert len(list(store.read_into([("k", s, b) for s, b in zip(requests, buffers, strict=True)]))) == len(
                requests
            )
            for buffer in buffers:
                buffer.clear()
        buffer = bytearray(len(DATA))
        landed = store.read_into([("k", None, buffer)])
        landed._ahead.start()
        landed.close()
        del landed
        buffer.clear()
    finally:
        gc.enable()
    statistics = memory_budget.statistics()
    assert statistics.used_bytes == statistics.free_bytes


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("k", "neither"),
        (("k", None), "neither"),
        (("k", ByteRange(0, 4)), "neither"),
        ((PlanItem("k"),), "neither"),
        ((b"k", None, bytearray(1)), "neither"),
        (("k", ByteRange(0, 4), bytearray(5)), "5 bytes, and 4 bytes are wanted"),
        (("k", ByteRange(4, 4), bytearray(0)), "start < end"),
        ((PlanItem("k", size_bytes=7), bytearray(5)), "5 bytes, and 7"),
        (("k", None, b"fixed"), "read-only"),
        (("k", None, memoryview(bytearray(10))[::2]), "contiguous"),
        (("k", None, "text"), "contiguous"),
        (("k", None, None), "contiguous"),
    ],
)
def test_bad_requests_are_refused(memory: MemoryStore, request_: Any, message: str) -> None:
    """A request that cannot be meant raises ``ConfigError`` that says why."""
    with pytest.raises(ConfigError, match=message):
        list(memory.read_into([request_]))


@pytest.mark.parametrize("requests", ["k", b"k", 5, None])
def test_no_iterable_of_requests(memory: MemoryStore, requests: Any) -> None:
    """What is no iterable is refused at once."""
    with pytest.raises(ConfigError, match="iterable"):
        memory.read_into(requests)


def test_the_first_error_ends_it(memory: MemoryStore) -> None:
    """After an error the iterator is exhausted, and the error names the request that failed."""
    landed = memory.read_into([("none", None, bytearray(3)), ("k", ByteRange(0, 3), bytearray(3))])
    with pytest.raises(StoreError, match="none"):
        list(landed)
    assert list(landed) == []


def test_requests_are_consumed_lazily(memory: MemoryStore) -> None:
    """An endless iterator of requests is pulled only a little ahead."""
    taken = [0]

    def endless() -> Any:
        while True:
            taken[0] += 1
            yield "k", ByteRange(0, 10), bytearray(10)

    with memory.read_into(endless()) as landed:
        for _ in range(20):
            next(landed)
    assert taken[0] < 2000


class Summed(Wrapper):
    """Tells a checksum of every object; the first `damaged_count` answers are damaged."""

    def __init__(self, inner: Store, damaged_count: int) -> None:
        super().__init__(inner)
        self.damaged_count = damaged_count

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        return self.inner.submit(operation, SummedSink(self, sink))


class SummedSink:
    """Adds the checksum to the answer."""

    def __init__(self, owner: Summed, sink: Sink) -> None:
        self.owner, self.sink, self.landing = owner, sink, sink.landing

    def head(self, info: Any, span: Any) -> Any:
        return self.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        from penstock.checksums import algorithms as checksums

        if completion.info is not None:
            completion.info = completion.info._replace(checksums={"crc32c": checksums.encode("crc32c", DATA)})
        if isinstance(completion.operation, Get) and self.owner.damaged_count and completion.landing is not None:
            self.owner.damaged_count -= 1
            completion.body[0] ^= 1
        self.sink.done(completion)


def test_a_damaged_object_is_read_once_more(memory: MemoryStore) -> None:
    """Bytes without the object's checksum are read again into the same memory; if that does not help, it is an error."""
    buffer = bytearray(len(DATA))
    once = Summed(memory, 1)
    assert list(once.read_into([("k", None, buffer)])) == [0]
    assert buffer == DATA
    with pytest.raises(ChecksumError, match="k"):
        list(Summed(memory, 10**6).read_into([("k", None, buffer)]))


def test_short_answers_are_never_complete(memory: MemoryStore) -> None:
    """Without retries, a body that breaks off is an error, and the index of its buffer is not returned."""
    for call in range(1, 6):
        with pytest.raises(StoreError):
            list(Faulty(memory, fail_at_call=call).read_into([("k", ByteRange(0, 1_000_000), bytearray(1_000_000))]))
