"""Where one shard ends the next has begun: no round trip is waited for in between."""

from __future__ import annotations

import pytest

from penstock.config import KIB, FetchConfig
from penstock.fetch import PlanItem, Request
from penstock.store.base import Store, Wrapper
from penstock.store.memory import MemoryStore
from penstock.types import Get, Operation, Sink, Transfer

SHARDS = {f"shard-{index}": bytes([index]) * (300 * KIB + index) for index in range(12)}


class Asked(Wrapper):
    """Keeps the keys of all GETs, in the order of submission."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        if isinstance(operation, Get):
            self.keys.append(operation.key)
        return self.inner.submit(operation, sink)


@pytest.mark.parametrize("known", [True, False], ids=["sizes known", "sizes unknown"])
def test_the_next_shard_is_asked_for_before_one_ends(known: bool) -> None:
    """With the first part of a shard in hand, requests for the next one are already out, also of unlisted shards."""
    store = Asked(MemoryStore(SHARDS))
    store.fetch_config = FetchConfig(part_bytes=64 * KIB, requests_min=8)
    requests: list[Request] = [PlanItem(key, size_bytes=len(SHARDS[key])) if known else key for key in SHARDS]
    keys = list(SHARDS)
    got: dict[str, bytearray] = {}
    for chunk in store.read_parts(requests):
        got.setdefault(chunk.key, bytearray()).extend(chunk.data)
        if chunk.offset_bytes == 0 and chunk.request_index + 1 < len(keys):
            assert keys[chunk.request_index + 1] in store.keys
    assert {key: bytes(data) for key, data in got.items()} == SHARDS
