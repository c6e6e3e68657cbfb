"""``Loader(workers=)``: the batches are those of a plain loader, whatever happens to the cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

import penstock as ps
from loading import index, write_counted
from resuming import assert_same

pytestmark = pytest.mark.timeout(300)
SIZES = (90, 0, 130, 14, 101, 60)
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    return tmp_path / "data"


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """An index of the shards."""
    return index(made_of(folder), tmp_path / "index")


def made_of(folder: Path, **options: Any) -> Any:
    """Columns of all kinds: numbers, pictures whose rows go to their places one by one, texts, and bytes of any length."""

    def pictured(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        number = int(sample["cls"])
        picture = np.full((40, 30, 3), number % 251, np.uint8)
        return {
            "cls": number,
            "picture": picture,
            "noise": rng.random(3),
            "text": f"{number} ü",
            "raw": b"x" * (number * 20),
        }

    return ps.shards(f"{folder}/").shuffle(window=50, seed=3).map(pictured).batch(8, **options)


def kill_node(cluster: Cluster, node: Any) -> None:
    """Kill a node at once, with all that runs there."""
    mark = node.node_id.encode()
    pids = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and mark in _quietly(entry / "cmdline") + _quietly(entry / "environ")
    ]
    cluster.remove_node(node, allow_graceful=False)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _quietly(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("mode", ["require", "stream"])
def test_a_node_is_killed_in_the_middle(cluster: Cluster, folder: Path, place: Path, mode: Any) -> None:
    """Four workers on four nodes, one of which is killed: batch by batch those of the plain loader, and so is the state."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4}
    with ps.Loader(made, **options) as loader:
        expected = [(batch, loader.state_dict()) for _ in loader.epochs(2) for batch in loader]
    victim = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    workers = ps.ray.Workers(count=4, address=cluster.address)
    with ps.Loader(made, workers=workers, **options) as loader:
        found = []
        for _ in loader.epochs(2):
            for batch in loader:
                found.append((batch, loader.state_dict()))
                if len(found) == 20:
                    assert loader.statistics().cluster_workers_count == 4
                    kill_node(cluster, victim)
                    killed_s = time.monotonic()
                if len(found) == 40:
                    print(f"{time.monotonic() - killed_s:.2f} s for 20 batches, one node of four being killed")
        assert loader.statistics().node_decode_s
    for (left, before), (right, after) in zip(expected, found, strict=True):
        assert_same(left, right)
        assert after == before
