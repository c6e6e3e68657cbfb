"""``SingleRead``: one read without a scheduler, and what it hands over to one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.config import MIB, FetchConfig
from penstock.errors import ConfigError, ObjectChangedError, ObjectMissingError
from penstock.fetch import Budget, PlanItem, SingleRead
from penstock.store import Faulty, MemoryStore, Retrying
from penstock.types import ByteRange, Completion, Get

CONFIG = FetchConfig(part_bytes=64 * 1024)


class Counting(MemoryStore):
    """Notes what it is asked."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.operations: list[Any] = []
        self.own = Budget(64 * MIB)

    def submit(self, operation: Any, sink: Any) -> Any:
        self.operations.append(operation)
        return super().submit(operation, sink)

    @property
    def budget(self) -> Budget:
        return self.own


@pytest.mark.parametrize(
    ("size_bytes", "requests_count"), [(0, 1), (1, 1), (100_000, 1), (MIB - 1, 1), (MIB, 16), (3 * MIB, 48)]
)
def test_a_read_is_one_request_unless_the_object_is_large(size_bytes: int, requests_count: int) -> None:
    """A whole object comes by one request, or if it is large by one per part; nothing stays charged to the budget."""
    data = bytes(range(256)) * (size_bytes // 256) + bytes(size_bytes % 256)
    store = Counting({"k": data})
    store.fetch_config = CONFIG
    blob = store.read("k")
    assert bytes(blob.data) == data
    assert [type(operation) for operation in store.operations] == [Get] * requests_count
    used = store.own.statistics()
    assert used.used_bytes == used.free_bytes
    assert (used.refused_count, used.overdrawn_count) == (0, 0)


def test_a_short_range_is_one_request() -> None:
    """A range of about a part is one request, cut at the object's end."""
    store = Counting({"k": bytes(100_000)})
    store.fetch_config = CONFIG
    assert len(store.read("k", ByteRange(90_000, 180_000))) == 10_000
    assert len(store.operations) == 1
    assert store.own.statistics().used_bytes == 0


def test_an_error_releases_what_was_reserved() -> None:
    """A read that fails charges nothing afterwards, whether it was refused, missing, changed or cut short."""
    store = Counting({"k": bytes(1000)})
    with pytest.raises(ObjectMissingError):
        store.read("none")
    with pytest.raises(ConfigError):
        store.read("")
    single = SingleRead(store, PlanItem("k", ByteRange(0, 10), size_bytes=999), config=CONFIG, budget=store.own)
    assert isinstance(single.wait_read().error, ObjectChangedError)
    single.close()
    assert store.own.statistics().used_bytes == 0


def test_a_whole_object_above_half_the_budget_is_refused() -> None:
    """An object that turns out to be larger than half of the budget is refused, with both numbers."""
    store = Counting({"k": bytes(3 * MIB)})
    store.own = Budget(4 * MIB)
    with pytest.raises(ConfigError, match=r"a read of 3145728 bytes is more than half of the budget of 4194304"):
        store.read("k")
    assert store.own.statistics().used_bytes == 0


def test_a_broken_body_goes_on_where_it_broke() -> None:
    """A retry lands in the same memory, for bodies with a place of their own and for private ones."""
    for size_bytes in (1000, 2 * MIB):
        data = bytes(range(250)) * (size_bytes // 250)
        store = Retrying(Faulty(MemoryStore({"k": data}), fail_at_call=1))
        assert bytes(store.read("k").data) == data


class Held:
    """A core whose request ends when the test says so."""

    def __init__(self) -> None:
        self.sink: Any = None
        self.cancelled = False
        self.submitted = threading.Event()

    def submit(self, operation: Any, sink: Any) -> Held:
        self.operation, self.sink = operation, sink
        self.submitted.set()
        return self

    def describe(self, key: Any) -> str:
        return f"held://{key}"

    def cancel(self) -> None:
        self.cancelled = True

    def unanswered_s(self) -> float:
        return 0.0


def test_a_read_that_is_given_up_is_cancelled_and_released_when_it_ends() -> None:
    """Closing while the request is in flight, as Ctrl-C does, cancels it; its bytes stay charged until it has ended."""
    core, budget = Held(), Budget(64 * MIB)
    single = SingleRead(core, PlanItem("k"), config=CONFIG, budget=budget)
    thread = threading.Thread(target=single.wait_read, daemon=True)
    thread.start()
    assert core.submitted.wait(10)
    assert budget.statistics().used_bytes == MIB
    single.close()
    assert core.cancelled
    assert budget.statistics().used_bytes == MIB
    core.sink.done(Completion(core.operation))
    assert budget.statistics().used_bytes == 0
