"""Fork and spawn: children use the same store at once, and the parent's transfers go on, bit-exact."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.config import KIB, FetchConfig
from servers.faulty import FaultyServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(100)]

SMALL = random.Random(0).randbytes(3000)
BIG = [random.Random(number).randbytes(1_700_000) for number in range(8)]


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    objects = {"small": SMALL, "closing": SMALL} | {f"big/{number}": data for number, data in enumerate(BIG)}
    with FaultyServer(objects, tls=True) as running:
        running.fail("chunked_cut", times=0)
        yield running


def run(server: FaultyServer, scenario: str) -> dict[str, Any]:
    script = Path(__file__).with_name("fork_scenario.py")
    command = [sys.executable, "-W", "error", str(script), scenario, server.endpoint_url, str(server.ca_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("leave", ["sys.exit", "os._exit"])
def test_a_fork_in_flight_harms_nobody(server: FaultyServer, leave: str) -> None:
    """Over TLS with transfers in flight: the child reads at once and refuses what it inherited; the parent goes on."""
    found = run(server, leave)
    for child in found["children"]:
        assert child == {
            "small": sha(SMALL),
            "big": sha(*BIG[:2]),
            "many": 100,
            "refused": [True, True, True],
            "status": 7,
        }
    assert found["parent_big"] == sha(*BIG)
    assert found["parent_again"] == sha(*BIG)
    assert found["parent_blobs"] == 500
    assert found["parent_written"] == 9_000_003
    assert server.uploads == {}


def test_children_read_at_once(server: FaultyServer) -> None:
    """Two children and their parent read the same objects at the same time; a child's child does as well."""
    found = run(server, "loaders")
    assert found["children"] == [{"big": sha(*BIG), "status": 7}] * 2
    assert found["parent"] == sha(*BIG)
    assert found["nested"] == {"big": sha(*BIG), "status": 7} | {"status": 7}


def test_a_child_that_lives_on_costs_the_parent_nothing(server: FaultyServer) -> None:
    """Connections that a child inherited and the server closed do not keep the parent's loop awake."""
    server.fail("chunked_cut", times=None, match="closing")
    server.heal()
    server.fail("close", times=4, match="closing", after_bytes=100)  # fewer than one read has attempts
    assert run(server, "long_lived")["spent_s"] < 0.3


def read_in_spawned(store: ps.Store, key: str) -> str:
    """What a spawned process does."""
    return sha(store.read(key).data)


def test_stores_reach_spawned_processes(server: FaultyServer) -> None:
    """A store pickles into a spawned process and reads there the same bytes."""
    store = ps.connect(
        server.url,
        endpoint_url=server.endpoint_url,
        anonymous=True,
        transport=ps.TransportConfig(ca_bundle=server.ca_bundle),
        fetch=FetchConfig(part_bytes=256 * KIB),
    )
    assert sha(pickle.loads(pickle.dumps(store)).read("big/0").data) == sha(BIG[0])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_read, (pickle.dumps(store), "big/1")).get(60) == sha(BIG[1])
        pool.close()
        pool.join()


def _read(pickled: bytes, key: str) -> str:
    return read_in_spawned(pickle.loads(pickled), key)
