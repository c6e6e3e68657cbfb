"""An index as a by-product: what a streamed epoch leaves for the next job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import FORMATS_WRITTEN, index, number_of, numbers, pipeline, write_counted, write_formatted
from penstock.index import lookup
from penstock.sources.shards import ShardFinder

SIZES = [9, 0, 14, 5, 11]


def known(made: Any, folder: Path) -> Any:
    """What an index in `folder` says of a pipeline's shards."""
    with_stores = ShardFinder(made.flat().leaves[0].source, fetch=None)
    try:
        return lookup(with_stores.find(), index_dir=folder)
    finally:
        with_stores.close()


def streamed(made: Any, folder: Path, **options: Any) -> list[int]:
    with ps.Loader(made, lanes=4, threads=1, index_dir=folder, **options) as loader:
        return numbers(list(loader))


def test_the_next_job_begins_with_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An epoch without an index leaves one, with which a new loader gives the order of a built one, and says so."""
    caplog.set_level(logging.INFO, "penstock.loader")
    total = write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    assert sorted(streamed(made, tmp_path / "found")) == list(range(total))
    assert [each.getMessage() for each in caplog.records if "indexed" in each.getMessage()] == [
        f"indexed 5 shards, {total} samples, while reading them: {known(made, tmp_path / 'found').place.url}"
    ]
    assert len(list((tmp_path / "found").rglob("*.index"))) == 1
    assert streamed(made, tmp_path / "found") == streamed(made, index(made, tmp_path / "built"), index="require")


@pytest.mark.parametrize("format_name", FORMATS_WRITTEN)
def test_it_says_what_a_build_says(tmp_path: Path, format_name: str) -> None:
    """Counts and places of samples are those that ``penstock index`` finds, in every format, decoded or not."""
    write_formatted(tmp_path / "data", format_name, SIZES[:1] + SIZES[2:])
    plain = ps.shards(f"{tmp_path}/data/").shuffle(window=16)
    decoded = plain.map(number_of)
    index(plain, tmp_path / "built")
    built = known(plain, tmp_path / "built")
    for number, made in enumerate((plain.batch(4), decoded.batch(4))):
        with ps.Loader(made, lanes=2, threads=1, index_dir=tmp_path / str(number)) as loader:
            assert len(list(loader)) > 2
        found = known(plain, tmp_path / str(number))
        assert found.rows == built.rows
        for row in (row for row in built.rows if row.has_offsets):
            said, expected = found.place.load_shard(row).offsets, built.place.load_shard(row).offsets
            assert np.array_equal(said, expected)


def test_ranks_and_processes_need_not_meet(tmp_path: Path) -> None:
    """What two ranks found, each in its own shards and one of them in worker processes, is an index of all."""
    total = write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    job: dict[str, Any] = {"world_size": 2, "agree": lambda n: n}
    found = streamed(made, tmp_path / "found", rank=0, **job)
    assert not known(made, tmp_path / "found").is_complete
    found += streamed(made, tmp_path / "found", rank=1, processes=2, **job)
    assert set(found) >= set(range(total))
    assert known(made, tmp_path / "found").samples_count == total


def test_a_run_keeps_its_mode(tmp_path: Path) -> None:
    """Epochs, and resumption inside and between them, go on without the index that the first epoch left."""
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    batches, states = [], []
    with ps.Loader(made, lanes=4, threads=1, index_dir=tmp_path / "found") as loader:
        for _ in loader.epochs(2):
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
        between = states[4]
        assert known(made, tmp_path / "found").is_complete
    for state, left in ((states[1], batches[2:]), (between, batches[5:]), (states[6], batches[7:])):
        with ps.Loader(made, lanes=4, threads=1, index_dir=tmp_path / "found") as loader:
            loader.load_state_dict(state)
            rest = [batch for _ in loader.epochs(2) for batch in loader]
        assert numbers(rest) == numbers(left)


def test_a_resumed_epoch_leaves_the_rest(tmp_path: Path) -> None:
    """An epoch in two halves leaves all shards but those it was stopped in, which the next one adds."""
    write_counted(tmp_path / "data", [20] * 8)
    made = pipeline(tmp_path / "data", window=8)
    with ps.Loader(made, lanes=2, threads=1, prefetch_batches=2, index_dir=tmp_path / "found") as loader:
        for _ in zip(range(9), loader, strict=False):
            pass
        state = loader.state_dict()
    assert not list(tmp_path.rglob("passes/*"))
    with ps.Loader(made, lanes=2, threads=1, index_dir=tmp_path / "found") as loader:
        loader.load_state_dict(state)
        list(loader)
    assert 0 < known(made, tmp_path / "found").rows.count(None) < 8
    assert len(streamed(made, tmp_path / "found")) == 160
    assert known(made, tmp_path / "found").is_complete


def test_nothing_is_said_of_another_version(tmp_path: Path) -> None:
    """A shard that is written anew is read without an index again, and then known in its new version."""
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    streamed(made, tmp_path / "found")
    write_counted(tmp_path / "data", [9, 0, 14, 5, 13])
    assert known(made, tmp_path / "found").rows.count(None) == 5
    assert sorted(streamed(made, tmp_path / "found")) == list(range(41))
    assert known(made, tmp_path / "found").samples_count == 41


def test_a_corrupt_shard_is_not_known(tmp_path: Path) -> None:
    """Of a shard of which something was left out, nothing is kept: it may be read with another policy."""
    write_counted(tmp_path / "data", SIZES)
    path = tmp_path / "data" / "s-002.tar"
    data = bytearray(path.read_bytes())
    data[1024 * 6 : 1024 * 7] = b"\xff" * 1024
    path.write_bytes(data)
    made = (
        ps.shards(f"{tmp_path}/data/", on_corrupt="skip_sample").shuffle(window=16).decode(ps.Integer("cls")).batch(4)
    )
    streamed(made, tmp_path / "found")
    assert [row is None for row in known(made, tmp_path / "found").rows] == [False, False, True, False, False]


def test_a_place_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log line says that the index is lost."""
    total = write_counted(tmp_path / "data", SIZES)
    (tmp_path / "found").write_text("a file")
    assert len(streamed(pipeline(tmp_path / "data"), tmp_path / "found")) == total
    assert "cannot be written" in caplog.text
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


def test_an_index_replaces_what_a_pass_left(tmp_path: Path) -> None:
    """``penstock index`` reads the shards, for their keys, though a pass knows them."""
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    streamed(made, tmp_path / "found")
    index(made, tmp_path / "found")
    found = known(made, tmp_path / "found")
    keys = [key for row in found.rows for key in found.place.load_shard(row).keys]
    assert len(keys) == sum(SIZES)


def test_a_damaged_pass_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    """Cut or changed, it says nothing."""
    write_counted(tmp_path / "data", SIZES)
    made = pipeline(tmp_path / "data", window=16)
    streamed(made, tmp_path / "found")
    (path,) = (tmp_path / "found").rglob("passes/*")
    data = path.read_bytes()
    for broken in (data[:100], data[:30] + b"?" + data[31:], data.replace(b"s-003", b"s-004"), b""):
        path.write_bytes(broken)
        assert known(made, tmp_path / "found").samples_count == 0
