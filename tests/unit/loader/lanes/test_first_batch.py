"""The first batch of an indexed epoch is read sample by sample, ahead of the runs that it comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ChecksumError
from penstock.loader.lanes import first_batch

SIZES = [40] * 12


@pytest.fixture
def always_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is prefetched however short its runs are."""
    monkeypatch.setattr(first_batch, "RUNS_BYTES_MIN", 0)


def opened(tmp_path: Path, **options: Any) -> ps.Loader:
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=240, batch=8)
    place = index(made, tmp_path / "index")
    return ps.Loader(made, lanes=4, threads=1, index="require", index_dir=place, **options)


@pytest.mark.usefixtures("always_prefetched")
@pytest.mark.parametrize("position", [0, 100])
def test_a_first_batch_costs_its_samples(tmp_path: Path, position: int) -> None:
    """A first batch of 8 from runs of 60 samples reads little more than the 8, also if it begins inside a run."""
    with opened(tmp_path) as loader:
        job = loader._session.planned().read_plan
        feed = job.feed_between(0, position, 480)  # type: ignore[attr-defined]
        sample_bytes = sum(path.stat().st_size for path in (tmp_path / "data").iterdir()) / 480
        samples = list(feed.take(8).samples)
        assert job.reading.meter.bytes < 30 * sample_bytes
        while (block := feed.take(8)) is not None:
            samples += block.samples
        feed.close()
    leaving = [job.order.locate(each) for each in range(position, 480)]
    assert [int(bytes(each.fields["cls"])) for each in samples] == [40 * at.shard + at.sample for at in leaving]


def test_short_runs_are_not_prefetched(tmp_path: Path) -> None:
    """If the runs have only a few kilobytes, nothing is read twice."""
    with opened(tmp_path) as loader:
        batches = list(loader)
        size_bytes = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
        assert sorted(numbers(batches)) == list(range(480))
        assert loader.statistics().bytes <= size_bytes


@pytest.mark.usefixtures("always_prefetched")
def test_a_mix_with_objects_is_prefetched(tmp_path: Path) -> None:
    """In a mix, samples of shards are read ahead of their runs; objects need no runs."""
    write_counted(tmp_path / "data", SIZES)
    (tmp_path / "objects").mkdir()
    for number in range(480):
        (tmp_path / "objects" / f"{number:05d}.cls").write_text(str(1000 + number))
    shards = pipeline(tmp_path / "data", window=240).source
    ps_mix = ps.mix({ps.shards(shards.urls[0]): 0.5, ps.objects(f"{tmp_path}/objects/"): 0.5})
    made = ps_mix.shuffle(window=480, seed=0).decode(ps.Integer("cls")).batch(8)
    with ps.Loader(
        made, lanes=4, threads=1, index_dir=index(pipeline(tmp_path / "data"), tmp_path / "index")
    ) as loader:
        assert sorted(numbers(loader)) == [*range(480), *range(1000, 1480)]


@pytest.mark.usefixtures("always_prefetched")
def test_a_prefetched_sample_is_held_against_its_checksum(tmp_path: Path) -> None:
    """Bytes that changed without a new version raise an error and give no batch."""
    with opened(tmp_path) as loader:
        for path in (tmp_path / "data").iterdir():
            before = path.stat()
            with path.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(512, len(data), 1024):
                    data[at] ^= 1
                file.seek(0)
                file.write(data)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(ChecksumError, match="CRC32C"):
            next(iter(loader))
