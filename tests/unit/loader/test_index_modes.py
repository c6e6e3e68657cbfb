"""When the loader reads by an index, and what it says when it cannot."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import counted, index, numbers, pipeline, shard, write_counted
from penstock.errors import ConfigError, CorruptShardError
from penstock.index import beside, build
from penstock.pipeline import mix
from penstock.sources.shards import ShardFinder

SIZES = (9, 0, 1, 14, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    return tmp_path / "data"


def mode(loader: ps.Loader) -> str:
    """Which way it took."""
    next(iter(loader))
    return str(loader.state_dict()["mode"])


def test_auto_takes_an_index_that_knows_all(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No index: streamed. One of all shards: used. One that lacks a shard: streamed. Each time one line says so."""
    place = tmp_path / "index"
    for expected, said in (("stream", "no index knows 5 of 5"), ("index", "29 samples"), ("stream", "1 of 6")):
        caplog.clear()
        with caplog.at_level(logging.INFO), ps.Loader(pipeline(folder), index_dir=place) as loader:
            assert mode(loader) == expected
        assert len([record for record in caplog.records if said in record.getMessage()]) == 1
        if expected == "stream":
            index(pipeline(folder), place)
        else:
            (folder / "t.tar").write_bytes(shard(counted(range(100, 103))))


def test_an_index_that_lacks_shards_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where shards were added after the index was made, order and length change: one warning says so, whatever the epochs."""
    place = tmp_path / "index"
    index(pipeline(folder), place)
    (folder / "t.tar").write_bytes(shard(counted(range(100, 103))))
    with ps.Loader(pipeline(folder), index_dir=place) as loader:
        for _ in loader.epochs(2):
            list(loader)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "knows 5 of 6 shards" in warnings[0]
    assert "penstock index" in warnings[0]


def test_an_index_of_other_versions_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of a data set has shards of other versions than the index that was copied along: a warning says so."""
    shards = ShardFinder(pipeline(folder).source, fetch=None).find()
    build(shards, beside(shards))
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    with ps.Loader(pipeline(tmp_path / "copy"), index_dir=tmp_path / "none") as loader:
        assert mode(loader) == "stream"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "knows 0 of 5 shards" in warnings[0]


def test_an_index_beside_the_shards_is_found(folder: Path) -> None:
    """Kept beside its data set, an index serves every host without being named."""
    shards = ShardFinder(pipeline(folder).source, fetch=None).find()
    build(shards, beside(shards))
    with ps.Loader(pipeline(folder)) as loader:
        assert mode(loader) == "index"
    made = ps.shards([str(path) for path in sorted(folder.glob("*.tar"))]).decode(ps.Integer("cls")).batch(4)
    with ps.Loader(made) as loader:  # versions are asked for only because there is an index
        assert mode(loader) == "index"


def test_require_and_stream(folder: Path, tmp_path: Path) -> None:
    """ "require" refuses what no index knows; "stream" does not look."""
    place = tmp_path / "index"
    with ps.Loader(pipeline(folder), index="require", index_dir=place) as loader:
        with pytest.raises(ConfigError, match="penstock index"):
            next(iter(loader))
    index(pipeline(folder), place)
    with ps.Loader(pipeline(folder), index="stream", index_dir=place) as loader:
        assert mode(loader) == "stream"
        with pytest.raises(TypeError, match="without an index"):
            len(loader)
    with ps.Loader(pipeline(folder), index="require", index_dir=place) as loader:
        assert len(loader) == 4
    with pytest.raises(ConfigError, match="index='no'"):
        ps.Loader(pipeline(folder), index="no")  # type: ignore[arg-type]


def test_a_run_keeps_the_mode_it_began_with(folder: Path, tmp_path: Path) -> None:
    """A state saved without an index goes on without one, also when there is one by now; and the other way round."""
    place = tmp_path / "index"
    with ps.Loader(pipeline(folder), index_dir=place) as loader:
        next(iter(loader))
        state = loader.state_dict()
        rest = numbers(loader)
    index(pipeline(folder), place)
    with ps.Loader(pipeline(folder), index_dir=place) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == rest
        assert mode(loader) == "stream"
    with ps.Loader(pipeline(folder), index_dir=place) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with ps.Loader(pipeline(folder), index_dir=tmp_path / "nothing") as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="penstock index"):
            next(iter(loader))


