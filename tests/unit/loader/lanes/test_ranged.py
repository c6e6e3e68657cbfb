"""Shards with a table of contents are read by range: what is asked for, and what is held."""

from __future__ import annotations

import gc
import io
import random
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from counting import Counted, counted_stores
from loading import formatted, index
from penstock.errors import ClosedError, ConfigError, CorruptShardError, ObjectChangedError
from penstock.fetch import process_budget
from penstock.loader.lanes.ranged import RangedShard
from penstock.loader.lanes.segments import ReadAheadSizes, ReadOptions, ShardSegment
from penstock.loader.statistics import LoaderStatistics, Meter
from penstock.sources.shards import Shard

KIB = 1024
ROWS = 60
NOISE = random.Random(0)
SAMPLES = [
    {"__key__": f"{number:04d}", "n": b"%d" % number, "big": NOISE.randbytes(20 * KIB), "end": b"e%d" % number}
    for number in range(ROWS)
]
FETCH = ps.FetchConfig(gap_bytes_max=8 * KIB)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What is asked of all stores."""
    return counted_stores(monkeypatch)


def write(folder: Path, name: str, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"s.{name}"
    path.write_bytes(formatted(name, SAMPLES, **options))
    return folder


def read(made: ps.Pipeline, **options: Any) -> tuple[list[Any], LoaderStatistics]:
    options = {"fetch": FETCH, "threads": 1, **options}
    with ps.Loader(made.batch(7), **options) as loader:
        found = [sample for batch in loader for sample in zip(batch["__key__"], batch["n"], strict=True)]
        return found, loader.statistics()


WANT = [(f"{number:04d}", str(number).encode()) for number in range(ROWS)]


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_only_wanted_fields_are_fetched(tmp_path: Path, counted: Counted, name: str) -> None:
    """Of 1.2 MB in a field that nobody wants not a byte is asked for; the statistics say so, the samples are the same."""
    made = ps.shards(f"{write(tmp_path, name, rows_per_group=10)}/")
    every, done = read(made)
    assert every == WANT
    assert done.saved_bytes == 0
    counted.clear()
    found, done = read(made.select(["n", "end"]))
    assert found == WANT
    assert counted.bytes == done.bytes < 200 * KIB
    assert done.saved_bytes >= 1100 * KIB
    assert len(counted.spans) <= 2 + 2 * ROWS
    counted.clear()
    assert read(made.decode(ps.Bytes("n")))[1].saved_bytes >= done.saved_bytes
    assert read(made.map(lambda sample: {"n": sample["n"]}))[1].saved_bytes == 0


def test_all_columns_of_neighbouring_row_groups_are_one_request(tmp_path: Path, counted: Counted) -> None:
    """Spans that touch are read as one, up to the size of a part: two requests, and no more for smaller row groups."""
    read(ps.shards(f"{write(tmp_path, 'parquet', rows_per_group=1)}/"))
    assert len(counted.spans) == 2


@pytest.mark.parametrize("how", ["stream", "require"])
@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_entering_inside_reads_no_unit_before(tmp_path: Path, counted: Counted, name: str, how: Any) -> None:
    """A state at sample 45 costs the table of contents, and the shard from that sample's row group, or part, on."""
    made = ps.shards(f"{write(tmp_path / 'data', name, rows_per_group=10)}/").batch(5)
    options = {"threads": 1, "lanes": 1, "index": how, "index_dir": index(made, tmp_path / "index")}
    fetch = ps.FetchConfig(gap_bytes_max=8 * KIB, part_bytes=256 * KIB)
    with ps.Loader(made, fetch=fetch, **options) as loader:
        keys = [next(iter(loader))["__key__"] for _ in range(9)]
        state = loader.state_dict()
    assert keys[-1][-1] == "0044"
    counted.clear()
    with ps.Loader(made, fetch=fetch, **options) as loader:
        loader.load_state_dict(state)
        assert [key for batch in loader for key in batch["__key__"]] == [key for key, _ in WANT[45:]]
    size = (tmp_path / "data" / f"s.{name}").stat().st_size
    first = 40 if name == "parquet" else 45 if how == "require" else 45 - 256 // 20
    assert min(counted.spans).start >= 0.98 * size * first / ROWS
    assert counted.bytes <= 1.02 * size * (ROWS - first) / ROWS + 65 * KIB


