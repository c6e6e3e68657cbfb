from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.several import Several


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
        (Several([LocalStore(tmp_path), MemoryStore({})]), f"Several(<LocalStore {str(tmp_path)!r}>, <MemoryStore"),
    ]
    for store, said in cases:
        with store:
            assert repr(store).startswith(said)
            assert "\n" not in repr(store)
            assert "planted" not in repr(store)


def test_sessions_of_a_framework_say_what_they_read() -> None:
    """A data set for PyTorch is its pipeline and options."""
    pytest.importorskip("torch")
    import penstock.torch as pt

    made = pt.IterableDataset(ps.shards("s3://bucket/a/").batch(2), lanes=4)
    assert repr(made) == "IterableDataset(shards('s3://bucket/a/').batch(2), lanes=4)"
