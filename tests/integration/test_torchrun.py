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
from ranks import run_ranks, torchrun

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "tensor_parallel.py"
SIZES = (9, 4, 7, 5, 6)


def epochs_of(tmp_path: Path, processes: int, *jobs: str, **options: Any) -> list[list[list[list[list[int]]]]]:
    """[job][rank][epoch][batch] of what ``torchrun_scenario.py`` got."""
    out = tmp_path / "out"
    out.mkdir()
    run_ranks(processes, HERE / "torchrun_scenario.py", str(out), *jobs, **options)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]
    return [list(job) for job in zip(*ranks, strict=True)]


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


@pytest.fixture
def total(tmp_path: Path) -> int:
    """Number of samples in ``tmp_path``'s two equal data sets, of which one has an index."""
    for name in ("indexed", "plain"):
        count = write_counted(tmp_path / name, SIZES)
    index(tmp_path / "indexed")
    return count


def test_ranks_share_the_samples(tmp_path: Path, total: int) -> None:
    """Every sample goes to exactly one rank, and ranks have equally many batches, with and without an index; with mesh= the
    peers of a replica have identical batches, and the replicas share the samples.
    """
    indexed, plain, halves = epochs_of(
        tmp_path, 4, f"{tmp_path}/indexed/,1,loader", f"{tmp_path}/plain/,1,loader", f"{tmp_path}/plain/,2,loader"
    )
    check_exact(indexed, total)
    check_exact(plain, total)
    assert halves[0] == halves[1]
    assert halves[2] == halves[3]
    check_exact([halves[0], halves[2]], total)


def test_ranks_through_a_dataloader(tmp_path: Path, total: int) -> None:
    """IterableDataset reads the rank when iteration begins, and its workers know their process's rank; so does a loader."""
    doors = [f"{tmp_path}/indexed/,1,{door}" for door in ("dataset", "workers", "loader")]
    for ranks in epochs_of(tmp_path, 2, *doors, f"{tmp_path}/plain/,1,loader"):
        check_exact(ranks, total)


@pytest.mark.parametrize(("door", "processes"), [("loader", 2), ("workers", 1)])
def test_a_job_lists_once(tmp_path: Path, faulty: FaultyServer, door: str, processes: int) -> None:
    """Of two ranks, and of a rank's two DataLoader workers, one lists each page of the data, and both read it, each epoch."""
    total = write_counted(tmp_path / "data", SIZES)
    for path in (tmp_path / "data").iterdir():
        faulty.objects[f"data/{path.name}"] = path.read_bytes()
    environment = {
        "AWS_ENDPOINT_URL": faulty.endpoint_url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    (ranks,) = epochs_of(tmp_path, processes, f"s3://{faulty.bucket}/data/,1,{door}", environment=environment)
    pages = [each.path for each in faulty.requests if each.is_list]
    assert 1 <= len(set(pages)) == len(pages)
    check_exact(ranks, total)


def test_the_example_trains_one_network_in_two_halves(tmp_path: Path) -> None:
    """On two processes, both halves print the same keys and loss in each epoch."""
    write_pictures(tmp_path, samples=200, shards=4)
    lines = re.findall(r"replica \d .*? loss [\d.]+", torchrun(2, EXAMPLE, f"{tmp_path}/"))
    assert len(lines) == 4
    assert len({re.sub(r" part \d", "", line) for line in lines}) == 2
