from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache import Cached
from penstock.errors import ClosedError, ConfigError
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.multi import MultiStore


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
