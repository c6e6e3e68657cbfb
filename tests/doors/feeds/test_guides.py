"""The pages about libraries that take samples or batches from penstock: what they show as runnable runs."""

from __future__ import annotations

import pickle
from pathlib import Path

import grain
import numpy as np
import pytest

import penstock as ps
from loading import index_beside, write_counted
from pages import run_page


@pytest.mark.parametrize("name", ["grain", "spdl", "dali"])
def test_the_page_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows as runnable runs, in order, on shards of pictures, whose index is built at first use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_page(f"docs/guides/{name}.md", name, tmp_path)


def test_an_opened_pipeline_is_a_source_of_grain(tmp_path: Path) -> None:
    """It fulfils Grain's contract: a length, access by Python's and NumPy's numbers, and pickling for worker processes."""
    total = write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    source = ps.shards(f"{tmp_path}/").decode(ps.Integer("cls")).open()
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    copied = pickle.loads(pickle.dumps(source))
    assert len(source) == len(copied) == total
    assert [copied[np.int64(number)]["cls"] for number in range(total)] == list(range(total))
    data = grain.MapDataset.source(source).shuffle(seed=3).map(lambda sample: int(sample["cls"]))
    order = [data[number] for number in range(total)]
    assert order != sorted(order) == list(range(total))
    iterator = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
    head = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    rest = list(iterator)
    iterator.set_state(state)
    assert head + rest == head + list(iterator) == order
