"""A pipeline as Hugging Face's ``IterableDataset``: the loader's samples and order, divided exactly, and resumed anywhere."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock as ps
from loading import index_beside, shard, write_counted
from pages import run_page

TOTAL = 107


@pytest.fixture(autouse=True)
def _known_warnings() -> Iterator[None]:
    """Forking is the user's choice, and the DataLoader's workers are forked here too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")  # of a small machine
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # which torchdata's loader calls
        yield


@pytest.fixture(params=["stream", "index"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Counted samples in five shards, with and without an index beside them."""
    assert write_counted(tmp_path, (30, 4, 40, 1, 32)) == TOTAL
    if request.param == "index":
        index_beside(tmp_path)
    return tmp_path


def pipeline(folder: Path, batch: int | None = 8) -> Any:
    """The usual pipeline over counted samples."""
    made = ps.shards(f"{folder}/").shuffle(window=16, seed=3).decode(ps.Integer("cls"), ps.Text("txt"))
    return made if batch is None else made.batch(batch)


def numbers(examples: Iterable[dict[str, Any]]) -> list[int]:
    """The samples' numbers, in the order in which they came; each sample is whole."""
    found = []
    for example in examples:
        assert example["txt"] == f"sample {example['cls']}"
        found.append(int(example["cls"]))
    return found


def expected(made: Any, epoch: int = 0) -> list[int]:
    """The numbers in the order of a loader."""
    with ps.Loader(made) as loader:
        loader.restart(epoch=epoch)
        return [int(number) for batch in loader for number in batch["cls"]]


def test_the_samples_of_a_loader(folder: Path) -> None:
    """Each iteration is the epoch that ``set_epoch`` names, in the loader's order, one example per sample."""
    made = pipeline(folder)
    data = ps.huggingface.dataset(made)
    assert isinstance(data, datasets.IterableDataset)
    assert numbers(data) == numbers(data) == expected(made)
    data.set_epoch(2)
    assert numbers(data) == expected(made, epoch=2) != expected(made)
    assert sorted(numbers(ps.huggingface.dataset(pipeline(folder, batch=None)))) == list(range(TOTAL))


def test_the_features_are_inferred(folder: Path) -> None:
    """The columns have the types of the first batch, and formats and the library's own methods go by them."""
    data = ps.huggingface.dataset(pipeline(folder))
    assert data.features["cls"] == datasets.Value("int64")
    assert data.features["txt"] == datasets.Value("string")
    assert data.features["__position__"] == datasets.Value("int64")
    mapped = data.map(lambda example: {"twice": 2 * example["cls"]}).filter(lambda example: example["cls"] % 2 == 0)
    assert sorted(example["twice"] for example in mapped) == [2 * number for number in range(0, TOTAL, 2)]
    taken = data.with_format("numpy").select_columns(["cls"]).take(3)
    assert [example["cls"].dtype for example in taken] == [np.dtype(np.int64)] * 3
    assert [len(batch["cls"]) for batch in data.iter(batch_size=50)] == [50, 50, 7]


def test_features_that_are_given(folder: Path) -> None:
    """Features that the caller gives are taken, and nothing is read before the iteration; other types become Arrow's."""
    given = datasets.Features({"cls": datasets.Value("int64")})
    data = ps.huggingface.dataset(pipeline(folder), features=given)
    assert data.features == given
    batch = {
        "scalar": np.zeros(2, np.float32),
        "vector": np.zeros((2, 3), np.int16),
        "picture": np.zeros((2, 4, 5, 3), np.uint8),
        "json": [{"a": 1}, {"a": 2}],
        "bytes": [b"a", b"b"],
        "ragged": [np.zeros(2), np.zeros(3)],
    }
    found = ps.huggingface.features_of(batch)
    assert found["scalar"] == datasets.Value("float32")
    assert found["vector"] == datasets.List(datasets.Value("int16"), length=3)
    assert found["picture"] == datasets.Array3D(shape=(4, 5, 3), dtype="uint8")
    assert found["json"] == {"a": datasets.Value("int64")}
    assert found["bytes"] == datasets.Value("binary")
    assert found["ragged"] == datasets.List(datasets.Value("float64"))
    with pytest.raises(ps.ConfigError, match=r"'x' has no type in Arrow.*Hint: pass features="):
        ps.huggingface.features_of({"x": [object()]})
    with pytest.raises(ps.ConfigError, match=r"has 6 dimensions.*at most 5"):
        ps.huggingface.features_of({"x": np.zeros((1,) * 7)})


def test_pictures(tmp_path: Path) -> None:
    """Decoded pictures are arrays of one shape, which ``with_format("torch")`` makes tensors."""
    members = []
    for number in range(5):
        file = io.BytesIO()
        PIL.Image.new("RGB", (8, 6), (number, 0, 0)).save(file, "PNG")
        members.append({"__key__": f"{number}", "png": file.getvalue()})
    (tmp_path / "0.tar").write_bytes(shard(members))
    data = ps.huggingface.dataset(ps.shards(f"{tmp_path}/").decode(ps.Image("png", height=6, width=8)))
    assert data.features["png"] == datasets.Array3D(shape=(6, 8, 3), dtype="uint8")
    pictures = [example["png"] for example in data.with_format("torch")]
    assert [(tuple(picture.shape), int(picture[0, 0, 0])) for picture in pictures] == [((6, 8, 3), n) for n in range(5)]


# ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_resuming_is_exact(folder: Path) -> None:
    """From the state after any number of samples, also stored as JSON, a new data set gives the rest of the epoch."""
    made = pipeline(folder)
    data, whole, states = ps.huggingface.dataset(made), [], []
    for example in data:
        whole.append(int(example["cls"]))
        states.append(json.dumps(data.state_dict()))
    assert whole == expected(made)
    states.append(json.dumps(data.state_dict()))  # at the end
    for taken in (0, 1, 6, 7, 8, 50, 105, 106, 107):
        other = ps.huggingface.dataset(made)
        other.load_state_dict(json.loads(states[taken]))
        assert numbers(other) == whole[taken + 1 :]
        assert numbers(other)[:3] == whole[taken + 1 : taken + 4]  # as the library does: until another state is loaded


def test_resuming_another_epoch(folder: Path) -> None:
    """A state holds for its epoch; in another epoch, the whole epoch is read."""
    made = pipeline(folder)
    data = ps.huggingface.dataset(made)
    data.set_epoch(1)
    iterator = iter(data)
    head = [int(next(iterator)["cls"]) for _ in range(20)]
    state = data.state_dict()
    del iterator
    other = ps.huggingface.dataset(made)
    other.load_state_dict(state)
    other.set_epoch(1)
    assert head + numbers(other) == expected(made, epoch=1)
    other.set_epoch(2)
    assert numbers(other) == expected(made, epoch=2)


def test_resuming_after_filters(folder: Path) -> None:
    """Pipelines that drop samples, and the library's own filters, resume exactly, too."""
    made = pipeline(folder, batch=None).filter(lambda sample: sample["cls"] % 3 != 1).batch(8)
    data = ps.huggingface.dataset(made).filter(lambda example: example["cls"] % 2 == 0)
    whole = numbers(data)
    assert sorted(whole) == [number for number in range(0, TOTAL, 2) if number % 3 != 1]
    iterator = iter(data)
    for _ in range(11):
        next(iterator)
    state = data.state_dict()
    other = ps.huggingface.dataset(made).filter(lambda example: example["cls"] % 2 == 0)
    other.load_state_dict(state)
    assert numbers(other) == whole[11:]


# ── nodes and workers ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_an_epoch(folder: Path, workers: int) -> None:
    """Each sample comes once, whatever the number of workers; all readers together have the batches of one loader."""
    data = ps.huggingface.dataset(pipeline(folder))
    loader: Any = DataLoader(data, batch_size=None, num_workers=workers)
    assert sorted(numbers(loader)) == list(range(TOTAL))
    data.set_epoch(1)
    assert sorted(numbers(loader)) == list(range(TOTAL))


@pytest.mark.parametrize("world_size", [2, 3, 17])
def test_nodes_share_an_epoch(folder: Path, world_size: int) -> None:
    """``split_dataset_by_node`` gives each sample to one node, also for numbers that divide nothing."""
    made = pipeline(folder)
    indexed = len(list(folder.iterdir())) > 5
    data = ps.huggingface.dataset(made, index="require" if indexed else "stream")
    parts = [numbers(split_dataset_by_node(data, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert sorted(number for part in parts for number in part) == list(range(TOTAL))
    if world_size < 17:
        whole = expected(made)
        assert parts[1][:8] == whole[8:16]


def test_nodes_with_workers(folder: Path) -> None:
    """Workers of two nodes divide what their node has."""
    data = ps.huggingface.dataset(pipeline(folder), index="stream")
    found = []
    for rank in range(2):
        part = split_dataset_by_node(data, rank=rank, world_size=2)
        found += numbers(DataLoader(part, batch_size=None, num_workers=2))
    assert sorted(found) == list(range(TOTAL))


def test_nodes_must_read_alike(folder: Path) -> None:
    """What one node finds out about an index may not hold on another, so it has to be said."""
    data = ps.huggingface.dataset(pipeline(folder))
    with pytest.raises(ps.ConfigError, match=r'Hint: .*index="require"'):
        next(iter(split_dataset_by_node(data, rank=0, world_size=2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader(folder: Path, workers: int) -> None:
    """torchdata's ``StatefulDataLoader`` saves and restores the position in the midst of an epoch, with workers too."""

    def loader() -> Any:
        return StatefulDataLoader(ps.huggingface.dataset(pipeline(folder)), batch_size=5, num_workers=workers)

    def rows(batches: Iterable[dict[str, Any]]) -> list[int]:
        return [int(number) for batch in batches for number in batch["cls"]]

    whole = rows(loader())
    assert sorted(whole) == list(range(TOTAL))
    first = loader()
    iterator = iter(first)
    head = rows(next(iterator) for _ in range(7))
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    assert head + rows(second) == whole


def test_a_state_of_another_number_of_workers(folder: Path) -> None:
    """A state of one reader is refused by another one, in words."""
    data = ps.huggingface.dataset(pipeline(folder), index="stream")
    next(iter(data))
    half = split_dataset_by_node(data, rank=0, world_size=2)
    half.load_state_dict(data.state_dict())
    with pytest.raises(ps.ConfigError, match="same number of nodes and workers"):
        next(iter(half))
    data.load_state_dict({"examples_iterable": {"shard_idx": 0}, "epoch": 0})
    with pytest.raises(ps.ConfigError, match="not the state of a pipeline"):
        next(iter(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "split_dataset_by_node"),
        ({"threads": -1}, "threads"),
        ({"stride": (0, 2)}, "stride= is not an option"),
    ],
)
def test_bad_options(folder: Path, options: dict[str, Any], message: str) -> None:
    """Options that divide the data, and those that a loader refuses, are refused when the data set is made."""
    with pytest.raises(ps.ConfigError, match=message):
        ps.huggingface.dataset(pipeline(folder), **options)
    with pytest.raises(ps.ConfigError, match=r"features= must be a datasets\.Features, not dict"):
        ps.huggingface.dataset(ps.shards("memory://none/"), features={"a": "int64"})
    with pytest.raises(ps.ConfigError, match="must be given a pipeline"):
        ps.huggingface.dataset("s3://bucket/")


@pytest.mark.parametrize("page", ["docs/guides/huggingface.md"])
def test_the_page_runs(page: str, tmp_path: Path) -> None:
    """What the page shows as runnable runs, in order, on shards of pictures."""
    run_page(page, "huggingface", tmp_path)


def test_missing_data_is_the_engines_error(tmp_path: Path) -> None:
    """An error of the engine reaches the caller as it is."""
    with pytest.raises(ps.PenstockError, match="nowhere"):
        ps.huggingface.dataset(ps.shards(f"{tmp_path}/nowhere/"))


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "csv.bz2", "csv.xz", "zip"])
def test_compressed_files_stream(suffix: str, tmp_path: Path) -> None:
    """``load_dataset(..., streaming=True)`` reads files of fsspec's URLs, plain and compressed."""
    table = "cls,txt\n" + "".join(f"{number},sample {number}\n" for number in range(TOTAL))
    pack = {"csv": bytes, "csv.gz": gzip.compress, "csv.bz2": bz2.compress, "csv.xz": lzma.compress}.get(suffix, zipped)
    (tmp_path / f"table.{suffix}").write_bytes(pack(table.encode()))
    found = datasets.load_dataset(
        "csv", data_files=f"penstock://file{tmp_path}/table.{suffix}", split="train", streaming=True
    )
    assert numbers(found) == list(range(TOTAL))


def zipped(data: bytes) -> bytes:
    """An archive with one file."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writing:
        writing.writestr("table.csv", data)
    return archive.getvalue()
