from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import write_counted
from penstock.errors import ConfigError, DecodeError, ObjectChangedError, ObjectMissingError
from penstock.pipeline import objects

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _forking_is_the_users_choice() -> Any:
    """Python warns of fork in a process with threads; what must work all the same is tested here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty objects with their number as text, in two folders."""
    for number in range(20):
        path = tmp_path / f"{'ab'[number % 2]}/{number:03d}.cls"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    return tmp_path


def dataset_of(folder: Path, **options: Any) -> Any:
    return ps.torch.MapDataset(objects(f"{folder}/").decode(ps.Integer("cls")), **options)


def expected_order() -> list[int]:
    """The numbers in the order of their keys."""
    return [*range(0, 20, 2), *range(1, 20, 2)]


def test_samples_by_number(folder: Path) -> None:
    """Each number has its sample, in key order, with key, URL and number; negative ones count from the end."""
    dataset = dataset_of(folder)
    assert len(dataset) == 20
    assert [dataset[index]["cls"] for index in range(20)] == expected_order()
    assert dataset[-1]["cls"] == 19
    assert dataset[3]["__key__"] == "a/006.cls"
    assert dataset[3]["__shard__"].endswith("/a/006.cls")
    assert dataset[3]["__position__"] == 3
    with pytest.raises(IndexError, match="sample 20 of 20"):
        dataset[20]
    with pytest.raises(ConfigError, match="single samples"):
        ps.torch.MapDataset(objects(f"{folder}/").batch(4))
    with pytest.raises(ConfigError, match="pipeline"):
        ps.torch.MapDataset("s3://bucket/")  # type: ignore[arg-type]


def test_a_batch_comes_in_the_order_asked(folder: Path) -> None:
    """__getitems__ keeps order and repetitions, and what is asked for twice is a sample of its own each time."""
    dataset = dataset_of(folder)
    asked = [5, 0, 5, 19, 0, -1]
    samples = dataset.__getitems__(asked)
    assert [sample["cls"] for sample in samples] == [expected_order()[index] for index in asked]
    assert samples[0] is not samples[2]
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.server)])
def test_in_a_dataloader(folder: Path, method: str | None) -> None:
    """DataLoader shuffles and batches it; every sample comes once, whatever starts the workers."""
    options = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    batches = torch.utils.data.DataLoader(dataset_of(folder), batch_size=6, shuffle=True, **options)
    found = list(batches)
    assert [len(batch["cls"]) for batch in found] == [6, 6, 6, 2]
    assert sorted(int(number) for batch in found for number in batch["cls"]) == list(range(20))


def test_workers_do_not_list_again(folder: Path) -> None:
    """What was found goes along in a pickle: an object that appears later is not seen by a copy."""
    dataset = dataset_of(folder)
    assert len(dataset) == 20
    (folder / "a/999.cls").write_text("999")
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 20
    assert copy[0]["cls"] == 0


def test_the_loaders_samples(folder: Path) -> None:
    """Numbers, keys, URLs and random streams are those of a Loader of the same pipeline, in its stored order."""
    made = objects(f"{folder}/*/0*.cls").decode(ps.Integer("cls")).map(_drawn)
    dataset = ps.torch.MapDataset(made)
    with ps.Loader(made.batch(6)) as loader:
        for batch in loader:
            for row, position in enumerate(batch["__position__"]):
                sample = dataset[int(position)]
                for name in ("cls", "drawn", "__key__", "__shard__"):
                    assert sample[name] == batch[name][row]


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.server)])
def test_indexed_shards_in_a_dataloader(tmp_path: Path, method: str) -> None:
    """Workers read ranges of shards in any sampler's order; what each started with is what was found here."""
    total = write_counted(tmp_path / "data", (9, 4, 7))
    made = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls"))
    dataset = ps.torch.MapDataset(made, index="auto", index_dir=tmp_path / "index")
    assert dataset["s00011"]["cls"] == 11
    assert [sample["cls"] for sample in dataset[3:6]] == [3, 4, 5]
    order = np.random.default_rng(1).permutation(total).tolist()
    batches = torch.utils.data.DataLoader(
        dataset, batch_size=6, sampler=order, num_workers=2, multiprocessing_context=method
    )
    assert [int(number) for batch in batches for number in batch["cls"]] == order
    dataset.close()
    assert dataset[-1]["cls"] == total - 1


def _drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": float(rng.random())}


def test_random_numbers_depend_on_seed_epoch_and_number(folder: Path) -> None:
    """The same number in the same epoch draws the same, wherever; set_epoch reaches workers that live on."""
    made = objects(f"{folder}/").decode(ps.Integer("cls")).map(_drawn)
    dataset = ps.torch.MapDataset(made, seed=7)
    first = [dataset[index]["drawn"] for index in range(20)]
    assert len(set(first)) == 20
    assert [sample["drawn"] for sample in dataset.__getitems__(range(20))] == first
    workers = torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=1, persistent_workers=True)
    again = [number for batch in workers for number in batch["drawn"].tolist()]
    dataset.set_epoch(1)
    other = [number for batch in workers for number in batch["drawn"].tolist()]
    assert again == first
    assert not set(other) & set(first)


def test_errors_name_the_sample(folder: Path) -> None:
    """What changed, does not decode, or is gone is an error that names the object; the others can still be read."""
    dataset = dataset_of(folder)
    assert len(dataset) == 20
    (folder / "a/000.cls").write_text("another version")
    with pytest.raises(ObjectChangedError, match=r"a/000\.cls"):
        dataset[0]
    with pytest.raises(DecodeError, match=r"a/000\.cls"):
        dataset_of(folder)[0]
    (folder / "a/000.cls").unlink()
    with pytest.raises(ObjectMissingError, match=r"a/000\.cls"):
        dataset.__getitems__([1, 0])
    assert dataset[1]["cls"] == 2
