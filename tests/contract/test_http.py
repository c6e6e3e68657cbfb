"""The plain HTTP store keeps every promise of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

import penstock as ps
from penstock.store import HttpStore, Store
from penstock.testing.contract import ReadOnlyStoreContract
from penstock.types import Key
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server


class TestHttpStore(ReadOnlyStoreContract):
    """On the tests' own server, alone and as ``connect`` composes it."""

    @pytest.fixture(params=["alone", "connected"])
    def store(self, request: pytest.FixtureRequest, faulty: FaultyServer) -> Iterator[Store]:
        self.server = faulty
        make: Callable[[str], Store] = HttpStore if request.param == "alone" else ps.connect
        with make(f"{faulty.endpoint_url}/bucket/") as store:
            yield store

    def seed(self, store: Store, objects: Mapping[Key, bytes]) -> None:
        for key, data in objects.items():
            self.server.objects[key] = data
