"""The plain HTTP store keeps every promise of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

import penstock as ps
from penstock.store import HttpStore, Store
from penstock.types import Key
from servers.faulty import FaultyServer
from store_contract import ReadOnlyStoreContract

pytestmark = pytest.mark.server


class OnFaulty(ReadOnlyStoreContract):
    """The store on the tests' own server, which is filled behind its back."""

    server: FaultyServer

    def seed(self, store: Store, objects: Mapping[Key, bytes]) -> None:
        for key, data in objects.items():
            self.server.objects[key] = data


class TestHttpStore(OnFaulty):
    """Alone and as ``connect`` composes it."""

    @pytest.fixture(params=["alone", "connected"])
    def store(self, request: pytest.FixtureRequest, faulty: FaultyServer) -> Iterator[Store]:
        self.server = faulty
        make: Callable[[str], Store] = HttpStore if request.param == "alone" else ps.connect
        with make(f"{faulty.endpoint_url}/bucket/") as store:
            yield store


class TestHttpStoreWithoutETags(OnFaulty):
    """On a server that tells no ETag, or only weak ones, which pin nothing."""

    has_etags = False

    @pytest.fixture(params=["none", "weak"])
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with FaultyServer(etags=request.param) as self.server:
            with ps.connect(f"{self.server.endpoint_url}/bucket/") as store:
                yield store
