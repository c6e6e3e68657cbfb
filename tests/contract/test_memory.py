"""The memory store keeps every promise: it is the reference."""

import secrets

import pytest

from penstock.store.memory import MemoryStore
from store_contract import StoreContract


class TestMemoryStore(StoreContract):
    """MemoryStore without a name."""

    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store

    def uploads_left(self, store):
        return len(store._bucket.uploads)


class TestMemoryStoreBelowAPrefix(StoreContract):
    """The part of a shared memory store below a prefix, beside objects that are none of its own."""

    @pytest.fixture
    def store(self):
        name = secrets.token_hex(8)
        with MemoryStore({"a": b"before", "below/": b"", "other/key": b"after"}, name=name) as whole:
            with MemoryStore(name=name, prefix="below") as store:
                yield store
            assert whole.read("a").data == b"before"
            assert whole.read("other/key").data == b"after"

    def uploads_left(self, store):
        return len(store._bucket.uploads)
