from __future__ import annotations

import io
from pathlib import Path

import pytest

import penstock as ps
from loading import formatted, index, shard, write_counted, write_formatted
from penstock.config import MIB
from penstock.errors import ConfigError, ObjectMissingError
from penstock.loader.explain import explain
from penstock.loader.plan.costs import MemoryPlan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_counted(tmp_path / "data", (10, 20, 30))
    return tmp_path / "data"


def test_explain_says_what_it_found(folder: Path) -> None:
    """Shards, sizes, lanes, batches and requests are those of the data and of the options."""
    out = io.StringIO()
    pipeline = ps.shards(f"{folder}/").shuffle(window=32).decode(ps.Integer("cls")).batch(global_size=8)
    plan = explain(pipeline, rank=1, world_size=2, lanes=8, agree=lambda n: n, file=out)
    (source,) = plan.sources
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert (source.shards_count, source.size_bytes, source.largest_bytes) == (3, sum(sizes), max(sizes))
    assert (source.formats, source.indexed_count, source.samples_count) == (("tar",), 0, None)
    assert 5 <= source.sample_bytes <= 100
    assert (plan.rank, plan.world_size, plan.window, plan.batch_size, plan.row_bytes) == (1, 2, 32, 4, 8)
    assert plan.listing_requests == 1
    assert (plan.epoch_requests, plan.epoch_requests_min) == (1, 1)
    assert plan.lanes_count == 3
    assert plan.memory.total_bytes <= plan.memory.budget_bytes
    text = out.getvalue()
    assert text == f"{plan}\n"
    assert repr(pipeline) in text
    for words in (
        "3 shards",
        "any sample can be read by itself",
        "rank 1 of 2, batches of 4",
        "penstock index",
        "fits",
    ):
        assert words in text


def test_row_groups_are_part_of_the_plan(tmp_path: Path) -> None:
    """Each lane holds one of Parquet: its size is told, and refused where all lanes' are more than the budget."""
    rows = [{"__key__": f"{n:04d}", "n": b"%d" % n, "big": bytes(64 << 10)} for n in range(96)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "s.parquet").write_bytes(formatted("parquet", rows, rows_per_group=32))
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=8).batch(4)
    index(made, tmp_path / "index")
    options = {
        "index_dir": tmp_path / "index",
        "fetch": ps.FetchConfig(budget_bytes_max=8 << 20),
        "file": io.StringIO(),
    }
    plan = explain(made, lanes=2, **options)
    assert 2 << 20 <= plan.sources[0].unit_bytes <= 2.2 * (1 << 20)
    assert plan.sources[0].entry_bytes == plan.sources[0].unit_bytes // 2
    assert explain(ps.shards(f"{tmp_path}/data/").select(["n"]).batch(4), **options).sources[0].unit_bytes < 10_000
    out = io.StringIO()
    with pytest.raises(ConfigError, match="more than the budget of 8388608"):
        explain(made, lanes=4, **{**options, "file": out})
    assert "per epoch unknown" in out.getvalue()
    with (
        ps.Loader(made, lanes=4, index_dir=options["index_dir"], fetch=options["fetch"]) as loader,
        pytest.raises(ConfigError, match="more than the budget of 8388608"),
    ):
        list(loader)


def test_explain_says_how_often_workers_read(folder: Path, tmp_path: Path) -> None:
    """Without an index n times; single objects once; with one, less than n times where samples are large."""
    small = ps.shards(f"{folder}/").shuffle(window=32).batch(4)
    assert explain(small, file=io.StringIO()).worker_factors == {2: 2, 4: 4, 8: 8}
    objects = ps.objects(f"{folder}/").shuffle(window=32).batch(4)
    assert explain(objects, file=io.StringIO()).worker_factors == {2: 1, 4: 1, 8: 1}
    (tmp_path / "large").mkdir()
    large = ps.shards(f"{tmp_path}/large/").shuffle(window=32).batch(4)
    (tmp_path / "large" / "s.tar").write_bytes(shard({"__key__": str(n), "raw": bytes(200_000)} for n in range(20)))
    index(large, tmp_path / "place")
    out = io.StringIO()
    assert explain(large, index_dir=tmp_path / "place", file=out).worker_factors == {2: 2, 4: 1.5, 8: 1.3}
    assert "2, 4, 8 workers reads each byte 2, 1.5, 1.3 times" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tar", "any sample can be read by itself"),
        ("mds", "any sample can be read by itself"),
        ("parquet", "entering inside costs the row group from its start, and the shard's footer, on average 62 B"),
        ("tfrecord.gz", "entering inside costs the shard from its start, on average 5"),
    ],
)
def test_explain_says_what_entering_costs(tmp_path: Path, name: str, says: str) -> None:
    """By format, in bytes where they are known."""
    write_formatted(tmp_path, name, (9, 9))
    plan = explain(ps.shards(f"{tmp_path}/").batch(2), file=io.StringIO())
    mean_bytes = sum(path.stat().st_size for path in tmp_path.iterdir()) // 4
    expected = {"parquet": plan.sources[0].unit_bytes // 2, "tfrecord.gz": pytest.approx(mean_bytes, abs=1)}.get(
        name, 0
    )
    assert plan.sources[0].entry_bytes == expected
    assert says in str(plan)


