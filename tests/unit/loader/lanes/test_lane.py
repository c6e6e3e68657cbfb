from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from loading import shard, write_counted
from penstock.config import MIB, FetchConfig
from penstock.formats import Sample
from penstock.formats.columnar import as_columns
from penstock.formats.sample import ITEM_BYTES, typed
from penstock.loader.lanes.lane import Lane, PinnedBytes, copied
from penstock.loader.lanes.lane_reader import LaneReader
from penstock.loader.lanes.segments import ReadOptions, ShardSegment, lane_read_ahead_sizes
from penstock.loader.statistics import Meter
from penstock.order import StreamOrder
from penstock.sources.shards import ShardFinder


def lane(
    folder: Path,
    *,
    window: int | None,
    pins: PinnedBytes,
    part_bytes: int = 65_536,
    order_type: type[StreamOrder] = StreamOrder,
) -> Lane:
    shards = ShardFinder(ps.shards(f"{folder}/").source, fetch=None).find()
    order = order_type(shards_count=len(shards), window=window or 1, lanes=1, shuffled=window is not None)
    sizes = lane_read_ahead_sizes(1, FetchConfig())._replace(part_bytes=part_bytes)
    reading = ReadOptions(
        sizes=sizes, pinned_bytes_max=0, on_corrupt=("raise",), fields=(None,), copies=False, meter=Meter()
    )
    segments = [ShardSegment(shards[shard], index) for index, shard in enumerate(order.shards_of(0))]
    return Lane(0, order=order, reader=LaneReader(segments, reading=reading), pins=pins)


def drained(given: Lane, *, step: int = 1) -> list[str]:
    keys = []
    while count := min(step, given.prepare(step)):
        keys += [sample.key for sample in given.take(count)[0]]
    return keys


@pytest.mark.parametrize("step", [1, 3, 100])
def test_runs_cross_shards_and_stay_inside_their_window(tmp_path: Path, step: int) -> None:
    """Each run of 5 holds the next 5 samples of the lane, whatever shard they lie in, in another order."""
    total = write_counted(tmp_path, (3, 9, 1, 4))
    given = lane(tmp_path, window=5, pins=PinnedBytes(1 << 30))
    straight = drained(lane(tmp_path, window=1, pins=PinnedBytes(1 << 30)))
    keys = drained(given, step=step)
    assert given.taken_count == total
    assert keys != straight
    for start in range(0, total, 5):
        assert sorted(keys[start : start + 5]) == sorted(straight[start : start + 5])


class _Ending(StreamOrder):
    """One run of three samples, and none behind it, as an index says."""

    def run_length(self, lane: int, run_index: int) -> int:
        return 0 if run_index else 3


def test_a_lane_ends_with_its_last_run(tmp_path: Path) -> None:
    """More is asked of a lane than its runs hold, where others were closed under way: it has ended, and nobody spins."""
    write_counted(tmp_path, (9,))
    given = lane(tmp_path, window=3, pins=PinnedBytes(1 << 30), order_type=_Ending)
    assert given.prepare(4) == 3
    given.take(3)
    assert given.prepare(1) == 0


def test_unshuffled_samples_pass_through(tmp_path: Path) -> None:
    """Without runs samples leave as they are stored, however many are taken at a time."""
    write_counted(tmp_path, (3, 9, 1, 4))
    for step in (1, 4, 100):
        assert drained(lane(tmp_path, window=None, pins=PinnedBytes(0)), step=step) == [f"s{n:05d}" for n in range(17)]


def test_a_lane_holds_one_run(tmp_path: Path) -> None:
    """One sample is read for each one handed out: never more than a run waits."""
    write_counted(tmp_path, (40,))
    given = lane(tmp_path, window=8, pins=PinnedBytes(1 << 30))
    while given.prepare(1):
        given.take(1)
        assert len(given._ready) - given._ready_at + len(given._filling) <= 8


@pytest.mark.parametrize("bytes_max", [0, 1000, 1 << 30])
def test_pins_are_bounded_and_given_back(tmp_path: Path, bytes_max: int) -> None:
    """Waiting samples hold parts up to the bound; beyond it they are copies with the same bytes."""
    tmp_path.joinpath("a.tar").write_bytes(
        shard({"__key__": f"{index:03d}", "bin": bytes([index]) * 300} for index in range(60))
    )
    pins = PinnedBytes(bytes_max)
    given = lane(tmp_path, window=20, pins=pins)
    seen = []
    while given.prepare(1):
        [sample], _ = given.take(1)
        assert 0 <= pins.held_bytes <= bytes_max
        assert sample.fields["bin"] == bytes([int(sample.key)]) * 300
        seen.append(sample.key)
    assert len(set(seen)) == 60


@pytest.mark.parametrize("form", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (0, 4), (2, 1, 3)])
def test_a_copy_has_type_and_shape(form: str, shape: tuple[int, ...]) -> None:
    """A sample that is copied out of its part has values of the same types, shapes and contents, whatever they are."""
    array = np.arange(math.prod(shape)).astype(form).reshape(shape)
    value = typed(memoryview(array.tobytes()), form, shape)
    for copy in (copied(Sample("key", {"x": value}, 0)), (as_columns([Sample("key", {"x": value}, 0)]) or [None])[0]):
        if copy is not None:
            found = copy.fields["x"]
            assert (found.format, found.shape) == (value.format, value.shape)
            np.testing.assert_array_equal(np.asarray(found), array)


@pytest.mark.parametrize("lanes", [1, 2, 8, 64, 1000])
@pytest.mark.parametrize("budget_bytes", [64 * MIB, 2048 * MIB])
def test_read_ahead_fits_the_budget(lanes: int, budget_bytes: int) -> None:
    """All lanes' parts fit into a quarter of the budget, down to the smallest part worth a request; tar blocks are not cut."""
    sizes = lane_read_ahead_sizes(lanes, FetchConfig(budget_bytes_max=budget_bytes))
    assert 256 * 1024 <= sizes.part_bytes <= 8 * MIB
    assert not sizes.part_bytes % 512
    assert sizes.requests_max >= 2
    if sizes.part_bytes > 256 * 1024:
        assert lanes * sizes.part_bytes * sizes.requests_max * 3 <= budget_bytes // 4