def test_an_index_that_counts_too_many_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A shard with fewer samples than its index says is an error that names it, never a shorter epoch."""
    from dataclasses import replace

    made = pipeline(folder, window=None)
    with ps.Loader(made, index_dir=index(made, tmp_path / "index")) as loader:
        plan = loader._session.planned()
        read_plan: Any = plan.read_plan
        source = read_plan.sources[0]
        rows = [row._replace(samples_count=row.samples_count + (row.key == "s-003.tar")) for row in source.rows]
        order = replace(read_plan.order, samples=[row.samples_count for row in rows])
        wrong = replace(read_plan, sources=[replace(source, rows=rows)], order=order)
        loader._session._plan = replace(plan, read_plan=wrong)
        with pytest.raises(CorruptShardError, match=r"15 samples.*14.*s-003\.tar"):
            list(loader)


def test_several_ranks_need_no_agreement(folder: Path, tmp_path: Path) -> None:
    """With an index ranks know by themselves how many batches all have."""
    place = index(pipeline(folder), tmp_path / "index")
    ranks = []
    for rank in range(2):
        with ps.Loader(pipeline(folder), rank=rank, world_size=2, index_dir=place) as loader:
            ranks.append(list(loader))
            assert len(loader) == len(ranks[-1]) == 2
    assert sorted(n for batches in ranks for n in numbers(batches[:1])) != list(range(16))
    valid = sum(int(batch["__valid__"].sum()) for batches in ranks for batch in batches)
    assert valid == 29


def test_evaluate_masks(folder: Path, tmp_path: Path) -> None:
    """An evaluation has the stored order and __valid__ in every batch, each sample once over the ranks."""
    made = pipeline(folder).evaluate()
    place = index(made, tmp_path / "index")
    with ps.Loader(made, index_dir=place) as loader:
        batches = list(loader)
    assert numbers(batches)[:29] == list(range(29))
    assert sum(int(batch["__valid__"].sum()) for batch in batches) == 29
    seen: list[int] = []
    for rank in range(4):
        with ps.Loader(made, rank=rank, world_size=4, index_dir=place) as loader:
            for batch in loader:
                seen += batch["cls"][batch["__valid__"]].tolist()
    assert sorted(seen) == list(range(29))


def test_a_mix_needs_an_index(folder: Path, tmp_path: Path) -> None:
    """Without knowing how many samples its sources have, a mix is refused with the way out."""
    write_counted(tmp_path / "more", (3,))
    made = mix({ps.shards(f"{folder}/"): 1, ps.shards(f"{tmp_path}/more/"): 1}).decode(ps.Integer("cls")).batch(4)
    with ps.Loader(made, index_dir=tmp_path / "index") as loader, pytest.raises(ConfigError, match="penstock index"):
        next(iter(loader))


def test_global_size(folder: Path, tmp_path: Path) -> None:
    """A global batch is divided by the ranks; a world size that does not divide it is refused with the nearest."""
    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).batch(global_size=6)
    place = index(made, tmp_path / "index")
    with ps.Loader(made, rank=0, world_size=3, index_dir=place) as loader:
        assert len(next(iter(loader))["cls"]) == 2
    with ps.Loader(made, rank=0, world_size=4, index_dir=place) as loader:
        with pytest.raises(ConfigError, match="global_size=8"):
            next(iter(loader))


@pytest.mark.parametrize("how", ["stream", "require"])
def test_take(folder: Path, tmp_path: Path, how: Any) -> None:
    """take(n) is the first n positions, with an index and without."""
    made = ps.shards(f"{folder}/").shuffle(window=9).decode(ps.Integer("cls"))
    options = {"index": how, "index_dir": index(made, tmp_path / "index")}
    with ps.Loader(made.batch(4), **options) as loader:
        every = numbers(loader)
    with ps.Loader(made.take(10).batch(4), **options) as loader:
        for _ in range(2):
            assert len(numbers(loader)) == 10
        loader.restart(0)
        assert numbers(loader) == every[:10]
