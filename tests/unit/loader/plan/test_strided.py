"""Every n-th batch: what the workers of a DataLoader are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from counting import counted_stores
from loading import index, numbers, pipeline, shard, write_counted
from penstock.errors import ConfigError
from resuming import assert_resumes_everywhere, assert_same

SIZES = (20, 3, 0, 31, 12, 1, 25)
EACH_BY_ITSELF = ps.FetchConfig(gap_bytes_max=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    index(pipeline(tmp_path / "data"), tmp_path / "index")
    return tmp_path / "data"


@pytest.mark.parametrize("how", ["stream", "require", "ranges"])
@pytest.mark.parametrize("kind", ["rows", "members", "filtered", "carried"])
def test_the_strides_together_are_the_epoch(folder: Path, how: Any, kind: str) -> None:
    """Batch k is worker (k mod n)'s, whatever makes batches; each resumes behind any of its own."""
    made = ps.shards(f"{folder}/").shuffle(window=30)
    if kind == "members":
        made = made.batch(8)
    elif kind == "filtered":
        made = made.decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] % 3).batch(8)
    elif kind == "carried":
        made = made.decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] % 3, refill=True).batch(8)
    else:
        made = made.decode(ps.Integer("cls")).batch(8)
    options: dict[str, Any] = {"index": how, "index_dir": folder.parent / "index", "lanes": 2, "threads": 1}
    if how == "ranges":
        options |= {"index": "require", "fetch": EACH_BY_ITSELF}
    with ps.Loader(made, **options) as loader:
        whole = [list(loader) for _ in range(2)]
    for which in range(3):
        with ps.Loader(made, stride=(which, 3), **options) as loader:
            for batches in whole:
                found = list(loader)
                for left, right in zip(batches[which::3], found, strict=True):
                    assert_same(left, right)
            if how != "stream" and kind in ("rows", "members"):
                assert len(loader) == len(whole[0][which::3])
    assert_resumes_everywhere(lambda: ps.Loader(made, stride=(1, 3), **options), every=4)


@pytest.mark.parametrize("window", [None, 1, 7, 400])
@pytest.mark.parametrize("world", [1, 2])
def test_by_ranges_the_order_is_the_same(folder: Path, window: int | None, world: int) -> None:
    """Whatever the window, the lanes and the ranks: a worker's batches are the Loader's, last ones and masks included."""
    made = pipeline(folder, window=window, batch=5)
    options: dict[str, Any] = {"index": "require", "index_dir": folder.parent / "index", "lanes": 4, "threads": 1}
    for rank in range(world):
        options |= {"rank": rank, "world_size": world}
        with ps.Loader(made, **options) as loader:
            whole = list(loader)
        for which in range(4):
            with ps.Loader(made, stride=(which, 4), fetch=EACH_BY_ITSELF, **options) as loader:
                for left, right in zip(whole[which::4], list(loader), strict=True):
                    assert_same(left, right)


def test_objects_are_read_by_whom_they_belong_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single objects: a worker asks for its own, in the Loader's order."""
    for number in range(23):
        (tmp_path / f"{number:03d}.cls").write_text(str(number))
    made = ps.objects(f"{tmp_path}/").decode(ps.Integer("cls")).shuffle(window=8, seed=2).batch(4)
    with ps.Loader(made, lanes=4) as loader:
        whole = list(loader)
    counted = counted_stores(monkeypatch)
    for which in range(2):
        counted.clear()
        with ps.Loader(made, lanes=4, stride=(which, 2)) as loader:
            for left, right in zip(whole[which::2], list(loader), strict=True):
                assert_same(left, right)
        assert len(counted.spans) == sum(len(batch["cls"]) for batch in whole[which::2])


@pytest.mark.parametrize(("window", "gap_bytes", "factor"), [(400, 0, 1.0), (None, 4096, 1.0), (400, 10_000, 1.6)])
def test_a_worker_reads_its_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, gap_bytes: int, factor: float
) -> None:
    """Bytes at the store: each sample's once where gaps pay, with what lies in small gaps; never n times."""
    samples = [{"__key__": f"s{n:04d}", "cls": str(n), "raw": bytes(3000)} for n in range(400)]
    for at in range(4):
        data = shard(samples[at * 100 : at * 100 + 100])
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"s-{at}.tar").write_bytes(data)
    made = ps.shards(f"{tmp_path}/data/")
    made = (made if window is None else made.shuffle(window=window)).decode(ps.Integer("cls")).batch(20)
    index(made, tmp_path / "index")
    stored = sum(each.stat().st_size for each in (tmp_path / "data").iterdir())
    counted = counted_stores(monkeypatch)
    seen = []
    for which in range(5):
        fetch = ps.FetchConfig(gap_bytes_max=gap_bytes)
        with ps.Loader(made, lanes=2, stride=(which, 5), index_dir=tmp_path / "index", fetch=fetch) as loader:
            seen += numbers(loader)
    assert sorted(seen) == list(range(400))
    assert counted.bytes <= factor * stored


def test_others_batches_are_not_decoded(folder: Path) -> None:
    """A worker runs the user's functions on its own batches only."""
    seen: list[int] = []

    def counts(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(sample["cls"])
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(counts).batch(10)
    with ps.Loader(made, stride=(2, 5), threads=1) as loader:
        list(loader)
    assert sorted(seen) == [*range(20, 30), *range(70, 80)]


def test_bad_strides_are_refused(folder: Path) -> None:
    """(j, n) with 0 <= j < n, without processes, and not where ranks have to agree."""
    for stride in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="stride"):
            ps.Loader(pipeline(folder), stride=stride)
    with pytest.raises(ConfigError, match="processes"):
        ps.Loader(pipeline(folder), stride=(0, 2), processes=1)
    with ps.Loader(pipeline(folder), stride=(0, 2), rank=0, world_size=2, agree=int) as loader:
        with pytest.raises(ConfigError, match="agree"):
            next(iter(loader))
