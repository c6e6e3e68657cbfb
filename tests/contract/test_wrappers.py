"""Every wrapper keeps every promise of the store inside it, alone and in the default stack."""

import pytest

from penstock.store.faulty import Faulty
from penstock.store.hedged import Hedged
from penstock.store.limited import Limited
from penstock.store.memory import MemoryStore
from penstock.store.retrying import Retrying
from penstock.store.traced import Traced
from store_contract import StoreContract
from store_contract.hedging import Overtaken

STACKS = {
    "Retrying": Retrying,
    "Limited": lambda inner: Limited(inner, requests_max=3),
    "Hedged": Hedged,
    "Traced": Traced,
    "Faulty": Faulty,
    "default": lambda inner: Traced(Hedged(Retrying(Limited(inner)))),
    "one permit": lambda inner: Traced(Hedged(Retrying(Limited(inner, requests_max=1)))),
    "hedges that win": lambda inner: Traced(Overtaken(Retrying(Limited(inner)))),
    "hedges inside retries": lambda inner: Retrying(Limited(Overtaken(Retrying(inner)))),
}


class TestWrappers(StoreContract):
    """Each wrapper around a MemoryStore."""

    @pytest.fixture(params=STACKS.values(), ids=STACKS.keys())
    def store(self, request):
        self.memory = MemoryStore()
        with request.param(self.memory) as store:
            yield store

    def uploads_left(self, store):
        return len(self.memory._bucket.uploads)
