"""Libraries that read and write through fsspec, each on a real S3 server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from penstock.fsspec import PenstockFileSystem, PenstockS3FileSystem

ROWS = 5000


@pytest.fixture
def frame() -> pd.DataFrame:
    """A table."""
    numbers = np.arange(ROWS)
    return pd.DataFrame({"number": numbers, "name": [f"row {number}" for number in numbers], "part": numbers % 4})


def test_fsspec_finds_the_protocol_itself(options: dict[str, Any], bucket: str) -> None:
    """In a new process nothing is registered by hand: the installed package says what ``penstock://`` is."""
    code = f"""
import fsspec, sys
with fsspec.open("penstock://s3/{bucket}/x", "wb", **{options!r}) as file:
    file.write(b"found")
print(fsspec.open("penstock://s3/{bucket}/x", **{options!r}).open().read(), "penstock.torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "b'found' False"


@pytest.mark.parametrize("protocol", ["s3://", "penstock://s3/"])
def test_pandas(frame: pd.DataFrame, options: dict[str, Any], bucket: str, protocol: str) -> None:
    """CSV, Parquet, JSON lines and pickles go there and back by a URL, compressed or not."""
    url = f"{protocol}{bucket}/pandas"
    frame.to_csv(f"{url}/t.csv", index=False, storage_options=options)
    frame.to_csv(f"{url}/t.csv.gz", index=False, storage_options=options)
    frame.to_parquet(f"{url}/t.parquet", storage_options=options)
    frame.to_json(f"{url}/t.jsonl", orient="records", lines=True, storage_options=options)
    frame.to_pickle(f"{url}/t.pkl", storage_options=options)
    for read in (
        pd.read_csv(f"{url}/t.csv", storage_options=options),
        pd.read_csv(f"{url}/t.csv.gz", storage_options=options),
        pd.read_parquet(f"{url}/t.parquet", storage_options=options),
        pd.read_json(f"{url}/t.jsonl", lines=True, storage_options=options),
        pd.read_pickle(f"{url}/t.pkl", storage_options=options),
    ):
        pd.testing.assert_frame_equal(read, frame, check_dtype=False)
    columns = pd.read_parquet(f"{url}/t.parquet", columns=["part"], storage_options=options)
    assert columns["part"].sum() == frame["part"].sum()
    with pytest.raises(FileNotFoundError):
        pd.read_csv(f"{url}/none.csv", storage_options=options)


def test_pandas_leaves_nothing_half_written(options: dict[str, Any], bucket: str, files: PenstockS3FileSystem) -> None:
    """A table that cannot be written becomes no object."""

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("broken")

    broken = pd.DataFrame({"x": [1, Broken()]})
    with pytest.raises(RuntimeError):
        broken.to_csv(f"s3://{bucket}/broken.csv", storage_options=options)
    with pytest.raises((RuntimeError, pa.ArrowException)):
        broken.to_parquet(f"s3://{bucket}/broken.parquet", storage_options=options)
    assert files.find(bucket) == []


def test_pyarrow_dataset(frame: pd.DataFrame, bucket: str, files: PenstockS3FileSystem) -> None:
    """A partitioned dataset is written, discovered and filtered through the file system."""
    table = pa.Table.from_pandas(frame)
    pa.dataset.write_dataset(
        table, f"{bucket}/arrow", format="parquet", partitioning=["part"], partitioning_flavor="hive", filesystem=files
    )
    found = pa.dataset.dataset(f"{bucket}/arrow", format="parquet", partitioning="hive", filesystem=files)
    assert len(found.files) == 4
    assert found.count_rows() == ROWS
    chosen = found.to_table(columns=["number"], filter=pa.dataset.field("part") == 3)
    assert chosen["number"].to_pylist() == frame[frame["part"] == 3]["number"].to_list()
    pa.dataset.write_dataset(
        table, f"{bucket}/arrow", format="parquet", partitioning=["part"], partitioning_flavor="hive", filesystem=files,
        existing_data_behavior="delete_matching",
    )  # fmt: skip
    assert pa.parquet.read_table(f"{bucket}/arrow", filesystem=files).num_rows == ROWS
    wrapped = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(files))
    assert wrapped.get_file_info(f"{bucket}/none").type == pa.fs.FileType.NotFound
    wrapped.move(f"{bucket}/arrow/part=0/part-0.parquet", f"{bucket}/moved.parquet")
    assert pa.parquet.read_metadata(f"{bucket}/moved.parquet", filesystem=files).num_rows == ROWS // 4


def test_polars(frame: pd.DataFrame, options: dict[str, Any], bucket: str, files: PenstockS3FileSystem) -> None:
    """Polars reads an open file, writes one, and scans a pyarrow dataset; URLs go to its own reader."""
    import polars as pl

    table = pl.from_pandas(frame)
    with files.open(f"{bucket}/polars/t.parquet", "wb") as file:
        table.write_parquet(file)
    with files.open(f"{bucket}/polars/t.csv", "wb") as file:
        table.write_csv(file)
    with files.open(f"{bucket}/polars/t.parquet") as file:
        assert pl.read_parquet(file, columns=["number"])["number"].sum() == sum(range(ROWS))
    with files.open(f"{bucket}/polars/t.csv") as file:
        assert pl.read_csv(file).equals(table)
    lazy = pl.scan_pyarrow_dataset(pa.dataset.dataset(f"{bucket}/polars/t.parquet", filesystem=files))
    assert lazy.filter(pl.col("part") == 1).collect().height == ROWS // 4


def test_zarr(options: dict[str, Any], bucket: str, files: PenstockS3FileSystem) -> None:
    """An array is written and read chunk by chunk by the coroutines, by a URL or a file system."""
    import zarr

    data = np.random.default_rng(0).integers(0, 1000, (200, 300))
    array = zarr.create_array(
        f"s3://{bucket}/array.zarr", shape=data.shape, chunks=(20, 30), dtype=data.dtype, storage_options=options
    )
    array[:] = data
    again = zarr.open_array(f"penstock://s3/{bucket}/array.zarr", mode="r", storage_options=options)
    assert (again[:] == data).all()
    assert (again[33:77, 100:] == data[33:77, 100:]).all()
    store = zarr.storage.FsspecStore(PenstockS3FileSystem(asynchronous=True, **options), path=f"{bucket}/group")
    group = zarr.open_group(store, mode="w")
    group.create_array("inner", shape=(100,), chunks=(10,), shards=(50,), dtype="f4")[:] = np.arange(100)
    assert list(group.array_keys()) == ["inner"]
    assert group["inner"][25:75].tolist() == list(range(25, 75))
    del group["inner"]
    assert list(zarr.open_group(store, mode="r").array_keys()) == []
    assert [path for path in files.find(f"{bucket}/group") if "inner" in path] == []


def test_xarray(options: dict[str, Any], bucket: str, files: PenstockS3FileSystem) -> None:
    """A data set is stored as Zarr by a URL, and NetCDF is read from an open file."""
    import xarray as xr

    made = xr.Dataset({"t": (("x", "y"), np.arange(600.0).reshape(20, 30))}, coords={"x": np.arange(20)})
    made.to_zarr(f"s3://{bucket}/set.zarr", mode="w", storage_options=options, consolidated=False)
    again = xr.open_zarr(f"s3://{bucket}/set.zarr", storage_options=options, consolidated=False)
    xr.testing.assert_identical(again.load(), made)
    with files.open(f"{bucket}/set.nc", "wb") as file:
        buffer = io.BytesIO()
        made.to_netcdf(buffer, engine="h5netcdf")
        file.write(buffer.getvalue())
    with files.open(f"{bucket}/set.nc") as file:
        xr.testing.assert_identical(xr.open_dataset(file, engine="h5netcdf").load(), made)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's own use of pandas
def test_dask(frame: pd.DataFrame, options: dict[str, Any], bucket: str) -> None:
    """Frames and bytes are read and written in pieces, also by worker processes, which get the file system pickled."""
    import dask
    import dask.bytes
    import dask.dataframe as dd

    parts = dd.from_pandas(frame, npartitions=3)
    parts.to_parquet(f"penstock://s3/{bucket}/dask", storage_options=options)
    read = dd.read_parquet(f"penstock://s3/{bucket}/dask", storage_options=options)
    pd.testing.assert_frame_equal(read.compute(scheduler="sync").reset_index(drop=True), frame, check_dtype=False)
    parts.to_csv(f"s3://{bucket}/csv/*.csv", index=False, storage_options=options)
    total = dd.read_csv(f"s3://{bucket}/csv/*.csv", storage_options=options, blocksize=20_000)["number"].sum()
    assert total.compute(scheduler="threads") == sum(range(ROWS))
    with dask.config.set(scheduler="processes", num_workers=2):
        by_url = dd.read_csv(f"penstock://s3/{bucket}/csv/*.csv", storage_options=options)["number"].sum()
        assert by_url.compute() == sum(range(ROWS))
    _, blocks = dask.bytes.read_bytes(f"s3://{bucket}/csv/0.csv", blocksize=4000, delimiter=b"\n", **options)
    joined = b"".join(dask.compute(*blocks[0], scheduler="sync"))
    assert joined == fsspec.filesystem("s3", **options).cat_file(f"{bucket}/csv/0.csv")


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_datasets(
    frame: pd.DataFrame, options: dict[str, Any], bucket: str, tmp_path: Path, streaming: bool
) -> None:
    """``load_dataset`` reads globs of Parquet, JSON lines and compressed CSV, streamed and not; data sets are saved."""
    import datasets

    for number in range(3):
        piece = frame[frame["number"] % 3 == number]
        piece.to_parquet(f"s3://{bucket}/hf/{number}.parquet", storage_options=options)
        piece.to_json(f"s3://{bucket}/hf/{number}.jsonl", orient="records", lines=True, storage_options=options)
        piece.to_csv(f"s3://{bucket}/hf/{number}.csv.gz", index=False, storage_options=options)
    for kind, pattern in (("csv", "*.csv.gz"), ("parquet", "*.parquet"), ("json", "*.jsonl")):
        found = datasets.load_dataset(
            kind, data_files=f"s3://{bucket}/hf/{pattern}", split="train", streaming=streaming,
            storage_options=options, cache_dir=str(tmp_path),
        )  # fmt: skip
        assert sum(row["number"] for row in found) == sum(range(ROWS))
    if not streaming:
        found.save_to_disk(f"s3://{bucket}/saved", storage_options=options)
        again = datasets.load_from_disk(f"s3://{bucket}/saved", storage_options=options)
        assert again.num_rows == ROWS


def test_duckdb(frame: pd.DataFrame, options: dict[str, Any], bucket: str) -> None:
    """DuckDB queries and writes through the registered file system."""
    import duckdb

    frame.to_parquet(f"penstock://s3/{bucket}/duck/a.parquet", storage_options=options)
    frame.to_parquet(f"penstock://s3/{bucket}/duck/b.parquet", storage_options=options)
    frame.to_csv(f"penstock://s3/{bucket}/duck/a.csv", index=False, storage_options=options)
    with duckdb.connect() as database:
        database.register_filesystem(PenstockFileSystem(**options))
        url = f"penstock://s3/{bucket}/duck"
        assert database.execute(f"SELECT sum(number) FROM '{url}/*.parquet'").fetchone() == (2 * sum(range(ROWS)),)
        assert database.execute(f"SELECT count(*) FROM '{url}/a.csv' WHERE part = 1").fetchone() == (ROWS // 4,)
        database.execute(f"COPY (SELECT 42 AS answer) TO '{url}/out.parquet' (FORMAT parquet)")
        assert database.execute(f"SELECT answer FROM '{url}/out.parquet'").fetchone() == (42,)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # fsspec's block cache drops its file open
def test_fsspecs_own_wrappers(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    """Chained URLs, caching file systems, references and archives work on top."""
    files = fsspec.filesystem("s3", **options)
    files.pipe({f"{bucket}/w/{name}": name.encode() * 1000 for name in "abc"})
    with fsspec.open(
        f"simplecache::s3://{bucket}/w/a", s3=options, simplecache={"cache_storage": str(tmp_path)}
    ) as file:
        assert file.read() == b"a" * 1000
    with fsspec.open(f"filecache::s3://{bucket}/w/b", s3=options, filecache={"cache_storage": str(tmp_path)}) as file:
        assert file.read() == b"b" * 1000
    with fsspec.open(f"blockcache::s3://{bucket}/w/c", s3=options, blockcache={"cache_storage": str(tmp_path)}) as file:
        assert file.read() == b"c" * 1000
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inner.txt", "inner")
    files.pipe_file(f"{bucket}/x.zip", buffer.getvalue())
    with fsspec.open(f"zip://inner.txt::s3://{bucket}/x.zip", s3=options) as file:
        assert file.read() == b"inner"
    references = {"version": 1, "refs": {"joined": [f"s3://{bucket}/w/a", 10, 20], "text": "plain"}}
    mapped = fsspec.filesystem("reference", fo=references, remote_protocol="s3", remote_options=options)
    assert mapped.cat(["joined", "text"]) == {"joined": b"a" * 20, "text": b"plain"}
    both = fsspec.filesystem("dir", path=f"{bucket}/w", fs=files)
    assert sorted(both.ls("", detail=False)) == ["a", "b", "c"]
    generic = fsspec.filesystem("generic", default_method="current")
    assert os.fspath(tmp_path) and generic.cat_file(f"s3://{bucket}/w/a") == b"a" * 1000  # noqa: PT018
