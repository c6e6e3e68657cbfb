"""The loader without an index, against a naive reference: order, resume and ranks over random configurations."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from loading import numbers, pipeline, write_counted
from penstock.order import RoundRobin, StreamOrder
from resuming import assert_resumes_everywhere, in_step, valid_rows

slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes = st.lists(st.integers(0, 12), min_size=1, max_size=7)
windows = st.one_of(st.none(), st.integers(1, 40))


def reference(lengths: list[int], *, window: int | None, seed: int, epoch: int, lanes: int | None) -> list[int]:
    """The numbers of an epoch, one sample at a time, as order/stream.py says it."""
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    order = StreamOrder(
        shards_count=len(lengths),
        seed=seed,
        epoch=epoch,
        lanes=lanes,
        window=window or 1,
        shuffled=window is not None,
    )
    leaving: dict[int, list[int]] = {}
    for lane in order.lanes_owned:
        stored = [firsts[shard] + index for shard in order.shards_of(lane) for index in range(lengths[shard])]
        out: list[int] = []
        run_index = 0
        while len(out) < len(stored):
            run = stored[len(out) : len(out) + order.run_length(lane, run_index)]
            out += [run[k] for k in order.permute_run(lane, run_index, len(run))]
            run_index += 1
        leaving[lane] = out[::-1]
    turns, result = RoundRobin(order.lanes_owned), []
    while (lane := turns.next_lane()) is not None:
        if leaving[lane]:
            result.append(leaving[lane].pop())
        else:
            turns.drop(lane)
    return result


@slow
@given(
    lengths=sizes,
    window=windows,
    seed=st.integers(0, 3),
    lanes=st.sampled_from([None, 1, 2, 5]),
    batch=st.integers(1, 9),
)
def test_the_sequence_is_the_orders(
    lengths: list[int], window: int | None, seed: int, lanes: int | None, batch: int
) -> None:
    """Block by block, the loader gives exactly the order that one sample at a time would, in every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        write_counted(Path(folder), lengths)
        made = pipeline(Path(folder), window=window, seed=seed, batch=batch)
        with ps.Loader(made, lanes=lanes, threads=2) as loader:
            for epoch in range(2):
                found = numbers(loader)
                assert found == reference(lengths, window=window, seed=seed, epoch=epoch, lanes=lanes)
                assert sorted(found) == list(range(sum(lengths)))


@slow
@given(
    lengths=sizes,
    window=windows,
    lanes=st.sampled_from([None, 1, 3]),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    decoded=st.booleans(),
)
def test_it_resumes_behind_every_batch(
    lengths: list[int], window: int | None, lanes: int | None, batch: int, drop_last: bool, decoded: bool
) -> None:
    """From the state behind any batch, a new loader gives exactly the batches that were to come: nothing lost, none twice."""
    with tempfile.TemporaryDirectory() as folder:
        write_counted(Path(folder), lengths)

        def make() -> ps.Loader:
            made: Any = pipeline(Path(folder), window=window, batch=batch, drop_last=drop_last)
            if not decoded:
                made = ps.shards(f"{folder}/")
                made = (made if window is None else made.shuffle(window=window)).batch(batch, drop_last=drop_last)
            return ps.Loader(made, lanes=lanes, threads=1)

        assert_resumes_everywhere(make, every=3)


@slow
@given(
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=7),
    window=st.integers(1, 40),
    batch=st.integers(1, 5),
    drop_last=st.booleans(),
    world_size=st.sampled_from([2, 3]),
)
def test_ranks_end_together(lengths: list[int], window: int, batch: int, drop_last: bool, world_size: int) -> None:
    """Ranks get equally many batches of equally many rows; without drop_last every sample counts exactly once."""
    with tempfile.TemporaryDirectory() as folder:
        total = write_counted(Path(folder), lengths)
        made = pipeline(Path(folder), window=window, batch=batch, drop_last=drop_last)
        ranks = in_step(lambda **job: ps.Loader(made, lanes=6, threads=1, **job), world_size, epochs=2)
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(each["cls"]) == batch for batches in ranks for each in batches)
    found = sorted(number for batches in ranks for number in valid_rows(batches, "cls"))
    if drop_last:
        assert all(count <= 2 for count in map(found.count, range(total)))
        assert all("__valid__" not in each for batches in ranks for each in batches)
    else:
        assert found == sorted([*range(total)] * 2)


def test_the_reference_is_not_the_identity() -> None:
    """What the loader is compared with does shuffle."""
    assert reference([9, 9], window=6, seed=0, epoch=0, lanes=2) != list(range(18))


@pytest.mark.parametrize("window", [None, 30])
def test_a_rank_resumed_behind_its_last_sample_stays_in_step(tmp_path: Path, window: int | None) -> None:
    """A rank that has run dry and is resumed there pads with a sample of its own until the others are through."""
    write_counted(tmp_path, (2, 30))
    made = pipeline(tmp_path, window=window, batch=4)
    states: dict[int, list[Any]] = {0: [], 1: []}

    def make(*, rank: int, **job: Any) -> ps.Loader:
        class Saving(ps.Loader):
            def _next(self, turn: int) -> dict[str, Any] | None:
                batch = super()._next(turn)
                states[rank].append(self.state_dict())
                return batch

        return Saving(made, lanes=2, threads=1, rank=rank, **job)

    whole = in_step(make, 2)
    at = 5
    kept = {rank: list(saved) for rank, saved in states.items()}

    def resumed(*, rank: int, **job: Any) -> ps.Loader:
        loader = ps.Loader(made, lanes=2, threads=1, rank=rank, **job)
        loader.load_state_dict(kept[rank][at - 1])
        return loader

    rest = in_step(resumed, 2)
    for before, after in zip(whole, rest, strict=True):
        assert list(valid_rows(before[at:], "cls")) == list(valid_rows(after, "cls"))
        assert len(before) - at == len(after)
