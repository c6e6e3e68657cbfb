"""Formats that are looked into before they are read, among worker processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from connecting import connection_to
from loading import formatted, index, number_of
from penstock.errors import ObjectChangedError
from resuming import assert_same

pytestmark = pytest.mark.server


@pytest.mark.parametrize("name", ["parquet", "zip", "mds"])
def test_worker_processes_give_the_same_batches(tmp_path: Path, name: str) -> None:
    """By range, entered inside, with fields left out: what threads give, and the same bytes saved."""
    (tmp_path / "data").mkdir()
    for shard in range(3):
        samples = [
            {"__key__": f"{shard}{at:03d}", "n": b"%d" % (100 * shard + at), "big": bytes([at]) * 3000}
            for at in range(20)
        ]
        (tmp_path / "data" / f"s{shard}.{name}").write_bytes(formatted(name, samples))
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=16).select(["n"]).map(number_of).batch(7)
    options: dict[str, Any] = {
        "lanes": 4, "index_dir": index(made, tmp_path / "index"), "fetch": ps.FetchConfig(gap_bytes_max=1000),
    }  # fmt: skip
    with ps.Loader(made, threads=1, **options) as threads, ps.Loader(made, processes=2, **options) as processes:
        for left, right in zip(threads, processes, strict=True):
            assert_same(left, dict(right))
        if name != "mds":
            assert threads.statistics().saved_bytes == processes.statistics().saved_bytes > 0


@pytest.mark.parametrize("decoded", [True, False])
def test_what_is_passed_over_leaves_its_row_out(tmp_path: Path, decoded: bool) -> None:
    """A sample that an index counts and that is corrupt: workers leave out what threads do, decoded or not."""
    path = tmp_path / "data" / "s.zip"
    path.parent.mkdir()
    path.write_bytes(formatted("zip", [{"__key__": f"{at:03d}", "n": b"%03d" % at * 9} for at in range(40)]))
    made = ps.shards(f"{tmp_path}/data/", on_corrupt="skip_sample").shuffle(window=8)
    made = (made.decode(ps.Text("n")) if decoded else made).batch(7)
    place, data, info = index(made, tmp_path / "index"), bytearray(path.read_bytes()), path.stat()
    data[data.index(b"016" * 9)] = ord("x")
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    options: dict[str, Any] = {"lanes": 4, "index_dir": place, "fetch": ps.FetchConfig(gap_bytes_max=0)}
    with ps.Loader(made, threads=1, **options) as threads, ps.Loader(made, processes=2, **options) as processes:
        for left, right in zip(threads, processes, strict=True):
            assert_same(left, dict(right))
        for loader in (threads, processes):
            assert loader.statistics().samples == 39
            assert loader.statistics().skipped_samples == 1


@pytest.mark.parametrize("name", ["parquet", "zip", "mds"])
def test_from_a_bucket_as_from_a_folder(
    tmp_path: Path, s3_client: Any, bucket: str, s3_endpoint: Any, name: str
) -> None:
    """Listed, named one by one, through a cache: the same batches. A shard that is replaced is an error that names it."""
    (tmp_path / "data").mkdir()
    for shard in range(3):
        samples = [{"__key__": f"{shard}{at:03d}", "n": b"%d" % at, "big": bytes([at]) * 9000} for at in range(20)]
        path = tmp_path / "data" / f"s{shard}.{name}"
        path.write_bytes(formatted(name, samples))
        s3_client.put_object(Bucket=bucket, Key=f"data/{path.name}", Body=path.read_bytes())
    settings = connection_to(s3_endpoint)
    fetch = ps.FetchConfig(gap_bytes_max=4000)

    def keys(source: Any, **options: Any) -> list[str]:
        made = source.shuffle(window=16).select(["n"]).map(number_of).batch(7)
        with ps.Loader(made, lanes=3, threads=1, fetch=fetch, **options) as loader:
            return [key for batch in loader for key in batch["__key__"]]

    want = keys(ps.shards(f"{tmp_path}/data/"))
    assert len(want) == 60
    named = [f"s3://{bucket}/data/s{shard}.{name}" for shard in range(3)]
    assert keys(ps.shards(f"s3://{bucket}/data/", **settings)) == want
    assert keys(ps.shards(named, **settings)) == want
    for _ in range(2):
        assert keys(ps.shards(named, **settings), cache=f"{tmp_path}/cache:64MB") == want
    with ps.Loader(ps.shards(named, **settings).batch(7), threads=1, fetch=fetch) as loader:
        list(loader)  # pins the versions
        s3_client.put_object(Bucket=bucket, Key=f"data/s1.{name}", Body=formatted(name, [{"__key__": "0", "n": b"1"}]))
        with pytest.raises(ObjectChangedError, match=rf"s1\.{name}"):
            list(loader)
