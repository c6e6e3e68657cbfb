"""``Store``, what a store says about itself, and ``MultiStore``: stores that are read as one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import ByteRange, FetchConfig, compose
from penstock.cache import Cached
from penstock.errors import ClosedError, ConfigError, ObjectMissingError
from penstock.store.base import MultiStore, Wrapper
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.types import Operation, Sink, Transfer


def test_a_store_says_what_it_is(tmp_path: Path) -> None:
    """One line: its layers from the outside in, and the URL of the innermost; never an address in memory, or a secret."""
    secret = ps.Credentials(access_key="AKIDEXAMPLE", secret_key="planted")
    cases: list[tuple[Any, str]] = [
        (ps.connect(str(tmp_path)), f"Traced(<LocalStore {str(tmp_path)!r}>)"),
        (ps.connect(str(tmp_path), cache=f"{tmp_path}/c:1GB"), f"Cached(Traced(<LocalStore {str(tmp_path)!r}>))"),
        (
            ps.connect("s3://bucket/p/", credentials=secret, region="eu-west-1"),
            "Traced(Hedged(Retrying(Limited(<S3Store 's3://bucket/p/'>))))",
        ),
        (
            ps.connect("https://host/x/"),
            "Traced(Hedged(Retrying(Limited(<HttpStore 'https://host/x/'>))))",
        ),
        (
            MultiStore([LocalStore(tmp_path), MemoryStore({})]),
            f"MultiStore(<LocalStore {str(tmp_path)!r}>, <MemoryStore",
        ),
    ]
    for store, said in cases:
        with store:
            assert repr(store).startswith(said)
            assert "\n" not in repr(store)
            assert "planted" not in repr(store)


VERBS: dict[str, Any] = {
    "read": lambda store: store.read("k"),
    "read a range": lambda store: store.read("k", ps.ByteRange(0, 10**9)),
    "read_many": lambda store: list(store.read_many(["k"])),
    "try_read_many": lambda store: list(store.try_read_many(["k"])),
    "read_parts": lambda store: list(store.read_parts(["k"])),
    "open": lambda store: store.open("k"),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list()),
    "write": lambda store: store.write("k", b"x"),
    "writer": lambda store: store.writer("k").close(),
    "copy": lambda store: store.copy("k", "l"),
    "delete": lambda store: store.delete("k"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["memory", "local", "s3", "http", "cached memory", "cached s3"])
def test_a_closed_store_refuses_every_verb(kind: str, verb: str, tmp_path: Path) -> None:
    """After ``close()`` whatever is asked of a store is ``ClosedError``, whichever store it is, cached or not."""
    url = {"local": str(tmp_path), "http": "http://127.0.0.1:9/x/"}.get(kind.rsplit(maxsplit=1)[-1], "s3://bucket")
    more: dict[str, Any] = {"cache": f"{tmp_path}/c:1GB"} if kind.startswith("cached") else {}
    if url.startswith("s3:"):
        more |= {"endpoint_url": "http://127.0.0.1:9", "anonymous": True}
    store: Any = Cached(MemoryStore({"k": b"x"}), f"{tmp_path}/c:1GB") if kind == "cached memory" else None
    store = store or (MemoryStore({"k": b"x"}) if kind == "memory" else ps.connect(url, **more))
    if kind in ("memory", "cached memory"):
        assert bytes(store.read("k").data) == b"x"
        assert store.stat("k").size_bytes == 1
        assert len(list(store.list())) == 1
    store.close()
    store.close()
    with pytest.raises((ClosedError, ConfigError) if kind == "http" else ClosedError):
        VERBS[verb](store)


def test_sessions_of_a_framework_say_what_they_read() -> None:
    """A data set for PyTorch is its pipeline and options."""
    pytest.importorskip("torch")
    import penstock.torch as pt

    made = pt.IterableDataset(ps.shards("s3://bucket/a/").batch(2), lanes=4)
    assert repr(made) == "IterableDataset(shards('s3://bucket/a/').batch(2), lanes=4)"


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
