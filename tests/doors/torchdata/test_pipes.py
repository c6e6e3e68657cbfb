"""DataPipes of TorchData 0.9, the last version that had them, through fsspec and iopath, on a real S3 server."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.testing.s3_server import S3Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.utils.data import DataLoader
    from torchdata.datapipes.iter import (
        FSSpecFileLister,
        FSSpecFileOpener,
        FSSpecSaver,
        IoPathFileLister,
        IoPathFileOpener,
        IoPathSaver,
        IterableWrapper,
    )

pytestmark = pytest.mark.filterwarnings("ignore:.*")
COUNT = 30


@pytest.fixture
def shards(s3_client: Any, bucket: str) -> dict[str, bytes]:
    """Members of three tar files in the bucket."""
    members = {}
    for shard in range(3):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number in range(shard, COUNT, 3):
                members[f"{number:02}.txt"] = data = b"%d" % number * 1000
                member = tarfile.TarInfo(f"{number:02}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        s3_client.put_object(Bucket=bucket, Key=f"train/{shard}.tar", Body=buffer.getvalue())
    return members


def collected(pipe: Any, workers: int) -> dict[str, bytes]:
    """What a loader gets: name and bytes of each member."""
    read = pipe.sharding_filter().load_from_tar().map(member)
    return dict(DataLoader(read, batch_size=None, num_workers=workers))


def member(item: Any) -> tuple[str, bytes]:
    """Name and bytes of a member of a tar file."""
    return item[0].rpartition("/")[2], item[1].read()


def named(item: Any) -> tuple[str, Any]:
    """A file as ``load_from_tar`` wants it."""
    return item


@pytest.mark.parametrize("workers", [0, 2])
def test_fsspec(s3_endpoint: S3Server, bucket: str, shards: dict[str, bytes], workers: int) -> None:
    """Files are listed, opened and saved by fsspec, and the same pipe runs in the workers of a DataLoader."""
    ps.fsspec.register("s3")
    options = {
        "endpoint_url": s3_endpoint.endpoint_url,
        "key": s3_endpoint.access_key,
        "secret": s3_endpoint.secret_key,
    }
    listed = FSSpecFileLister(f"s3://{bucket}/train", masks=["*.tar"], **options)
    assert sorted(listed) == [f"s3://{bucket}/train/{shard}.tar" for shard in range(3)]
    assert collected(FSSpecFileOpener(listed, mode="rb", **options).map(named), workers) == shards
    saver = FSSpecSaver(
        IterableWrapper([("a", b"saved")]), mode="wb", filepath_fn=f"s3://{bucket}/{{}}".format, **options
    )
    assert list(saver) == [f"s3://{bucket}/a"]
    assert ps.fsspec.PenstockS3FileSystem(**options).cat_file(f"{bucket}/a") == b"saved"


def test_iopath(
    s3_endpoint: S3Server, bucket: str, shards: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are listed, opened and saved by iopath with penstock's handler."""
    monkeypatch.chdir(tmp_path)  # the saver takes URLs for local paths when it makes its lock files
    from iopath.common.file_io import PathManager

    from penstock.iopath import PenstockPathHandler

    keys = ps.Credentials(access_key=s3_endpoint.access_key, secret_key=s3_endpoint.secret_key)
    manager = PathManager()
    manager.register_handler(PenstockPathHandler(endpoint_url=s3_endpoint.endpoint_url, credentials=keys))
    listed = IoPathFileLister(f"s3://{bucket}/train", masks=["*.tar"], pathmgr=manager)
    assert sorted(listed) == [f"s3://{bucket}/train/{shard}.tar" for shard in range(3)]
    assert collected(IoPathFileOpener(listed, mode="rb", pathmgr=manager).map(named), 0) == shards
    saver = IoPathSaver(
        IterableWrapper([("a", b"saved")]), mode="wb", filepath_fn=f"s3://{bucket}/{{}}".format, pathmgr=manager
    )
    assert list(saver) == [f"s3://{bucket}/a"]
    with manager.open(f"s3://{bucket}/a", "rb") as file:
        assert file.read() == b"saved"
