"""A cached store satisfies the contract of stores, cold and warm, with and without a TTL."""

import math

import pytest

from penstock.cache import CacheConfig, Cached
from penstock.store.hedged import Hedged
from penstock.store.limited import Limited
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.retrying import Retrying
from penstock.store.traced import Traced
from store_contract import StoreContract
from store_contract.hedging import Overtaken

CONFIGS = {  # name: arguments of CacheConfig
    "asking": {},
    "unasked": {"metadata_ttl_s": math.inf, "block_bytes": 4096},
}


class TestCachedMemory(StoreContract):
    """Around a MemoryStore in the default stack."""

    @pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
    def store(self, request, tmp_path):
        self.memory = MemoryStore()
        stack = Traced(Hedged(Retrying(Limited(self.memory))))
        with Cached(stack, CacheConfig(tmp_path, 10**9, free_ratio_min=0.0, **request.param)) as store:
            yield store

    def uploads_left(self, store):
        return len(self.memory._bucket.uploads)


class TestCachedOvertaken(StoreContract):
    """Around a store whose hedges always win."""

    @pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
    def store(self, request, tmp_path):
        config = CacheConfig(tmp_path, 10**9, free_ratio_min=0.0, **request.param)
        with Cached(Overtaken(Retrying(MemoryStore())), config) as store:
            yield store


class TestCachedTiny(StoreContract):
    """With one thread and room for only a few blocks, so that blocks are evicted all the time."""

    @pytest.fixture
    def store(self, tmp_path):
        config = CacheConfig(tmp_path, 1_000_000, block_bytes=81_920, free_ratio_min=0.0, threads_max=1)
        with Cached(MemoryStore(), config) as store:
            yield store


class TestCachedNowhere(StoreContract):
    """In a directory that cannot be created, so that every read goes to the store."""

    @pytest.fixture
    def store(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with Cached(MemoryStore(), CacheConfig(tmp_path / "file" / "cache", 10**9)) as store:
            yield store


class TestCachedLocal(StoreContract):
    """Around local files."""

    keys_are_paths = True

    @pytest.fixture
    def store(self, tmp_path):
        config = CacheConfig(tmp_path / "cache", 10**9, free_ratio_min=0.0, metadata_ttl_s=60.0)
        (tmp_path / "data").mkdir()
        with Cached(LocalStore(tmp_path / "data"), config) as store:
            yield store


@pytest.mark.server
class TestCachedS3(StoreContract):
    """Around the stack that ``connect`` builds for S3, on a real server."""

    @pytest.fixture
    def store(self, s3_store, tmp_path):
        config = CacheConfig(tmp_path, 10**9, free_ratio_min=0.0, metadata_ttl_s=60.0)
        with Cached(s3_store, config) as store:
            yield store
