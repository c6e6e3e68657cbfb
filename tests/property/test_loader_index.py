"""The loader with an index, against a naive reference: order, resume at any world size, mixes, over random configurations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.loader.plan import indexed
from penstock.order import IndexedOrder
from penstock.pipeline import mix
from resuming import assert_resumes_everywhere, valid_rows

slow = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes = st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any)
windows = st.one_of(st.none(), st.integers(1, 40))


@contextmanager
def leading(always: bool) -> Iterator[None]:
    """Whether runs of any length are led by single samples, or none of a test's are."""
    before, indexed.RUNS_BYTES_MIN = indexed.RUNS_BYTES_MIN, 0 if always else indexed.RUNS_BYTES_MIN
    try:
        yield
    finally:
        indexed.RUNS_BYTES_MIN = before


def reference(lengths: list[int], **order: Any) -> list[int]:
    """The numbers of an epoch: one position after the other, as order/indexed.py says it."""
    firsts = np.cumsum([0, *lengths])
    made = IndexedOrder(samples=lengths, **order)
    places = [made.locate(position) for position in range(made.samples_count)]
    return [int(firsts[place.shard]) + place.sample for place in places]


@slow
@given(
    lengths=sizes,
    window=windows,
    seed=st.integers(0, 3),
    lanes=st.sampled_from([None, 1, 2, 6]),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    led=st.booleans(),
)
def test_the_sequence_is_the_orders(
    lengths: list[int], window: int | None, seed: int, lanes: int | None, batch: int, drop_last: bool, led: bool
) -> None:
    """Block by block, by range, the loader gives the order that one position at a time has; len() says how many."""
    with tempfile.TemporaryDirectory() as name, leading(led):
        folder = Path(name) / "data"
        total = write_counted(folder, lengths)
        made = pipeline(folder, window=window, seed=seed, batch=batch, drop_last=drop_last)
        with ps.Loader(
            made, lanes=lanes, threads=2, index="require", index_dir=index(made, Path(name) / "index")
        ) as loader:
            for epoch in range(2):
                expected = reference(
                    lengths, window=window or 1, shuffled=window is not None, seed=seed, epoch=epoch, lanes=lanes
                )
                batches = list(loader)
                assert numbers(batches) == expected[: total // batch * batch if drop_last else None]
                assert len(batches) == len(loader)
                positions = np.concatenate([each["__position__"] for each in batches]) if batches else np.arange(0)
                assert positions.tolist() == list(range(len(positions)))


@slow
@given(
    lengths=sizes,
    window=windows,
    lanes=st.sampled_from([4, 12]),
    rows=st.integers(1, 4),
    drop_last=st.booleans(),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    stopped=st.integers(0, 6),
)
def test_the_world_may_change_at_any_batch(
    lengths: list[int],
    window: int | None,
    lanes: int,
    rows: int,
    drop_last: bool,
    before: int,
    after: int,
    stopped: int,
) -> None:
    """Stopped behind any batch, resumed by more or fewer ranks: every sample once, each global batch the same set."""
    size = 4 * rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        total = write_counted(folder, lengths)
        made = ps.shards(f"{folder}/")
        made = made if window is None else made.shuffle(window=window)
        made = made.decode(ps.Integer("cls")).batch(global_size=size, drop_last=drop_last)
        place = index(made, Path(name) / "index")
        if total < 4:
            return  # fewer samples than ranks: nothing to pad with, refused

        def ranks(world_size: int, states: list[Any] | None, count: int | None) -> tuple[list[Any], list[Any]]:
            batches, saved = [], []
            for rank in range(world_size):
                job = {"rank": rank, "world_size": world_size, "index_dir": place}
                with ps.Loader(made, lanes=lanes, threads=1, **job) as loader:
                    if states is not None:
                        loader.load_state_dict(states[rank % len(states)])
                    found = []
                    if count != 0:
                        for batch in loader:
                            found.append(batch)
                            if len(found) == count:
                                break
                    batches.append(found)
                    saved.append(loader.state_dict())
            return batches, saved

        first, states = ranks(before, None, stopped)
        rest, _ = ([], []) if states[0]["epoch"] else ranks(after, states, None)
        expected = reference(lengths, window=window or 1, shuffled=window is not None, lanes=lanes)
        expected = expected[: total // size * size if drop_last else None]
        groups = [*zip(*first, strict=True), *zip(*rest, strict=True)]
        for k, group in enumerate(groups):
            found = sorted(number for batch in group for number in valid_rows([batch], "cls"))
            assert found == sorted(expected[k * size : (k + 1) * size])
        assert len(groups) == -(-len(expected) // size)


@slow
@given(
    lengths=sizes, window=windows, batch=st.integers(1, 9), take=st.sampled_from([None, 1, 11, 500]), led=st.booleans()
)
def test_it_resumes_behind_every_batch(
    lengths: list[int], window: int | None, batch: int, take: int | None, led: bool
) -> None:
    """From the state behind any batch, a new loader gives exactly the batches that were to come."""
    with tempfile.TemporaryDirectory() as name, leading(led):
        folder = Path(name) / "data"
        write_counted(folder, lengths)
        made = ps.shards(f"{folder}/")
        made = made if window is None else made.shuffle(window=window)
        made = made if take is None else made.take(take)
        made = made.decode(ps.Integer("cls")).batch(batch)
        place = index(made, Path(name) / "index")
        assert_resumes_everywhere(lambda: ps.Loader(made, lanes=3, threads=1, index_dir=place), every=3)


@slow
@given(
    parts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), min_size=2, max_size=3),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    window=windows,
    stop=st.sampled_from(["all", "repeat"]),
    batch=st.integers(1, 9),
    led=st.booleans(),
)
def test_a_mix_is_the_orders(
    parts: list[list[int]], weights: list[int], window: int | None, stop: Any, batch: int, led: bool
) -> None:
    """A mix gives each position the sample that order/mix.py names, over ends and passes, and resumes behind every batch."""
    with tempfile.TemporaryDirectory() as name, leading(led):
        sources = {}
        for number, lengths in enumerate(parts):
            write_counted(Path(name) / f"data{number}", lengths)
            sources[ps.shards(f"{name}/data{number}/")] = weights[number]
        made = mix(sources, stop=stop)
        made = made if window is None else made.shuffle(window=window)
        made = made.decode(ps.Integer("cls")).batch(batch)
        place = index(made, Path(name) / "index")

        def make() -> ps.Loader:
            return ps.Loader(made, lanes=3, threads=1, index_dir=place)

        with make() as loader:
            batches = list(loader)
            order = loader._planned().job.order
        found = [
            (shard.rpartition("/data")[2].partition("/")[0], number)
            for each in batches
            for shard, number in zip(each["__shard__"], each["cls"].tolist(), strict=True)
        ]
        expected = []
        for position in range(order.samples_count):
            place_of = order.locate(position)
            lengths = parts[place_of.source]
            expected.append((str(place_of.source), sum(lengths[: place_of.shard]) + place_of.sample))
        assert found == expected
        if stop == "all":
            assert len(found) == sum(map(sum, parts)) == len(set(found))
        assert_resumes_everywhere(make, every=4)
