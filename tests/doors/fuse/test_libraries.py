"""Libraries that read data sets from files read them on a mounted bucket."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from doors.fuse.data_set import CLASSES, PARQUET_ROWS, PICTURES, SHARD_SAMPLES, SHARDS, Folders


def test_open(folders: Folders) -> None:
    """Buffered, unbuffered, text and positional reads give the same, in any order, up to and past the end."""
    draw = random.Random(5)
    names = [path.relative_to(folders.local) for path in folders.local.rglob("*") if path.is_file()]
    for name in draw.sample(names, 60):
        assert (folders.mounted / name).read_bytes() == (folders.local / name).read_bytes()
    for name in (name for name in names if name.suffix == ".txt"):
        with (
            (folders.mounted / name).open(encoding="utf-8") as ours,
            (folders.local / name).open(encoding="utf-8") as theirs,
        ):
            assert list(ours) == list(theirs)
    files = [(root / "fio" / "verified").open("rb", buffering=0) for root in folders]
    size = os.fstat(files[0].fileno()).st_size
    for _ in range(300):
        offset, length = draw.randrange(size + 9999), draw.randrange(1 << draw.randrange(22))
        ours, theirs = (os.pread(file.fileno(), length, offset) for file in files)
        assert ours == theirs
    for file in files:
        file.close()


def test_mmap(folders: Folders) -> None:
    """A mapped file has the same bytes everywhere, and many threads may fault its pages at once."""
    with (folders.mounted / "fio" / "verified").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    expected = (folders.local / "fio" / "verified").read_bytes()
    mapped.madvise(mmap.MADV_RANDOM)
    offsets = random.Random(6).choices(range(len(expected)), k=400)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda offset: mapped[offset : offset + 5000], offsets))
    assert found == [expected[offset : offset + 5000] for offset in offsets]
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    assert zlib.crc32(mapped) == zlib.crc32(expected)
    assert mapped.find(expected[-40:]) == expected.find(expected[-40:])
    mapped.close()


def test_numpy(folders: Folders) -> None:
    """``np.load`` reads an array, and with ``mmap_mode="r"`` single rows and columns of it."""
    ours = np.load(folders.mounted / "arrays" / "matrix.npy", mmap_mode="r")
    theirs = np.load(folders.local / "arrays" / "matrix.npy")
    rows = np.random.default_rng(7).permutation(len(theirs))[:200]
    assert np.array_equal(ours[rows], theirs[rows])
    assert np.array_equal(ours[:, 17], theirs[:, 17])
    assert np.array_equal(np.load(folders.mounted / "arrays" / "matrix.npy"), theirs)


def test_h5py(folders: Folders) -> None:
    """``h5py`` reads attributes, compressed chunks in any order, and slices of a contiguous data set."""
    with (
        h5py.File(folders.mounted / "arrays" / "data.h5") as ours,
        h5py.File(folders.local / "arrays" / "data.h5") as theirs,
    ):
        assert ours["x"].attrs["unit"] == "pixel"
        for begin in (1990, 3, 777, 1200):
            assert np.array_equal(ours["x"][begin : begin + 120, ::3], theirs["x"][begin : begin + 120, ::3])
        assert np.array_equal(ours["y"][::1000], theirs["y"][::1000])
        assert np.array_equal(ours["x"][...], theirs["x"][...])


def test_torch(folders: Folders) -> None:
    """``torch.load`` reads weights, at once and mapped."""
    theirs = torch.load(folders.local / "arrays" / "weights.pt")
    for is_mapped in (True, False):
        ours = torch.load(folders.mounted / "arrays" / "weights.pt", mmap=is_mapped)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_safetensors(folders: Folders) -> None:
    """``safetensors`` reads a file at once, and single tensors and slices of it."""
    path = Path("arrays") / "weights.safetensors"
    theirs = load_file(folders.local / path)
    ours = load_file(folders.mounted / path)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with safe_open(folders.mounted / path, framework="pt") as file:
        assert set(file.keys()) == set(theirs)
        assert torch.equal(file.get_tensor("layer3"), theirs["layer3"])
        assert torch.equal(file.get_slice("layer5")[100:200], theirs["layer5"][100:200])


def webdataset_samples(root: Path) -> list[tuple[str, int, bytes]]:
    """Return what the samples of the tar shards are, as webdataset reads them."""
    pattern = str(root / f"shards/{{000..{SHARDS - 1:03d}}}.tar")
    samples = list(webdataset.WebDataset(pattern, shardshuffle=False))
    gc.collect()  # it leaves the shards to the collector
    return [(sample["__key__"], zlib.crc32(sample["bin"]), sample["cls"]) for sample in samples]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it does not close the shards
def test_webdataset(folders: Folders) -> None:
    """``webdataset`` reads the samples of tar shards."""
    found = webdataset_samples(folders.mounted)
    assert len(found) == SHARDS * SHARD_SAMPLES
    assert found == webdataset_samples(folders.local)


class ImageFolder(Dataset[tuple[Any, int]]):
    """Pictures in folders named after their classes, found as torchvision finds them."""

    def __init__(self, root: Path) -> None:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.files = [
            (os.path.join(base, name), number)
            for number, label in enumerate(classes)
            for base, _, names in sorted(os.walk(root / label, followlinks=True))
            for name in sorted(names)
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.files[number]
        with open(path, "rb") as file:
            return np.array(Image.open(file).convert("RGB")), label


def test_image_folder(folders: Folders) -> None:
    """Two worker processes of a ``DataLoader`` decode pictures in random order with PIL."""
    ours, theirs = ImageFolder(folders.mounted / "images"), ImageFolder(folders.local / "images")
    assert len(ours) == len(theirs) == len(CLASSES) * PICTURES
    order = random.Random(8).sample(range(len(ours)), len(ours))
    loader = DataLoader(ours, batch_size=None, sampler=order, num_workers=2, multiprocessing_context="spawn")
    for number, (pixels, label) in zip(order, loader, strict=True):
        assert label == theirs[number][1]
        assert np.array_equal(pixels, theirs[number][0])


QUERY = """
    select year, label, count(*), sum(id), round(max(score), 9)
    from read_parquet('{root}/parquet/*/*.parquet', hive_partitioning = true)
    where label % 3 = 1 group by all order by all