def test_several_shards_are_looked_into_together(tmp_path: Path, counted: Counted) -> None:
    """All lanes ask for their first tables of contents before one is waited for; sizes that nobody listed too."""
    for number in range(6):
        write(tmp_path, "zip").joinpath("s.zip").rename(tmp_path / f"s{number}.zip")
    made = ps.shards([str(tmp_path / f"s{number}.zip") for number in range(6)]).shuffle(window=12)
    counted.hold(6)
    with ps.Loader(made.batch(4), lanes=6, threads=1, fetch=FETCH) as loader:
        assert sorted(key for batch in loader for key in batch["__key__"]) == sorted([key for key, _ in WANT] * 6)
    assert len(counted.heads) == 6


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_lanes_of_one_shard_share_its_table_of_contents(tmp_path: Path, counted: Counted, name: str) -> None:
    """However many lanes read a shard, it is looked into once, and no more than once in a later epoch."""
    made = ps.shards(f"{write(tmp_path / 'data', name, rows_per_group=2)}/").shuffle(window=16)
    place = index(made, tmp_path / "index")
    size = (tmp_path / "data" / f"s.{name}").stat().st_size
    counted.clear()
    with ps.Loader(made.batch(6), lanes=12, threads=1, index="require", index_dir=place, fetch=FETCH) as loader:
        for epoch in range(1, 3):
            keys = [key for batch in loader for key in batch["__key__"]]
            assert sorted(keys) == [key for key, _ in WANT]
            assert 1 <= sum(span.end == size for span in counted.spans) <= epoch


@pytest.mark.parametrize("how", ["stream", "require"])
@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_the_lanes_of_another_run_have_a_table_of_their_own(tmp_path: Path, name: str, how: Any) -> None:
    """A run that looks for a sample to pad with goes on when the run of the batches is closed, and the other way round."""
    made = ps.shards(f"{write(tmp_path / 'data', name)}/").batch(6)
    options: dict[str, Any] = {"index": how, "index_dir": index(made, tmp_path / "index"), "fetch": FETCH}
    with ps.Loader(made, **options) as loader:
        plan = loader._session.planned()
        feeds = [
            read_plan.begin(0, None, batching=plan.batching)[0]
            for read_plan in (plan.read_plan, plan.read_plan.for_rank(0, 1))
        ]
        feeds[0].close()
        block = feeds[1].take(6)
        assert block is not None
        assert [sample.key for sample in block.samples] == [key for key, _ in WANT[:6]]
        feeds[1].close()


def test_a_shard_larger_than_the_budget(tmp_path: Path) -> None:
    """Row groups of a shard many times the budget go through it; a row group above half of it is refused, with numbers."""
    path = tmp_path / "s.parquet"
    rows = [{"__key__": f"{n:04d}", "n": b"%d" % n, "big": bytes([n % 256]) * 256 * KIB} for n in range(256)]
    path.write_bytes(formatted("parquet", rows, rows_per_group=8))
    made = ps.shards(str(path))
    budget = process_budget()
    with ps.Loader(made.batch(4), threads=1, fetch=ps.FetchConfig(budget_bytes_max=16 << 20)) as loader:
        highest, keys = 0, []
        for batch in loader:
            keys += batch["__key__"]
            highest = max(highest, budget.statistics().used_bytes)
    assert keys == [row["__key__"] for row in rows]
    assert highest <= 16 << 20
    ps.set_process_budget(3 << 20)
    with ps.Loader(made.batch(4), threads=1, fetch=ps.FetchConfig(budget_bytes_max=3 << 20)) as loader:
        with pytest.raises(ConfigError, match=r"a unit of 2\d{6} bytes.*budget of 3145728"):
            list(loader)


