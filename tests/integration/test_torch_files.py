"""``ps.torch.save`` and ``ps.torch.load`` on real servers, and on one that misbehaves."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import penstock as ps  # noqa: E402
from penstock.config import KIB, FetchConfig, RetryConfig  # noqa: E402
from penstock.errors import CheckpointError, ChecksumError, ObjectChangedError, StoreError  # noqa: E402
from servers.faulty import FaultyServer  # noqa: E402

pytestmark = pytest.mark.server

FAST = RetryConfig(attempts_max=12, backoff_s=0.002, backoff_s_max=0.02)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"large": torch.randn(400_000), "small": torch.arange(7), "middle": torch.randn(100, 900), "step": 3}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in tensors)


def saved() -> bytes:
    file = io.BytesIO()
    torch.save(state(), file)
    return file.getvalue()


@pytest.fixture
def load(faulty: FaultyServer) -> Callable[..., Any]:
    """``ps.torch.load`` of the object ``x.pt`` of the server that misbehaves."""
    options: dict[str, Any] = {"endpoint_url": faulty.endpoint_url, "anonymous": True, "retry": FAST}
    options["fetch"] = FetchConfig(part_bytes=128 * KIB)
    return lambda **more: ps.torch.load(f"{faulty.url}/x.pt", **options, **more)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_real_server(user: Any, bucket: str, mmap: bool) -> None:
    """A state of several parts comes back from a real server."""
    large = state() | {"parts": torch.randn(5_000_000)}
    ps.torch.save(large, f"s3://{bucket}/a/x.pt")
    assert same(large, ps.torch.load(f"s3://{bucket}/a/x.pt", mmap=mmap))


@pytest.mark.parametrize("mmap", [False, True])
def test_faults_leave_no_trace(faulty: FaultyServer, load: Callable[..., Any], mmap: bool) -> None:
    """Broken and refused answers are made up for."""
    faulty.objects["x.pt"] = saved()
    faulty.random_faults(["503", "reset", "close", "500"], ratio=0.2, seed=1)
    assert same(state(), load(mmap=mmap))


@pytest.mark.parametrize("mmap", [False, True])
def test_damage_is_noticed_and_read_again(faulty: FaultyServer, load: Callable[..., Any], mmap: bool) -> None:
    """One flipped byte on the way is made up for by reading again; if it stays, no state is returned."""
    faulty.objects["x.pt"] = saved()
    faulty.fail("corrupt", times=1, match=lambda request: request.method == "GET" and len(faulty.requests) > 4)
    assert same(state(), load(mmap=mmap))
    faulty.fail("corrupt", times=10_000, match=lambda request: request.method == "GET")
    with pytest.raises((ChecksumError, CheckpointError), match=r"x\.pt"):
        load(mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_an_object_that_changes_while_it_is_read(faulty: FaultyServer, load: Callable[..., Any], mmap: bool) -> None:
    """Two versions are never mixed: the error names the object."""
    faulty.objects["x.pt"] = saved()
    faulty.fail("change", times=1, match=lambda request: request.method == "GET" and len(faulty.requests) > 3)
    with pytest.raises(ObjectChangedError, match=r"x\.pt"):
        load(mmap=mmap)


def test_a_store_that_is_lost_while_saving(faulty: FaultyServer) -> None:
    """If parts are refused, the save fails, and the earlier object is still there."""
    options: dict[str, Any] = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    options["retry"] = RetryConfig(attempts_max=2, backoff_s=0.001)
    faulty.objects["x.pt"] = saved()
    faulty.fail("403", times=1000, match=lambda request: request.method == "PUT")
    with pytest.raises(StoreError, match=r"x\.pt"):
        ps.torch.save(state() | {"parts": torch.randn(5_000_000)}, f"{faulty.url}/x.pt", **options)
    assert faulty.objects["x.pt"] == saved()
    assert not faulty.uploads


def save_by_hand(obj: object, url: str, **options: Any) -> None:
    with ps.torch.checkpoint_writer(url, **options) as file:
        torch.save(obj, file)


@pytest.mark.parametrize("save", [ps.torch.save, save_by_hand])
def test_a_failure_in_the_middle_is_the_stores(faulty: FaultyServer, save: Callable[..., None]) -> None:
    """A save that the store refuses half-way raises the store's error, not that of ``torch.save`` about missing bytes."""
    options: dict[str, Any] = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    faulty.fail("403", times=1000, match=lambda request: request.method == "POST")
    large = {str(index): torch.randn(2_000_000) for index in range(4)}
    with pytest.raises(ps.AccessDeniedError, match=r"x\.pt"):
        save(large, f"{faulty.url}/x.pt", **options)
    assert not faulty.objects
