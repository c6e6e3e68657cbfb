"""``Retrying`` around stores that are closed, or refuse, while it waits."""

from __future__ import annotations

import threading

import pytest

from penstock.config import RetryConfig
from penstock.errors import StoreError, UnavailableError
from penstock.store.base import perform
from penstock.store.faulty import Faulty
from penstock.store.memory import MemoryStore
from penstock.store.retrying import Retrying
from penstock.types import Get


def test_a_store_that_is_closed_inside_a_backoff_is_an_error() -> None:
    """Whoever waits hears of it, and other stores' backoffs, which share the loop, still end."""
    memory = MemoryStore({"k": b"x"})
    broken = Faulty(memory, ratio=1.0, error=UnavailableError("503"))
    store = Retrying(broken, config=RetryConfig(attempts_max=1000, backoff_s=0.01, backoff_s_max=0.01))
    closer = threading.Timer(0.1, memory.close)
    closer.start()
    with pytest.raises(StoreError, match="was closed"):
        perform(store, Get("k"))
    closer.join()
    other = Retrying(Faulty(MemoryStore({"k": b"x"}), fail_at_call=1), config=RetryConfig(backoff_s=0.01))
    assert bytes(other.read("k").data) == b"x"
    assert other.retried_count == 1