def test_row_groups_of_all_lanes_must_fit_the_budget(tmp_path: Path) -> None:
    """Each lane holds the row group that it reads: 8 of 5 MB are no plan for 32 MiB, and an error with the numbers."""
    rows = [{"__key__": f"{n:04d}", "n": b"%d" % n, "big": bytes(256 * KIB)} for n in range(160)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "s.parquet").write_bytes(formatted("parquet", rows, rows_per_group=20))
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=16)
    options = {"index": "require", "index_dir": index(made, tmp_path / "index"), "threads": 1}
    fetch = ps.FetchConfig(budget_bytes_max=32 << 20)
    with ps.Loader(made.batch(4), lanes=8, fetch=fetch, **options) as loader:
        with pytest.raises(
            ConfigError, match=r"units .* of 5\d{6} bytes on average.* 8 lanes, are 4\d{7} bytes.*33554432"
        ):
            list(loader)
    for chosen, lanes in ((made, 4), (made.select(["n"]), 8)):
        with ps.Loader(chosen.batch(4), lanes=lanes, fetch=fetch, **options) as loader:
            assert sum(len(batch["n"]) for batch in loader) == 160


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_a_shard_without_a_name_is_found_by_its_first_bytes(tmp_path: Path, counted: Counted, name: str) -> None:
    """Where only the content tells, reading goes on by range once it has told."""
    path = write(tmp_path, name) / f"s.{name}"
    path.rename(tmp_path / "data")
    found, _ = read(
        ps.shards([str(tmp_path / "data")]).select(["n"]),
        fetch=ps.FetchConfig(gap_bytes_max=8 * KIB, part_bytes=64 * KIB),
    )
    assert found == WANT


@pytest.mark.parametrize("policy", ["raise", "skip_sample", "skip_shard"])
@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_a_damaged_unit(tmp_path: Path, name: str, policy: Any) -> None:
    """It is raised with shard and offset, or left out alone, or with the rest; counted; and a state stays exact."""
    path = write(tmp_path, name, rows_per_group=10) / f"s.{name}"
    data = bytearray(path.read_bytes())
    at = data.index(SAMPLES[12]["big"])
    if name == "parquet":  # a page's header: the values have no checksum
        at = data.index(SAMPLES[10]["big"])
        data[at - 60 : at] = b"\xff" * 60
    else:
        data[at] ^= 0xFF
    path.write_bytes(data)
    made = ps.shards(f"{tmp_path}/", on_corrupt=policy)
    if policy == "raise":
        with pytest.raises(CorruptShardError, match=rf"s\.{name}.*offset_bytes \d+"):
            read(made)
        return
    found, done = read(made)
    lost = sorted(set(WANT) - set(found))
    bad = range(10, 20) if name == "parquet" else range(12, 13)
    assert lost == (WANT[bad.start : bad.stop] if policy == "skip_sample" else WANT[bad.start :])
    assert done.skipped_samples >= len(bad)
    assert done.skipped_bytes > 0
    taken = 4 if policy == "skip_sample" else 1
    with ps.Loader(made.batch(7), threads=1, fetch=FETCH) as loader:
        keys = [key for _ in range(taken) for key in next(iter(loader))["__key__"]]
        state = loader.state_dict()
    with ps.Loader(made.batch(7), threads=1, fetch=FETCH) as loader:
        loader.load_state_dict(state)
        keys += [key for batch in loader for key in batch["__key__"]]
    assert keys == [key for key, _ in found]


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_a_shard_that_changes_under_way(tmp_path: Path, counted: Counted, name: str) -> None:
    """Its table of contents is of another version than its bytes: an error that names it, never a mix."""
    path = write(tmp_path, name, rows_per_group=5) / f"s.{name}"
    made = ps.shards([str(path)]).batch(2)

    def replace() -> None:
        path.write_bytes(path.read_bytes()[: 400 * KIB])

    counted.after_gets(2, replace)
    with ps.Loader(made, threads=1, fetch=ps.FetchConfig(gap_bytes_max=0, part_bytes=64 * KIB)) as loader:
        with pytest.raises(ObjectChangedError, match=rf"s\.{name}"):
            list(loader)


