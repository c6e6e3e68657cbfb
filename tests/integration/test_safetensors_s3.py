"""safetensors on servers that misbehave, and on a real one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import (
    AccessDeniedError,
    ChecksumError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from penstock.testing.ministack import Ministack
from servers.faulty import FaultyServer

torch = pytest.importorskip("torch")
import penstock as ps  # noqa: E402
from penstock.torch.checkpoint import load_safetensors, open_safetensors, save_safetensors  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.torch]

TENSOR_BYTES = 12_000_000


def new_state() -> dict[str, Any]:
    """One tensor of several parts, and many small ones that are read together."""
    torch.manual_seed(0)
    small = {f"layer.{number}.bias": torch.randn(number) for number in range(100)}
    return {**small, "large": torch.randn(TENSOR_BYTES // 4)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def options(faulty: FaultyServer) -> dict[str, Any]:
    """Options to reach the faulty server, with short pauses between attempts."""
    return {"endpoint_url": faulty.endpoint_url, "anonymous": True, "retry": ps.RetryConfig(backoff_s=0.01)}


def test_bad_weather_changes_nothing(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """With a fifth of all requests failing in one way or another, what comes back is what was saved."""
    kinds = ["503", "slow_down", "reset", "reset_head", "close", "close_head", "500", "promise_more"]
    faulty.random_faults(kinds, ratio=0.2, seed=1)
    state = new_state()
    for url in (f"{faulty.url}/m.safetensors", f"{faulty.url}/m/"):
        save_safetensors(state, url, **options)
        assert_same(load_safetensors(url, **options), state)
    assert any(request.fault for request in faulty.requests)


def test_few_requests_are_sent(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """One for the header, one for the checksum, one per part of the large tensor, and one for the hundred small ones."""
    save_safetensors(new_state(), f"{faulty.url}/m.safetensors", **options)
    before = len(faulty.requests)
    load_safetensors(f"{faulty.url}/m.safetensors", **options)
    assert len(faulty.requests) - before <= 5
    before = len(faulty.requests)
    with open_safetensors(f"{faulty.url}/m.safetensors", **options) as reader:
        reader.get_slice("large")[5:9]
    assert len(faulty.requests) - before == 2


def test_a_file_that_is_replaced_meanwhile_is_an_error(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """The header of one version is never used to read another."""
    save_safetensors(new_state(), f"{faulty.url}/m.safetensors", **options)
    with open_safetensors(f"{faulty.url}/m.safetensors", **options) as reader:
        changed = {name: tensor + 1 for name, tensor in new_state().items()}
        save_safetensors(changed, f"{faulty.url}/m.safetensors", **options)
        for read in (reader.load, lambda: reader.get_slice("large")[2:3], lambda: reader.get_tensor("layer.7.bias")):
            with pytest.raises(ObjectChangedError, match=r"m\.safetensors"):
                read()


def test_a_flipped_byte_is_an_error(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """A file that is read whole is compared with the checksum that the store keeps; the error names it."""
    save_safetensors(new_state(), f"{faulty.url}/m.safetensors", **options)
    faulty.fail("corrupt", times=None, match=lambda request: bool(request.span) and request.span[0] > 262_144)
    with pytest.raises(ChecksumError, match=r"m\.safetensors: what was read has the CRC32C"):
        load_safetensors(f"{faulty.url}/m.safetensors", **options)


def test_a_refusal_names_the_file(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """Access that is denied, to the header or in the middle of the tensors, is an error that names the file."""
    save_safetensors(new_state(), f"{faulty.url}/m.safetensors", **options)
    for first in (0, 1):
        faulty.heal()
        faulty.fail(
            "403", times=None, match=lambda request, first=first: bool(request.span and request.span[0] >= first)
        )
        with pytest.raises(AccessDeniedError, match=r"m\.safetensors"):
            load_safetensors(f"{faulty.url}/m.safetensors", **options)
    with pytest.raises(ObjectMissingError, match=r"none\.safetensors"):
        load_safetensors(f"{faulty.url}/none.safetensors", **options)


def test_a_save_that_is_refused_leaves_the_earlier_one(faulty: FaultyServer, options: dict[str, Any]) -> None:
    """Permission that is lost in the middle of a save: the earlier checkpoint loads, and nothing else is left."""
    url, state = f"{faulty.url}/m/", new_state()
    save_safetensors(state, url, shard_bytes_max=TENSOR_BYTES // 2, **options)
    kept, negative = set(faulty.objects), {name: -tensor for name, tensor in state.items()}
    for name in ("00002-of-00002", "index.json"):
        faulty.fail("403", times=None, match=lambda request, name=name: request.method == "PUT" and name in request.key)
        with pytest.raises(StoreError):
            save_safetensors(negative, url, shard_bytes_max=TENSOR_BYTES // 2, **options)
        faulty.heal()
        assert_same(load_safetensors(url, **options), state)
        assert set(faulty.objects) == kept
    assert not faulty.uploads


def test_a_real_store_keeps_the_checksum(ministack: Ministack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one part that was saved to ministack is verified when it is loaded, by the CRC32C that ministack answers."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    url, state = f"s3://{ministack.create_bucket()}/m.safetensors", {"w": torch.randn(1000), "b": torch.randn(10)}
    save_safetensors(state, url)
    with ps.connect(url.removesuffix("m.safetensors")) as store:
        assert "crc32c" in store.stat("m.safetensors").checksums
    assert_same(load_safetensors(url), state)
