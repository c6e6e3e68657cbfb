"""Any faults, hedges, retries, versions and caches at once: right bytes or a typed error, one answer per request, no hang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache import CacheConfig, Cached
from penstock.config import KIB, FetchConfig, RetryConfig, TransportConfig
from penstock.errors import PenstockError, StoreError
from penstock.store.base import Store, innermost
from penstock.store.hedged import Hedged
from penstock.store.limited import Limited
from penstock.store.retrying import Retrying
from penstock.types import Blob, ByteRange
from servers.faults import KINDS
from servers.faulty import FaultyServer
from servers.records import Request
from store_contract.hedging import Overtaken

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

SIZES = (0, 1, 5000, 70_000, 300_000, 1_500_000)
UNREADABLE = {"change", "drip", "corrupt", "wrong_checksum"}
"""Left out: versions change by the storm itself, and damage without a checksum is nobody's to find."""


class Storm:
    """A server, a store, and every version that each object had."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = rng = random.Random(seed)
        self.server = FaultyServer(etags=rng.choice(["quoted", "quoted", "none", "weak"]))
        self.versions: dict[str, list[bytes]] = {}
        for size in SIZES:
            self.replace(f"k{size}", rng.randbytes(size))
        self.changes = rng.choice([0.0, 0.0, 0.02])
        self._path = path

    def replace(self, key: str, data: bytes) -> None:
        self.versions.setdefault(key, []).append(data)
        self.server.objects[key] = data

    def _perhaps_replace(self, request: Request) -> bool:
        if request.key in self.versions and self.random.random() < self.changes:
            self.replace(request.key, self.random.randbytes(len(self.versions[request.key][-1])))
        return False

    def store(self) -> Store:
        """The core in one of several stacks."""
        self.server.fail("500", match=self._perhaps_replace, times=None)
        kinds = sorted(set(KINDS) - UNREADABLE)
        some = self.random.sample(kinds, 8)
        self.server.random_faults(
            some, ratio=self.random.choice([0.02, 0.1, 0.3]), seed=self.random.randrange(1000), seconds=0.2
        )
        core = innermost(
            ps.connect(
                self.server.url,
                endpoint_url=self.server.endpoint_url,
                anonymous=True,
                transport=TransportConfig(connect_s_max=2, first_byte_s_max=1, stall_s_max=1),
            )
        )
        config = RetryConfig(attempts_max=6, backoff_s=0.001, backoff_s_max=0.01)
        store: Store = Retrying(Limited(core, requests_max=self.random.choice([1, 3, 100])), config=config)
        store = self.random.choice([Overtaken, Overtaken, Hedged])(store)
        if self.random.random() < 0.4:
            block_bytes = self.random.choice([4096, 1 << 16, 1 << 20])
            store = Cached(store, CacheConfig(self._path, 10**9, block_bytes=block_bytes, free_ratio_min=0.0))
        store.fetch_config = FetchConfig(
            part_bytes=self.random.choice([64 * KIB, 100_000, 1024 * KIB]),
            gap_bytes_max=self.random.choice([0, 10_000]),
        )
        return store

    def requests(self) -> list[tuple[str, ByteRange | None]]:
        """Whole objects, ranges, neighbours, and keys that are not there."""
        asked: list[tuple[str, ByteRange | None]] = []
        for _ in range(self.random.randint(1, 8)):
            size = self.random.choice(SIZES)
            key = f"k{size}" if self.random.random() < 0.9 else "none"
            if self.random.random() < 0.3:
                asked.append((key, None))
                continue
            start = self.random.randint(0, size)
            for _ in range(self.random.randint(1, 3)):
                end = start + self.random.randint(1, 400_000)
                asked.append((key, ByteRange(start, end)))
                start = end + self.random.choice([0, 0, 5000, -1 if end > 1 else 0])
        return asked

    def is_right(self, key: str, span: ByteRange | None, data: Any) -> bool:
        """Whether some version has these bytes there."""
        start, end = span or (0, None)
        return any(version[start:end] == data for version in self.versions[key])


@pytest.fixture
def storm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storm]:
    storm = Storm(request.param, tmp_path / "cache")
    with storm.server:
        yield storm


@pytest.mark.parametrize("storm", range(10), indirect=True)
def test_any_storm_gives_right_bytes_or_typed_errors(storm: Storm) -> None:
    """Every verb, in any stack: bytes of one version, or an error of the tree; each request is answered once."""
    with storm.store() as store:
        for _ in range(6):
            read_many(storm, store)
            read_parts(storm, store)
            read_file(storm, store)
            give_up(storm, store)


def read_many(storm: Storm, store: Store) -> None:
    asked = storm.requests()
    answers = list(store.try_read_many(asked, ordered=(ordered := storm.random.random() < 0.5)))
    indices = [answer.request_index for answer in answers]
    assert sorted(indices) == list(range(len(asked))), f"{asked} were answered as {indices}"  # type: ignore[type-var]
    assert not ordered or indices == list(range(len(asked)))
    for answer in answers:
        assert answer.request_index is not None
        key, span = asked[answer.request_index]
        if isinstance(answer, Blob):
            assert (answer.key, answer.span) == (key, span)
            assert storm.is_right(key, span, answer.data), f"{answer} is of no version"
        else:
            assert isinstance(answer, StoreError)
            assert span is None or answer.span == tuple(span)


def read_parts(storm: Storm, store: Store) -> None:
    asked, found = storm.requests(), dict[int, bytearray]()
    try:
        for chunk in store.read_parts(asked):
            joined = found.setdefault(chunk.request_index, bytearray())
            joined += chunk.data
            if chunk.last:
                assert storm.is_right(*asked[chunk.request_index], joined), f"{asked[chunk.request_index]}: no version"
    except PenstockError:
        return
    assert sorted(found) == list(range(len(asked)))


def read_file(storm: Storm, store: Store) -> None:
    key = f"k{(size := storm.random.choice(SIZES))}"
    read: list[tuple[int, int, bytes]] = []
    try:
        with store.open(key) as file:
            for _ in range(storm.random.randint(1, 6)):
                start = file.seek(storm.random.randint(0, size)) if storm.random.random() < 0.7 else file.tell()
                length = storm.random.choice([10, 64 * KIB, 70_000, 300_000, -1])
                data = file.read(length)
                assert len(data) == (size - start if length < 0 else min(length, size - start))
                read.append((start, length, data))
    except StoreError:
        pass
    same = [
        version for version in storm.versions[key] if all(version[at : at + len(data)] == data for at, _, data in read)
    ]
    assert same, f"{key}: {[(at, length) for at, length, _ in read]} are of no one version"


def give_up(storm: Storm, store: Store) -> None:
    blobs = store.try_read_many(storm.requests() * 3)
    for _ in range(storm.random.randint(0, 3)):
        next(blobs, None)
    del blobs
