"""Samples picked by number, and picked so that classes are balanced."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, numbers, write_counted
from penstock.errors import ConfigError
from resuming import assert_resumes_everywhere


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Shards of 60 samples with an index, of which every tenth is rare."""
    write_counted(tmp_path / "data", (25, 20, 15))
    return {"index_dir": index(source(tmp_path).batch(4), tmp_path / "index"), "lanes": 4, "threads": 1}


def source(tmp_path: Path) -> Any:
    return ps.shards(f"{tmp_path}/data/")


def read(pipeline: Any, **options: Any) -> list[list[int]]:
    with ps.Loader(pipeline, **options) as loader:
        return [numbers([batch]) for batch in loader]


def test_classes_are_balanced(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each class has its share exactly, every sample occurs, in an order that is the same on any number of ranks."""
    labels = ["rare" if number % 10 == 0 else "usual" for number in map(int, ps.read_column(source(tmp_path), "cls"))]
    picked = ps.balanced_numbers(labels)
    made = source(tmp_path).pick(picked).shuffle(seed=1).decode(ps.Integer("cls")).batch(global_size=12)
    alone = read(made, **options)
    counts = Counter(number for batch in alone for number in batch)
    assert set(counts) == set(range(60))
    assert sum(count for number, count in counts.items() if number % 10 == 0) == 54
    assert {count for number, count in counts.items() if number % 10} == {1}
    assert alone != read(made.evaluate(), **options)
    ranks = [read(made, rank=rank, world_size=2, **options) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in alone]
    assert_resumes_everywhere(lambda: ps.Loader(made, **options), every=4)
    weighted = ps.balanced_numbers(labels, weights={"rare": 1, "usual": 3})
    assert Counter(labels[number] for number in weighted) == {"rare": 18, "usual": 54}


def test_what_is_picked_keeps_its_place(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without a shuffle, samples come in the order in which they are named, and in a mix by their weights."""
    made = source(tmp_path).pick([59, 0, 7, 7]).decode(ps.Integer("cls"))
    assert read(made.batch(3), **options | {"lanes": 1}) == [[59, 0, 7], [7]]
    parts = {source(tmp_path).pick(range(0, 60, 2)): 0.5, source(tmp_path).pick([1, 3]): 0.5}
    mixed = ps.mix(parts, stop="repeat").decode(ps.Integer("cls")).batch(4)
    assert all(sum(number in (1, 3) for number in batch) == 2 for batch in read(mixed, **options | {"lanes": 2}))


def test_picks_that_cannot_be(tmp_path: Path, options: dict[str, Any]) -> None:
    """Numbers out of range, a second pick, no index, and labels without a weight are refused."""
    for numbers_ in ([60], [-1], [], [1.5], "ab"):
        with pytest.raises(ConfigError, match="pick"):
            read(source(tmp_path).pick(numbers_).batch(2), **options)
    with pytest.raises(ConfigError, match="once"):
        source(tmp_path).pick([1]).pick([1])
    with pytest.raises(ConfigError, match="penstock index"):
        read(source(tmp_path).pick([1]).batch(2), lanes=1, index_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="weight"):
        ps.balanced_numbers(["a"], weights={"b": 1})
    with pytest.raises(ConfigError, match="without"):
        source(tmp_path).pick([1]).open()


def test_filters_of_a_mix_that_change_its_shares_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A filter that leaves a tenth of one source is said once, with the weights that make up for it; a mild one is not."""
    for name in "ab":
        write_counted(tmp_path / name, (1000,))
    few, all_ = (ps.shards(f"{tmp_path}/{name}/").decode(ps.Integer("cls")) for name in "ab")
    for tenths in (1, 9):
        kept = few.filter(lambda sample, tenths=tenths: sample["cls"] % 10 < tenths)
        made = ps.mix({kept: 0.5, all_: 0.5}).batch(50)
        with ps.Loader(made, index_dir=index(made, tmp_path / "index")) as loader:
            assert sum(1 for _ in loader)
        texts = [record.getMessage() for record in caplog.records if "weights of a mix" in record.getMessage()]
        assert len(texts) == 1
    assert re.search(r"leave (8|9|10)\.\d% : .* of shares 50.0% : 50.0%. Hint: weights (89|90|91)\.\d% : ", texts[0])
