"""``--results``: gateways that share nothing but a bucket transform each object once."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock as ps
from servers.gateway import WAIT_S, Gateway, wait_until
from servers.holding import HoldingRelay

if TYPE_CHECKING:
    from penstock.testing.ministack import Ministack

pytestmark = [pytest.mark.server, pytest.mark.heavy]

RUNS = 'penstock_gateway_result_runs_total{access_point="made",outcome="ok"}'
STORED = 'penstock_gateway_derived_stores_total{outcome="stored"}'
PARTS_BYTES = 12 << 20
Start = Callable[..., Gateway]


@pytest.fixture
def bucket(ministack: Ministack) -> Iterator[ps.Store]:
    """A bucket with sources below ``train/``; results go below ``derived/``."""
    name = ministack.create_bucket()
    keys = ps.Credentials(
        access_key=ministack.environment["AWS_ACCESS_KEY_ID"], secret_key=ministack.environment["AWS_SECRET_ACCESS_KEY"]
    )
    with ps.connect(f"s3://{name}/", endpoint_url=ministack.endpoint_url, credentials=keys) as store:
        store.write("train/ä 1.txt", b"some words " * 10_000)
        store.write("train/long.bin", random.Random(1).randbytes(PARTS_BYTES))
        yield store


@pytest.fixture
def start(tmp_path: Path, ministack: Ministack, bucket: ps.Store) -> Iterator[Start]:
    """Starts a gateway with a cache of its own."""
    started: list[Gateway] = []
    url = bucket.describe("")

    def begin(*more: str) -> Gateway:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        gateway = Gateway(
            "--upstream", f"{url}train/", "--name", "made", "--transform", "gzip", "--processes", "1", "--port", "0",
            "--cache", "cache:200MB", "--results", f"{url}derived/", *more,
            folder=folder, environment={**ministack.environment},
        )  # fmt: skip
        started.append(gateway)
        return gateway

    yield begin
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.kill()


KEYS = {"/made/%C3%A4%201.txt": "train/ä 1.txt", "/made/long.bin": "train/long.bin"}


def test_each_object_is_transformed_once(start: Start, bucket: ps.Store) -> None:
    """A second gateway with an empty cache runs no transform: whole objects and ranges are those of the first one."""
    first, second = start(), start()
    made = {path: first.get(path) for path in KEYS}
    assert [gzip.decompress(data) for data in made.values()] == [bucket.read(key).data for key in KEYS.values()]
    wait_until(lambda: first.metric(STORED) == 2)
    assert (
        second.get("/made/long.bin", headers={"Range": "bytes=5000000-5000009"})
        == (made["/made/long.bin"][5_000_000:5_000_010])
    )
    assert {path: second.get(path) for path in KEYS} == made
    first.assert_metrics({RUNS: 2})
    second.assert_metrics({RUNS: 0})
    assert not list(bucket.list("derived/uploads/"))
    assert first.stop() == second.stop() == 0


def stored(bucket: ps.Store) -> list[str]:
    return [info.key for info in bucket.list("derived/") if not info.key.endswith(".json")]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        pytest.param("/made/%C3%A4%201.txt", rb"PUT \S+\.json", id="record"),
        pytest.param("/made/long.bin", rb"POST \S+uploadId=", id="upload"),
    ],
)
def test_a_gateway_is_killed_while_it_stores(
    start: Start, bucket: ps.Store, ministack: Ministack, path: str, pattern: bytes
) -> None:
    """What it leaves behind is served by nobody: the next gateway transforms the object, and stores the result."""
    with HoldingRelay(int(ministack.endpoint_url.rpartition(":")[2]), pattern) as relay:
        first = start("--results-endpoint-url", relay.url)
        made = first.get(path)
        assert relay.held.wait(WAIT_S)
        first.kill()
    assert not [info.key for info in bucket.list("derived/") if info.key.endswith(".json")]
    second = start()
    assert second.get(path) == made
    wait_until(lambda: second.metric(STORED) == 1)
    second.assert_metrics({RUNS: 1})
