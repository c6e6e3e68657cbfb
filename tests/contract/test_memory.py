"""The memory store keeps every promise: it is the reference."""

import pytest

from penstock.store.memory import MemoryStore
from penstock.testing.contract import StoreContract


class TestMemoryStore(StoreContract):
    """MemoryStore without a name."""

    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store

    def uploads_left(self, store):
        return len(store._bucket.uploads)
