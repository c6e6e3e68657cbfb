"""Several ranks take equally many batches, whatever is left out of them: a job that waits for all its ranks never hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import formatted, index_beside, number_of, write_counted, write_formatted
from resuming import in_step, valid_rows

SIZES = (12, 15, 9, 20)
WAYS: dict[str, dict[str, Any]] = {
    "index": {"index": "require"},
    "stream": {"index": "stream"},
    "in any order": {"index": "require", "in_order": False},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    index_beside(tmp_path / "data")
    return tmp_path / "data"


def failing(sample: dict[str, Any]) -> bool:
    if sample["cls"] % 7:
        raise ValueError("not the seventh")
    return True


def ranks_of(made: Any, way: str, world_size: int = 2) -> list[list[dict[str, Any]]]:
    return in_step(lambda **job: ps.Loader(made, lanes=4, threads=1, **WAYS[way], **job), world_size)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", ["a seventh", "a seventh, by max_errors", "one"])
def test_what_is_dropped_changes_no_number_of_batches(data: Path, way: str, kept: str, drop_last: bool) -> None:
    """Ranks have equally many batches of all their rows, each sample that is kept counts once, and nothing else does."""
    made = ps.shards(f"{data}/").shuffle(window=64).decode(ps.Integer("cls"))
    if kept == "a seventh, by max_errors":
        made = made.filter(failing, max_errors=100)
    else:
        made = made.filter(lambda sample: sample["cls"] % 7 == 0 if kept == "a seventh" else sample["cls"] == 30)
    ranks = ranks_of(made.batch(2, drop_last=drop_last), way)
    assert len(ranks[0]) == len(ranks[1]) > 0
    assert all(len(batch["cls"]) == len(batch["__valid__"]) == 2 for batches in ranks for batch in batches)
    found = sorted(number for batches in ranks for number in valid_rows(batches, "cls"))
    expected = [30] if kept == "one" else [number for number in range(sum(SIZES)) if number % 7 == 0]
    assert found == expected or (drop_last and way == "stream" and set(found) < set(expected))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_of_which_nothing_is_left_is_empty_on_all_ranks(
    data: Path, way: str, world_size: int, drop_last: bool
) -> None:
    """A filter may drop every sample of an epoch: no rank has a batch, none waits for another, and the next epoch follows."""
    epochs = [0] * world_size

    def make(*, rank: int, **job: Any) -> ps.Loader:
        made = ps.shards(f"{data}/").decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] < epochs[rank])

        def chosen(epoch: int, statistics: Any) -> None:
            epochs[rank] = epoch

        made = made.batch(2, drop_last=drop_last)
        return ps.Loader(made, lanes=4, threads=1, rank=rank, on_epoch=chosen, **WAYS[way], **job)

    ranks = in_step(make, world_size, epochs=2)
    assert [number for batches in ranks for number in valid_rows(batches, "cls")] == [0]
    assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_only_pads_collates_all_its_batches(data: Path, way: str) -> None:
    """A rank of which no sample is kept hands out batches of the same kind as the others, from the first to the last."""
    made = ps.shards(f"{data}/").decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] == 0)
    ranks = ranks_of(made.batch(2, collate=lambda samples: {"collated": len(samples)}), way)
    assert {tuple(batch) for batches in ranks for batch in batches} == {("collated",)}


@pytest.mark.parametrize("is_decoded", [True, False])
@pytest.mark.parametrize("policy", ["skip_sample", "skip_shard"])
def test_corrupt_samples_change_no_number_of_batches(tmp_path: Path, policy: Any, is_decoded: bool) -> None:
    """A damaged shard is masked on the rank that reads it; the other rank goes on in step."""
    write_formatted(tmp_path / "data", "jsonl", SIZES)
    index_beside(tmp_path / "data")
    path = tmp_path / "data" / "s-001.jsonl"
    samples = [{"__key__": "", "n": b"%d" % number} for number in range(12, 27)]
    damaged = bytearray(formatted("jsonl", samples))
    for number in range(14, 22):
        damaged[damaged.index(b'{"n":%d' % number)] = ord("[")
    before = path.stat()
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    made = ps.shards(f"{tmp_path}/data/", on_corrupt=policy)
    made = made.map(number_of).batch(2, drop_last=True) if is_decoded else made.batch(2, drop_last=True)
    ranks = ranks_of(made, "index")
    assert len(ranks[0]) == len(ranks[1]) == sum(SIZES) // 4
    valid = [row for batches in ranks for batch in batches for row in batch["__valid__"].tolist()]
    assert len(valid) == sum(SIZES)
    assert 0 < valid.count(False) == (8 if policy == "skip_sample" else valid.count(False)) <= SIZES[1]


def test_samples_that_only_pad_are_not_counted_again(data: Path) -> None:
    """A rank that looks for a sample to pad with goes through the stages again: max_errors and statistics stay as they are."""
    made = ps.shards(f"{data}/").decode(ps.Integer("cls"))

    def late(sample: dict[str, Any]) -> bool:
        if sample["cls"] < 40:
            raise ValueError("early")
        return True

    bounded = made.filter(late, max_errors=28).batch(2, drop_last=True)
    for rank, kept in enumerate((0, 16)):
        with ps.Loader(bounded, lanes=2, rank=rank, world_size=2, threads=1) as loader:
            assert len(list(loader)) == len(loader)
            assert loader.statistics().dropped == {"filter[0]": 28 - kept}
            assert loader.statistics().samples == kept
