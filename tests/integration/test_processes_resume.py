"""Stages that change how many samples there are: a state that was saved with some processes goes on with any others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index, numbers, write_counted

pytestmark = pytest.mark.server

SIZES = (9, 0, 30, 14, 1, 22)
COUNTS = (0, 1, 2)  # of processes


def _times(number: int) -> int:
    """How often a sample comes out: not at all, once, or twice."""
    return number % 3


def _repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{**sample, "drawn": rng.integers(1 << 40)} for _ in range(sample["cls"] % 3)]


def _drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": rng.integers(1 << 40)}


def _groups(every: list[int], size: int) -> list[list[int]]:
    return [every[at : at + size] for at in range(0, len(every), size)]


def _by_size(every: list[int], budget: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for number in every:
        if groups[-1] and sum(groups[-1]) + number > budget:
            groups.append([])
        groups[-1].append(number)
    return groups


KINDS: dict[str, tuple[Any, Any]] = {  # what is done; what plain Python makes of the samples in their order
    "refill": (
        lambda made: made.filter(lambda sample: sample["cls"] % 3 != 0, refill=True).map(_drawn).batch(5),
        lambda every: _groups([number for number in every if _times(number)], 5),
    ),
    "flat_map": (
        lambda made: made.flat_map(_repeated).batch(7, drop_last=True),
        lambda every: [group for group in _groups([n for n in every for _ in range(_times(n))], 7) if len(group) == 7],
    ),
    "by size": (
        lambda made: made.map(_drawn).batch_by_size(220, size=lambda sample: sample["cls"], oversize="alone"),
        lambda every: _by_size(every, 220),
    ),
}


def _seen(batches: Any) -> Iterator[tuple[list[int], list[int]]]:
    for batch in batches:
        yield numbers([batch]), batch["drawn"].tolist()


@pytest.mark.parametrize(
    ("kind", "mode"), [("refill", "stream"), ("flat_map", "require"), ("by size", "require"), ("flat_map", "stream")]
)
def test_a_state_goes_on_with_any_count(tmp_path: Path, kind: str, mode: Any) -> None:
    """Saved behind every batch with 0, 1 and 2 processes, gone on with another count: what plain Python says is left."""
    write_counted(tmp_path / "data", SIZES)
    source = ps.shards(f"{tmp_path}/data/").shuffle(window=20, seed=1).decode(ps.Integer("cls"))
    options: dict[str, Any] = {"index": mode, "index_dir": index(source, tmp_path / "index"), "lanes": 4, "threads": 2}
    with ps.Loader(source.batch(1), **options) as loader:
        every = numbers(loader)
    stages, plain = KINDS[kind]
    expected = plain(every)
    with ExitStack() as stack:
        loaders = [stack.enter_context(ps.Loader(stages(source), processes=count, **options)) for count in COUNTS]
        saved, drawn = [], []
        for loader in loaders:  # an epoch that ends leaves its workers waiting for the next
            states = [loader.state_dict()]
            drawn.append([])
            for one in _seen(loader):
                drawn[-1].append(one)
                states.append(loader.state_dict())
            saved.append(json.loads(json.dumps(states)))
        assert [group for group, _ in drawn[0]] == expected
        assert drawn[1:] == drawn[:1] * 2
        ways = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
        for turn, position in itertools.product(range(2), range(len(expected))):
            saved_with, loaded_with = ways[(turn + position + turn * len(expected)) % len(ways)]
            loader = loaders[loaded_with]
            loader.load_state_dict(saved[saved_with][position])
            assert list(_seen(loader)) == drawn[0][position:], (position, saved_with, loaded_with)