@pytest.mark.parametrize("name", ["parquet", "zip", "mds"])
@pytest.mark.parametrize("damage", ["garbage", "truncated", "shrunk"])
def test_garbage_and_cuts(tmp_path: Path, name: str, damage: str) -> None:
    """Shards that are not what their names or their index say are errors that name them."""
    path = write(tmp_path / "data", name) / f"s.{name}"
    made = ps.shards(f"{tmp_path}/data/", format=name)
    options: dict[str, Any] = {}
    data = path.read_bytes()
    if damage == "shrunk":
        options = {"index": "require", "index_dir": index(made, tmp_path / "index")}
        with ps.Loader(made.batch(2), threads=1, fetch=FETCH, **options) as loader:
            loader._session.planned()
            path.write_bytes(data[: len(data) // 2])
            with pytest.raises(ObjectChangedError, match=rf"s\.{name}"):
                list(loader)
        return
    path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"\xa5" * len(data))
    with pytest.raises(CorruptShardError, match=rf"s\.{name}"):
        read(made)


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_what_comes_before_an_error_comes(tmp_path: Path, name: str) -> None:
    """Looking ahead into a shard that is garbage takes nothing from the shards before it."""
    write(tmp_path, name)
    (tmp_path / f"t.{name}").write_bytes(b"\xa5" * 600 * KIB)
    found: list[Any] = []
    with ps.Loader(ps.shards(f"{tmp_path}/").batch(6), threads=1, fetch=FETCH) as loader:
        with pytest.raises(CorruptShardError, match=rf"t\.{name}"):
            found.extend(pair for batch in loader for pair in zip(batch["__key__"], batch["n"], strict=True))
    assert found == WANT


def test_a_zip_of_several_batches_is_held_in_parts(tmp_path: Path) -> None:
    """A member longer than a part arrives in several, and is one value."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for number in range(4):
            target.writestr(f"{number}.bin", bytes([number]) * (700 * KIB + number))
    (tmp_path / "s.zip").write_bytes(out.getvalue())
    fetch = ps.FetchConfig(part_bytes=64 * KIB, budget_bytes_max=64 << 20)
    with ps.Loader(ps.shards(f"{tmp_path}/").batch(1), threads=1, fetch=fetch) as loader:
        assert [value for batch in loader for value in batch["bin"]] == [
            bytes([number]) * (700 * KIB + number) for number in range(4)
        ]


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_left_half_way_nothing_is_held(tmp_path: Path, name: str) -> None:
    """An epoch that is abandoned gives back every byte of the budget, and is gone on with, or begun anew."""
    for number in range(5):
        write(tmp_path, name, rows_per_group=3).joinpath(f"s.{name}").rename(tmp_path / f"s{number}.{name}")
    made = ps.shards(f"{tmp_path}/").shuffle(window=16).batch(4)
    fetch = ps.FetchConfig(gap_bytes_max=0, part_bytes=64 * KIB)

    def held_bytes() -> int:
        gc.collect()
        done = process_budget().statistics()
        return done.used_bytes - done.free_bytes

    before = held_bytes()
    with ps.Loader(made, lanes=2, threads=1, fetch=fetch) as loader:
        first = next(iter(loader))["__key__"]
        rest = [key for batch in loader for key in batch["__key__"]]
        loader.restart(0)
        assert next(iter(loader))["__key__"] == first
    assert sorted(first + rest) == sorted([key for key, _ in WANT] * 5)
    del loader
    assert held_bytes() == before


@pytest.mark.parametrize("name", ["parquet", "zip"])
def test_reading_that_is_given_up_ends(tmp_path: Path, name: str) -> None:
    """Closed by another thread in the midst of a shard, or before its first byte: an error, and no endless nothing."""
    write(tmp_path, name, rows_per_group=1)
    reading = ReadOptions(
        sizes=ReadAheadSizes(64 * KIB, 1),
        pinned_bytes_max=1 << 20,
        on_corrupt=["raise"],
        fields=[None],
        copies=False,
        meter=Meter(),
    )
    with ps.connect(str(tmp_path), fetch=ps.FetchConfig(gap_bytes_max=0)) as store:
        for is_begun in (False, True):
            shard = RangedShard(ShardSegment(Shard(store, f"s.{name}"), 0, format=name), reading=reading)
            if is_begun:
                shard.request()
            shard.close()
            with pytest.raises(ClosedError):
                [shard.read() for _ in range(2 * ROWS)]
