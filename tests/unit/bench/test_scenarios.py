"""The declarations of scenarios, and the data that is written for them."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

import penstock as ps
from penstock.bench.clients import ENTRIES, RAW, Entry
from penstock.bench.parts import parts_of, write_scenario
from penstock.bench.running import BenchOptions, option_of, selected, turns_of
from penstock.bench.samples import KINDS
from penstock.bench.scenarios import DataSet, read_scenario, scenario_names
from penstock.bench.writing import DataWriter

NAMES = scenario_names()
TAR = DataSet(name="tar", kind="digits", format="tar", count=25, shard_samples=10)


def written(data: DataSet, folder: Path) -> dict[str, bytes]:
    with ps.connect(f"{folder}/") as store:
        DataWriter(data, store).write(lambda *_: None)
        return {info.key: bytes(store.read(info.key).data) for info in store.list()}


def test_the_scenarios_of_the_articles_are_there() -> None:
    """Each published comparison that the documentation names has a declaration."""
    assert NAMES == ["best-practices", "fast-file", "minio", "object-lambda", "pytorch-streaming"]


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_names_what_exists(name: str) -> None:
    """Kinds, clients and titles exist, titles are different, and at the least scale little data is left."""
    scenario = read_scenario(name)
    titles = [part.title for part in scenario.parts]
    assert len(set(titles)) == len(titles)
    least = scenario.scaled(0.0005)
    sizes = [data.count * KINDS[data.kind].sample_bytes for data in least.data]
    assert all(size >= 0 for size in sizes)
    assert sum(sizes) < 64 << 20
    assert [part.url for part in parts_of(least, "s3://bucket/x/")] == [
        f"s3://bucket/x/{part.data.folder}/" for part in least.parts
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "digits"', 'kind = "digit"', "kind='digit'"),
        ('clients = ["penstock"]', 'clients = ["penstok"]', "no client is called 'penstok'"),
        ("cache = [", "cash = [", "a sweep of 'cash' is not known. Hint: did you mean 'cache'"),
    ],
)
def test_a_scenario_that_names_nothing_is_an_error(
    old: str, new: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A client, a kind or a setting that does not exist is an error that says which."""
    text = (files("penstock.bench.scenarios") / "minio.toml").read_text()
    assert old in text
    (tmp_path / "wrong.toml").write_text(text.replace(old, new))
    monkeypatch.setattr("penstock.bench.scenarios.files", lambda _: tmp_path)
    with pytest.raises(ps.ConfigError, match=message):
        read_scenario("wrong")


def test_what_is_asked_for() -> None:
    """Clients that answer a question of their own run only where they are named, and those that read no chunks say so."""
    assert "penstock, gateway handler" not in {entry.name for entry in selected(())}
    assert [entry.name for entry in selected(["penstock, gateway h"])] == ["penstock, gateway handler"]
    parts = {part.title: part for part in read_scenario("fast-file").scaled(0.1).parts}
    counts = [parts[f"job start by number of files at scale 1, {count}"].data.count for count in (100, 1000, 10_000)]
    assert counts == [10, 100, 1000]
    options = parts["random chunks by size"].options
    turns = turns_of([RAW, *selected(["penstock, mount", "webdataset, boto3"])], options)
    assert [(turn.entry.name, turn.settings) for turn in turns if turn.number == 0] == [
        (RAW.name, {}), ("penstock, mount", {"chunk_bytes": 65_536}), ("webdataset, boto3", {}),
        ("penstock, mount", {"chunk_bytes": 1_048_576}), ("penstock, mount", {"chunk_bytes": 8_388_608}),
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_data_of_a_scenario_is_written_once(name: str, tmp_path: Path) -> None:
    """At a small scale each scenario writes all its data sets, and a second time nothing."""
    scenario = read_scenario(name).scaled(0.00005)
    counts = [write_scenario(scenario, str(tmp_path), {}, lambda *_: None) for _ in range(2)]
    assert counts[0] >= len(scenario.data)
    assert counts[1] == 0
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {
        each.folder for each in scenario.data
    }


def test_the_time_is_shared() -> None:
    """The seconds of a run are divided between its parts as the scenario divides its own."""
    parts = parts_of(read_scenario("minio"), "s3://bucket/", seconds=21.0)
    assert [part.options.seconds for part in parts] == pytest.approx([12.0, 6.0, 3.0])


@pytest.mark.parametrize(("format_name", "count"), [("tar", 3), ("tfrecord", 3), ("objects", 25)])
def test_data_is_the_same_every_time(format_name: str, count: int, tmp_path: Path) -> None:
    """The same declaration gives the same bytes, another seed others, and its samples can be read."""
    data = replace(TAR, format=format_name, kind="pixels" if format_name == "tfrecord" else "digits")
    once = written(data, tmp_path / "once")
    assert len(once) == count
    assert written(data, tmp_path / "twice") == once
    assert written(replace(data, seed=1), tmp_path / "other") != once
    source = ps.objects if format_name == "objects" else ps.shards
    with ps.Loader(source(f"{tmp_path}/once/{data.folder}/").batch(5, drop_last=False)) as loader:
        assert sum(1 for _ in loader) == 5


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    """Only the objects that are missing are written; another scale has another folder."""
    whole = written(TAR, tmp_path)
    first, second, _ = sorted(tmp_path.rglob("*.tar"))
    first.write_bytes(b"mine")
    second.unlink()
    with ps.connect(f"{tmp_path}/") as store:
        assert list(DataWriter(TAR, store).missing) == [f"{TAR.folder}/000001.tar"]
    again = written(TAR, tmp_path)
    assert again == whole | {f"{TAR.folder}/000000.tar": b"mine"}
    with ps.connect(f"{tmp_path}/") as store:
        assert len(DataWriter(TAR.scaled(2), store).missing) == 5


def test_small_scales_have_smaller_shards() -> None:
    """Below a tenth the shards shrink with the data, so that their number stays."""
    data = replace(TAR, count=10_000, shard_samples=100)
    assert [(each.count, each.shard_samples) for each in map(data.scaled, (1, 0.1, 0.01, 0.001))] == [
        (10_000, 100), (1000, 100), (100, 10), (10, 1),
    ]  # fmt: skip
    with pytest.raises(ps.ConfigError, match="--scale 0 must be more than 0"):
        read_scenario("minio").scaled(0)


def entry(name: str) -> Entry:
    return next(each for each in ENTRIES if each.name == name)


def test_a_sweep_sets_what_a_client_has() -> None:
    """Each value is an argument of the client's class, and a client without the setting has one turn for all values."""
    assert option_of(entry("penstock"), "prefetch") == "prefetch_batches"
    assert option_of(entry("connector, map"), "workers") == "workers"
    assert option_of(entry("connector, map"), "prefetch") is None
    assert option_of(entry("penstock, Ray workers"), "workers") == "cluster"
    assert option_of(entry("penstock, Ray workers"), "processes") is None  # a loader has one or the other
    options = BenchOptions(sweep={"prefetch": [1, 2], "batch": [8, 16]})
    turns = turns_of([entry("penstock"), entry("connector, map")], options)
    assert [sum(turn.entry.name == name for turn in turns) for name in ("penstock", "connector, map")] == [8, 4]
    assert {"prefetch": 2, "batch": 16} in [turn.settings for turn in turns]
