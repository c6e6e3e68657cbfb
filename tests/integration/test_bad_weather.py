"""Under faults, everything arrives bit-exact or fails with a typed error, and nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import penstock as ps
from penstock.errors import StoreError
from penstock.store.base import Store
from servers.faults import KINDS
from servers.faulty import FaultyServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(110)]

SMALL = {f"small/{n:04d}": random.Random(n).randbytes(n % 700) for n in range(2000)}
SHARDS = {f"shard/{n:02d}": random.Random(-n).randbytes(1_500_000 + n) for n in range(20)}

SURVIVED = [
    "close",
    "close_head",
    "reset",
    "reset_head",
    "stall",
    "stall_head",
    "delay",
    "500",
    "503",
    "503_retry_after",
    "429",
    "slow_down",
]
"""Kinds that trying again overcomes; the others may end in an error, but a typed one."""


@pytest.fixture
def store(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> Store:
    for key, data in (SMALL | SHARDS).items():
        faulty.objects[key] = data
    return connect_faulty(
        transport=ps.TransportConfig(connect_s_max=2, first_byte_s_max=0.5, stall_s_max=0.5),
        retry=ps.RetryConfig(attempts_max=8, backoff_s=0.01, backoff_s_max=0.05),
        fetch=ps.FetchConfig(part_bytes=256 * 1024),
    )


def test_what_trying_again_overcomes_arrives_bit_exact(faulty: FaultyServer, store: Store) -> None:
    """A twentieth of all requests is cut, reset, stalled, refused or garbled: 2 000 objects and 20 shards are exact."""
    faulty.random_faults(SURVIVED, ratio=0.05, seed=0, seconds=30)
    requests = list(SMALL | SHARDS)
    for blob, (key, data) in zip(store.read_many(requests), (SMALL | SHARDS).items(), strict=True):
        assert blob.key == key
        assert bytes(blob.data) == data, f"{key}: {len(blob)} bytes, wrong or not the {len(data)} that are stored"
    streamed: dict[int, bytearray] = {}
    for chunk in store.read_parts(SHARDS):
        streamed.setdefault(chunk.request_index, bytearray()).extend(chunk.data)
    assert [bytes(data) for data in streamed.values()] == list(SHARDS.values())
    met = {request.fault for request in faulty.requests} - {None}
    assert len(met) > len(SURVIVED) / 2


def test_under_every_kind_of_fault_it_is_exact_or_a_typed_error(faulty: FaultyServer, store: Store) -> None:
    """Every kind of misbehaviour there is, on a twentieth of all requests: no wrong byte, no untyped error, no hang."""
    kinds = [kind for kind in KINDS if kind != "change"]
    faulty.random_faults(kinds, ratio=0.05, seed=0, seconds=30)
    expected = SMALL | SHARDS
    results = list(store.try_read_many(expected))
    assert len(results) == len(expected)
    failed = [result for result in results if isinstance(result, StoreError)]
    for result, data in zip(results, expected.values(), strict=True):
        if not isinstance(result, StoreError):
            assert bytes(result.data) == data, f"{result}: wrong, or not the {len(data)} that are stored"
    assert len(failed) < len(expected) / 20
    for key, data in SHARDS.items():
        try:
            with store.open(key) as file:
                assert file.read() == data
        except StoreError:
            continue


def test_objects_that_change_are_never_mixed(faulty: FaultyServer, store: Store) -> None:
    """Objects that change between two ranges: one version, whole, or ``ObjectChangedError``."""
    faulty.random_faults(["change"], ratio=0.3, seed=0)
    versions = {key: (data, bytes(byte ^ 0xFF for byte in data[:16]) + data[16:]) for key, data in SHARDS.items()}
    changed = 0
    for key, data in SHARDS.items():
        faulty.objects[key] = data
        try:
            found = bytes(store.read(key).data)
        except ps.ObjectChangedError:
            changed += 1
        else:
            assert found in versions[key], f"{key}: {len(found)} bytes that were never one version of {len(data)}"
    assert changed > 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_one_kind_for_ever_ends_in_a_typed_error_or_right_bytes(faulty: FaultyServer, kind: str) -> None:
    """A store that always misbehaves in one way: within its deadlines, right bytes or a ``StoreError`` that says where."""
    faulty.objects["key"] = data = random.Random(7).randbytes(100_000)
    faulty.fail(kind, times=None, seconds=30, bytes_per_s=100, location="http://127.0.0.1:1")
    with ps.connect(
        faulty.url,
        endpoint_url=faulty.endpoint_url,
        anonymous=True,
        transport=ps.TransportConfig(connect_s_max=2, first_byte_s_max=0.3, stall_s_max=0.3),
        retry=ps.RetryConfig(attempts_max=2, total_s_max=1, backoff_s=0.01, backoff_s_max=0.02),
    ) as store:
        for read in (lambda: store.read("key").data, lambda: store.read("key", ps.ByteRange(0, 100_000)).data):
            try:
                found = bytes(read())
            except StoreError as error:
                failure = str(error)
            else:
                other = bytes(byte ^ 0xFF for byte in data[:16]) + data[16:]
                assert found in (data, other), f"{len(found)} bytes that the store never held"
                continue
            assert "s3://bucket/key" in failure