"""


def test_duckdb(folders: Folders) -> None:
    """DuckDB, in a process of its own, finds partitioned Parquet files by a pattern and answers a query on them."""
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-c", f"import duckdb; print(duckdb.sql({QUERY.format(root=root)!r}).fetchall())"],
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout
        for root in folders
    )
    assert ours.count(b"(202") == 6
    assert ours == theirs


@pytest.fixture(params=["read", "mapped", "dataset"])
def read_parquet(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    """A way in which pyarrow reads a folder of Parquet files."""
    ways: dict[str, Callable[[Path], Any]] = {
        "read": pq.read_table,
        "mapped": lambda root: pq.read_table(root, memory_map=True, columns=["score", "year"]),
        "dataset": lambda root: pyarrow.dataset.dataset(root, partitioning="hive").to_table(
            filter=(pyarrow.dataset.field("id") > PARQUET_ROWS - 9) & (pyarrow.dataset.field("year") == 2025)
        ),
    }
    return ways[request.param]


def test_pyarrow(folders: Folders, read_parquet: Callable[[Path], Any]) -> None:
    """pyarrow reads a partitioned data set: all of it, mapped columns, and the row groups that a filter leaves."""
    ours, theirs = (read_parquet(root / "parquet") for root in folders)
    assert len(ours) > 0
    assert ours.equals(theirs)


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the directories of a tree by their relative paths, with sorted names."""
    for base, directories, files in os.walk(root):
        directories.sort()
        yield os.path.relpath(base, root), sorted(directories), sorted(files)


def test_walking(folders: Folders) -> None:
    """``os.walk``, ``glob`` and ``os.scandir`` find the same names, kinds and sizes."""
    assert list(walk(folders.mounted)) == list(walk(folders.local))
    found = [
        sorted((str(path.relative_to(root)), path.stat().st_size) for path in root.glob("**/*.[jpt]*"))
        for root in folders
    ]
    assert len(found[0]) > 300
    assert found[0] == found[1]
