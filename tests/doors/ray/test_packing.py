"""``executor="ray"``: on a cluster of several nodes the shards are those of one machine, also where nodes are lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.cli.app import run
from penstock.errors import ConfigError, DataError
from penstock.pack import convert, pack, verify

SAMPLES = 24


def held(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample in capitals; at the last of a shard it says on which node it is, and waits for a hold to be lifted."""
    folder = Path(sample["where"].decode())
    if int(sample["__key__"]) % 4 == 3 and (folder / "hold").exists():
        (folder / f"{ray.get_runtime_context().get_node_id()}.{os.getpid()}").touch()
        while (folder / "hold").exists():
            time.sleep(0.01)
    return same(sample)


def same(sample: dict[str, Any]) -> dict[str, Any]:
    """What ``held`` gives, at once."""
    return {"bin": sample["bin"].swapcase()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """24 samples of 3 MB, four of which make a shard, whose first part is on its way when the last is taken."""
    root = tmp_path / "source"
    root.mkdir()
    for number in range(SAMPLES):
        (root / f"{number:03d}.bin").write_bytes(b"%03d penstock " % number * 240_000)
        (root / f"{number:03d}.where").write_text(str(tmp_path))
    return root


def shards(folder: Path) -> dict[str, bytes]:
    """What is visible, but for what packing keeps; no temporary file among it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".penstock" not in path.parts
    }


def uploads(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "uploads" in path.parts and path.is_file()]


def test_the_bytes_are_those_of_one_machine(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    """Packed, converted and cut anew by tasks on three nodes, every shard is equal to that of threads; then all is done."""
    pack(source, tmp_path / "here", samples_max=4)
    packed = pack(source, tmp_path / "there", samples_max=4, executor="ray", verify=True)
    assert (packed.samples_count, packed.shards_written) == (SAMPLES, 6)
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert pack(source, tmp_path / "there", samples_max=4, executor="ray").shards_written == 0
    for to, options in (("mds", {}), ("tar.gz", {"bytes_max": 25_000_000})):
        convert(tmp_path / "there", tmp_path / f"{to}-here", to=to, allow_loss=True, **options)
        convert(tmp_path / "there", tmp_path / f"{to}-there", to=to, allow_loss=True, executor="ray", **options)
        assert shards(tmp_path / f"{to}-there") == shards(tmp_path / f"{to}-here")


def test_a_node_is_lost_under_way(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    """Its shards are begun again elsewhere; the bytes are those of one machine, and no part of an upload is left."""
    pack(source, tmp_path / "here", samples_max=4, transform=same)
    victim = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    (tmp_path / "hold").touch()
    packed: list[Any] = []
    thread = threading.Thread(
        target=lambda: packed.append(
            pack(source, tmp_path / "there", samples_max=4, transform=held, executor="ray", verify=True)
        )
    )
    thread.start()
    try:
        while thread.is_alive() and not list(tmp_path.glob(f"{victim.node_id}.*")):
            pass
        begun = uploads(tmp_path / "there")
        cluster.remove_node(victim, allow_graceful=False)
        for path in tmp_path.glob(f"{victim.node_id}.*"):  # a machine that is lost takes its workers along, at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.suffix[1:]), signal.SIGKILL)
    finally:
        (tmp_path / "hold").unlink()
    thread.join(90)
    assert begun
    assert packed[0].samples_count == SAMPLES
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert not uploads(tmp_path / "there")
    assert not list((tmp_path / "there").rglob(".penstock-*"))


def broken(sample: dict[str, Any]) -> dict[str, Any]:
    """As ``same``, but for one sample while the source is said to be broken."""
    if sample["__key__"] == "013" and Path(sample["where"].decode(), "broken").exists():
        raise ValueError("no")
    return same(sample)


def test_stopped_on_a_cluster_it_goes_on_here(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    """An error of one shard's data ends it, by its own class, and is not tried again; threads do the rest."""
    pack(source, tmp_path / "here", samples_max=4, transform=same)
    (tmp_path / "broken").touch()
    with pytest.raises(DataError, match=r"broken failed at .*: ValueError: no"):
        pack(source, tmp_path / "there", samples_max=4, transform=broken, executor="ray", jobs=1)
    finished = shards(tmp_path / "there")
    assert finished.items() <= shards(tmp_path / "here").items()
    assert len(finished) == 3
    (tmp_path / "broken").unlink()
    assert pack(source, tmp_path / "there", samples_max=4, transform=broken).shards_written == 3
    assert shards(tmp_path / "there") == shards(tmp_path / "here")


def test_the_command(cluster: Cluster, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--executor ray --address``, with progress for machines; what has no plan is refused."""
    command = ["pack", f"{source}/", f"{tmp_path}/out/", "--shard-samples", "8", "--fields", "bin", "--json"]
    assert run([*command, "--executor", "ray", "--address", cluster.address]) == 0
    out = capsys.readouterr().out
    lines = [
        json.loads(line) for line in out.splitlines() if line.startswith("{")
    ]  # Ray prints of a node that was lost
    assert [line["action"] for line in lines] == ["begin", "packed", "packed", "packed", "summary"]
    assert verify(f"{tmp_path}/out/").samples_count == SAMPLES
    with pytest.raises(ConfigError, match="needs a source that can be listed"):
        pack([{"x": b""}], tmp_path / "list", executor="ray")
    assert ray.is_initialized()
