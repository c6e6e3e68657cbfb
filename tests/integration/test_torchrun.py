"""Ranks as torchrun starts them: real processes, a real process group (gloo)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from loading import write_counted
from pages import write_pictures
from penstock.index import beside, build
from penstock.sources.shards import ShardFinder
from ranks import torchrun

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "tensor_parallel.py"
SIZES = (9, 4, 7, 5, 6)


def epochs_of(tmp_path: Path, processes: int, *, tensor_parallel: int, door: str) -> list[list[list[list[int]]]]:
    """[rank][epoch][batch] of what ``torchrun_scenario.py`` got."""
    out = tmp_path / "out"
    out.mkdir()
    torchrun(processes, HERE / "torchrun_scenario.py", f"{tmp_path}/data/", str(out), str(tensor_parallel), door)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


def index(folder: Path) -> None:
    shards = ShardFinder(ps.shards(f"{folder}/").source, fetch=None).find()  # type: ignore[arg-type]
    build(shards, beside(shards))


def check_exact(ranks: list[Any], total: int) -> None:
    """Every sample once per epoch over all ranks, as many batches on each, and epochs in different orders."""
    for epoch in range(2):
        numbers = [number for rank in ranks for batch in rank[epoch] for number in batch]
        assert sorted(numbers) == list(range(total))
        assert len({len(rank[epoch]) for rank in ranks}) == 1
    assert ranks[0][0] != ranks[0][1]


@pytest.mark.parametrize(("processes", "indexed"), [(1, True), (2, True), (4, True), (2, False), (4, False)])
def test_ranks_share_the_samples(tmp_path: Path, processes: int, indexed: bool) -> None:
    """Every sample goes to exactly one rank, and ranks have equally many batches, with and without an index."""
    total = write_counted(tmp_path / "data", SIZES)
    if indexed:
        index(tmp_path / "data")
    check_exact(epochs_of(tmp_path, processes, tensor_parallel=1, door="loader"), total)


def test_tensor_parallel_peers_get_the_same_batches(tmp_path: Path) -> None:
    """With mesh= the peers of a replica have identical batches, and the replicas share the samples."""
    total = write_counted(tmp_path / "data", SIZES)
    ranks = epochs_of(tmp_path, 4, tensor_parallel=2, door="loader")
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    check_exact([ranks[0], ranks[2]], total)


@pytest.mark.parametrize("door", ["dataset", "workers"])
def test_ranks_through_a_dataloader(tmp_path: Path, door: str) -> None:
    """IterableDataset reads the rank when iteration begins, and its workers know their process's rank."""
    total = write_counted(tmp_path / "data", SIZES)
    index(tmp_path / "data")
    check_exact(epochs_of(tmp_path, 2, tensor_parallel=1, door=door), total)


@pytest.mark.parametrize(("door", "processes"), [("loader", 2), ("workers", 1)])
def test_a_job_lists_once(tmp_path: Path, faulty: FaultyServer, door: str, processes: int) -> None:
    """Of two ranks, and of a rank's two DataLoader workers, one lists each page of the data, and both read it, each epoch."""
    total = write_counted(tmp_path / "data", SIZES)
    for path in (tmp_path / "data").iterdir():
        faulty.objects[f"data/{path.name}"] = path.read_bytes()
    (tmp_path / "out").mkdir()
    torchrun(
        processes,
        HERE / "torchrun_scenario.py",
        f"s3://{faulty.bucket}/data/",
        str(tmp_path / "out"),
        "1",
        door,
        environment={
            "AWS_ENDPOINT_URL": faulty.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "XDG_CACHE_HOME": str(tmp_path),
        },
    )
    pages = [each.path for each in faulty.requests if each.is_list]
    assert 1 <= len(set(pages)) == len(pages)
    check_exact([json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(processes)], total)


def test_the_example_trains_one_network_in_two_halves(tmp_path: Path) -> None:
    """On four processes, both halves of a replica print the same keys and loss, and the replicas print others."""
    write_pictures(tmp_path, samples=200, shards=4)
    lines = sorted(re.findall(r"replica \d .*? loss [\d.]+", torchrun(4, EXAMPLE, f"{tmp_path}/")))
    assert len(lines) == 8
    said = {line: re.sub(r" part \d", "", line) for line in lines}
    assert len(set(said.values())) == 4