def test_explain_prints_to_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it is told where; pipelines without a batch, and without any stage, have a plan too."""
    explain(ps.shards(f"{folder}/"))
    assert "as stored" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(folder: Path) -> None:
    """It is printed all the same, so that one sees what is large."""
    out = io.StringIO()
    pipeline = ps.shards(f"{folder}/").shuffle(window=10_000_000).decode(ps.Integer("cls")).batch(8_000_000)
    with pytest.raises(ConfigError, match=r"this plan holds .* \(window .*\), more than its budget of 64 MiB"):
        explain(pipeline, fetch=ps.FetchConfig(budget_bytes_max=64 * MIB), file=out)
    assert "does NOT fit" in out.getvalue()


def test_memory_counts_every_part() -> None:
    """What fits to the byte fits; one byte more does not."""
    MemoryPlan(window_bytes=1, read_ahead_bytes=2, batches_bytes=3, budget_bytes=6).check()
    with pytest.raises(ConfigError, match="budget of 5 B"):
        MemoryPlan(window_bytes=1, read_ahead_bytes=2, batches_bytes=3, budget_bytes=5).check()


def test_explain_looks_at_each_source_of_a_mix(folder: Path, tmp_path: Path) -> None:
    """Every source has its own numbers and its share; sizes of samples are weighed by it."""
    write_counted(tmp_path / "other", (5,))
    fields = (ps.Integer("cls"),)
    one, two = (ps.shards(f"{path}/").decode(*fields) for path in (folder, tmp_path / "other"))
    out = io.StringIO()
    made = ps.mix({one: 3, two: 1}).shuffle(window=100).batch(4)
    plan = explain(made, index_dir=index(made, tmp_path / "index"), lanes=2, file=out)
    assert [(source.share, source.shards_count) for source in plan.sources] == [(0.75, 3), (0.25, 1)]
    assert "75.0% of the samples" in out.getvalue()
    assert plan.memory.window_bytes > 0


def test_objects_need_no_window(tmp_path: Path) -> None:
    """48 objects of 1 MiB fit a budget of 32 MiB, in as many lanes and GETs as a loader has."""
    for number in range(48):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1 << 20))
    made = ps.objects(f"{tmp_path}/").shuffle(window=64).batch(2)
    fetch = ps.FetchConfig(budget_bytes_max=32 * MIB)
    plan = explain(made, fetch=fetch, file=io.StringIO())
    assert (plan.lanes_count, plan.epoch_requests_min, plan.epoch_requests) == (64, 48, 48)
    assert plan.memory.total_bytes <= 32 * MIB
    with ps.Loader(made, fetch=fetch) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 48


def test_an_unshuffled_stream_is_held_against_its_budget_too(folder: Path) -> None:
    """Batches that cannot fit are refused before the first, without an index as with one."""
    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).batch(8_000_000)
    fetch = ps.FetchConfig(budget_bytes_max=64 * MIB)
    with pytest.raises(ConfigError, match="more than its budget of 64 MiB"):
        explain(made, fetch=fetch, file=io.StringIO())
    with ps.Loader(made, fetch=fetch) as loader, pytest.raises(ConfigError, match="more than its budget of 64 MiB"):
        next(iter(loader))


def test_explain_refuses_what_is_not_there(tmp_path: Path) -> None:
    """No pipeline, no data, and options out of bounds are errors of their own."""
    with pytest.raises(ConfigError):
        explain("s3://b/")  # type: ignore[arg-type]
    with pytest.raises(ObjectMissingError):
        explain(ps.shards(f"{tmp_path}/"))
    with pytest.raises(ConfigError, match="processes=-1"):
        explain(ps.shards(f"{tmp_path}/"), processes=-1)
