"""``MultiStore``: stores that are read as one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock import ByteRange, FetchConfig, compose
from penstock.errors import ConfigError, ObjectMissingError
from penstock.store.base import Wrapper
from penstock.store.memory import MemoryStore
from penstock.store.multi import MultiStore
from penstock.types import Operation, Sink, Transfer


def stores() -> list[MemoryStore]:
    return [MemoryStore({"a/x": b"first"}), MemoryStore({"a/x": b"second"})]


def test_a_key_names_the_store_and_the_key_there() -> None:
    """Whole objects and ranges come from the store of that number, in the order asked; so does an object's size."""
    several = MultiStore(stores())
    asked: list[Any] = ["1/a/x", "0/a/x", ("1/a/x", ByteRange(0, 3))]
    assert [bytes(blob.data) for blob in several.read_many(asked)] == [b"second", b"first", b"sec"]
    assert several.stat("1/a/x").size_bytes == 6
    assert several.describe("1/a/x") == several.stores[1].describe("a/x")


def test_a_store_that_is_added_has_the_next_number() -> None:
    """Stores may be added while others are read."""
    first, second = stores()
    several = MultiStore([first])
    several.add(second)
    assert [bytes(blob.data) for blob in several.read_many(["1/a/x", "0/a/x"])] == [b"second", b"first"]


def test_errors_are_the_stores_own() -> None:
    """What is not there is named by the URL that its own store gives it."""
    several = MultiStore(stores())
    with pytest.raises(ObjectMissingError) as caught:
        several.read("1/nothing")
    assert caught.value.url == several.stores[1].describe("nothing")


def test_it_only_reads() -> None:
    """Nothing is written or copied through it."""
    several = MultiStore(stores())
    with pytest.raises(ConfigError, match="Put is not supported by several stores"):
        several.write("0/a", b"")
    with pytest.raises(ConfigError, match="Copy is not supported by several stores"):
        several.copy("0/a/x", "0/b")


class _Together(Wrapper):
    """Answers nothing until `count` reads are waiting, in all stores that share the list."""

    def __init__(self, inner: MemoryStore, waiting: list[Any], count: int) -> None:
        super().__init__(inner)
        self.waiting, self.count = waiting, count

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        transfer = _Held()
        self.waiting.append((self.inner, operation, sink))
        if len(self.waiting) == self.count:
            for store, held, its_sink in self.waiting:
                store.submit(held, its_sink)
        return transfer


class _Held:
    def cancel(self) -> None:
        """It is answered all the same."""

    def unanswered_s(self) -> float:
        return 0.0


def test_reads_of_all_stores_are_in_flight_together() -> None:
    """Reading ahead does not stop where the next object lies in another store."""
    waiting: list[Any] = []
    several = MultiStore([_Together(each, waiting, 6) for each in stores()])
    assert [bytes(blob.data) for blob in several.read_many(["0/a/x", "1/a/x"] * 3)] == [b"first", b"second"] * 3


def test_it_pickles_with_how_it_reads() -> None:
    """A copy reads the same stores in the same way."""
    fetch = FetchConfig(requests_min=3)
    several = MultiStore([compose.connect(f"memory://several-{number}", fetch=fetch) for number in range(2)])
    copy = pickle.loads(pickle.dumps(several))
    assert copy.fetch_config == fetch
    assert copy.describe("1/k") == several.describe("1/k")
