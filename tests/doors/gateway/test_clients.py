"""Clients that nobody here wrote list transformed objects and read them whole and by ranges: same bytes, one transform each."""

from __future__ import annotations

import concurrent.futures
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from gateways import ACCESS_KEY, REGION, SECRET_KEY, RunningGateway

BUCKET = "views"
MIB = 1 << 20
BIN = Path(sys.executable).parent


def run(gateway: RunningGateway, *command: object) -> bytes:
    """Return what a command printed, with the gateway as its endpoint."""
    found = subprocess.run(
        [str(word) for word in command], env=gateway.environment, capture_output=True, check=False, timeout=100
    )
    assert found.returncode == 0, f"{command}: status {found.returncode}\n{found.stderr.decode()}"
    return found.stdout


def boto3_client(gateway: RunningGateway) -> object:
    return boto3.client(
        "s3", endpoint_url=gateway.url, region_name=REGION, aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, config=Config(retries={"max_attempts": 1}),
    )  # fmt: skip


def boto3_sizes(gateway: RunningGateway) -> dict[str, int]:
    return {row["Key"]: row["Size"] for row in boto3_client(gateway).list_objects_v2(Bucket=BUCKET)["Contents"]}


def boto3_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return bytes(boto3_client(gateway).get_object(Bucket=BUCKET, Key=key)["Body"].read())


def boto3_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    into = io.BytesIO()
    parts = TransferConfig(multipart_threshold=MIB, multipart_chunksize=MIB, max_concurrency=8)
    boto3_client(gateway).download_fileobj(BUCKET, key, into, Config=parts)
    return into.getvalue()


def awscli_sizes(gateway: RunningGateway) -> dict[str, int]:
    rows = run(gateway, BIN / "aws", "s3", "ls", "--recursive", f"s3://{BUCKET}/").decode().splitlines()
    return {row.split()[3]: int(row.split()[2]) for row in rows}


def awscli_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return run(gateway, BIN / "aws", "s3", "cp", f"s3://{BUCKET}/{key}", "-")


def awscli_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    run(gateway, BIN / "aws", "s3", "sync", f"s3://{BUCKET}/", folder)  # in parts of 8 MiB
    return (folder / key).read_bytes()


_S3FS = """
import json, sys, s3fs
what, bucket, key, block = sys.argv[1:]
files = s3fs.S3FileSystem(config_kwargs={"retries": {"max_attempts": 1}})
if what == "sizes":
    print(json.dumps({row["name"].partition("/")[2]: row["size"] for row in files.find(bucket, detail=True).values()}))
elif what == "whole":
    files.ls(f"{bucket}/data")
    sys.stdout.buffer.write(files.cat_file(f"{bucket}/{key}"))
else:
    files.ls(f"{bucket}/data")
    with files.open(f"{bucket}/{key}", block_size=int(block)) as file:
        while piece := file.read(777_777):
            sys.stdout.buffer.write(piece)
"""


def s3fs_sizes(gateway: RunningGateway) -> dict[str, int]:
    return dict(json.loads(run(gateway, sys.executable, "-c", _S3FS, "sizes", BUCKET, "", MIB)))


def s3fs_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return run(gateway, sys.executable, "-c", _S3FS, "whole", BUCKET, key, MIB)


def s3fs_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return run(gateway, sys.executable, "-c", _S3FS, "ranges", BUCKET, key, 5 * MIB)


_S3TORCHCONNECTOR = """
import json, sys
from s3torchconnector import S3MapDataset, S3ClientConfig
what, bucket, key, url, region = sys.argv[1:]
config = S3ClientConfig(force_path_style=True, part_size=5 << 20)
data = S3MapDataset.from_prefix(f"s3://{bucket}/", endpoint=url, region=region, s3client_config=config)
readers = {data[i].key: data[i] for i in range(len(data))}
if what == "sizes":
    print(json.dumps({name: reader._object_info.size for name, reader in readers.items() if reader._object_info}))
elif what == "whole":
    sys.stdout.buffer.write(readers[key].read())
else:
    reader = readers[key]
    end = reader.seek(0, 2)
    half = end // 2
    reader.seek(half)
    second = reader.read()
    reader.seek(0)
    sys.stdout.buffer.write(reader.read(half) + second)
"""


def _connector(gateway: RunningGateway, what: str, key: str = "") -> bytes:
    return run(gateway, sys.executable, "-c", _S3TORCHCONNECTOR, what, BUCKET, key, gateway.url, REGION)


def connector_sizes(gateway: RunningGateway) -> dict[str, int]:
    return dict(json.loads(_connector(gateway, "sizes")))


def connector_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return _connector(gateway, "whole", key)


def connector_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return _connector(gateway, "ranges", key)


def _rclone(gateway: RunningGateway, *words: object) -> bytes:
    remote = [
        "--s3-provider=Other", "--s3-env-auth", f"--s3-endpoint={gateway.url}", f"--s3-region={REGION}", "--retries=1",
        "--low-level-retries=1", "--config=/dev/null",
    ]  # fmt: skip
    return run(gateway, BIN / "rclone", *remote, *words)


def rclone_sizes(gateway: RunningGateway) -> dict[str, int]:
    rows = json.loads(_rclone(gateway, "lsjson", "-R", "--files-only", f":s3:{BUCKET}"))
    return {row["Path"]: row["Size"] for row in rows}


def rclone_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    return _rclone(gateway, "cat", f":s3:{BUCKET}/{key}")


def rclone_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    streams = ["--multi-thread-cutoff=1M", "--multi-thread-streams=8", "--multi-thread-chunk-size=1M"]
    _rclone(gateway, *streams, "copy", f":s3:{BUCKET}", folder)
    return (folder / key).read_bytes()


def _minio(gateway: RunningGateway) -> object:
    from minio import Minio

    host = gateway.url.removeprefix("http://")
    return Minio(host, access_key=ACCESS_KEY, secret_key=SECRET_KEY, secure=False, region=REGION)


def minio_sizes(gateway: RunningGateway) -> dict[str, int]:
    return {row.object_name: row.size for row in _minio(gateway).list_objects(BUCKET, recursive=True)}


def minio_whole(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    _minio(gateway).fget_object(BUCKET, key, str(folder / "file"))
    return (folder / "file").read_bytes()


def minio_ranges(gateway: RunningGateway, key: str, folder: Path) -> bytes:
    client = _minio(gateway)
    size_bytes = client.stat_object(BUCKET, key).size

    def part(start: int) -> bytes:
        answer = client.get_object(BUCKET, key, offset=start, length=min(MIB, size_bytes - start))
        try:
            return bytes(answer.read())
        finally:
            answer.close()
            answer.release_conn()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return b"".join(pool.map(part, range(0, size_bytes, MIB)))


CLIENTS = {
    "boto3": (boto3_sizes, boto3_whole, boto3_ranges),
    "awscli": (awscli_sizes, awscli_whole, awscli_ranges),
    "s3fs": (s3fs_sizes, s3fs_whole, s3fs_ranges),
    "s3torchconnector": (connector_sizes, connector_whole, connector_ranges),
    "rclone": (rclone_sizes, rclone_whole, rclone_ranges),
    "minio": (minio_sizes, minio_whole, minio_ranges),
}

Sizes = Callable[[RunningGateway], dict[str, int]]
Reading = Callable[[RunningGateway, str, Path], bytes]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_listing_tells_true_sizes(client: str, views: RunningGateway, contents: dict[str, bytes]) -> None:
    """A client that takes sizes from a listing learns those of the transformed objects, before anybody has read them."""
    sizes: Sizes = CLIENTS[client][0]
    assert sizes(views) == {key: len(data) for key, data in contents.items()}
    assert views.transforms_count() == len(contents)


@pytest.mark.parametrize("way", ["whole", "ranges"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_what_the_transform_made(
    client: str, way: str, views: RunningGateway, contents: dict[str, bytes], tmp_path: Path
) -> None:
    """Reading whole and by many ranges at once gives the bytes of the transform, which runs once for each object."""
    read: Reading = CLIENTS[client][1 if way == "whole" else 2]
    key = "data/part-1.txt"
    folder = tmp_path / "downloads"
    folder.mkdir()
    assert read(views, key, folder) == contents[key]
    assert views.transforms_count() <= len(contents)


def test_pandas_reads_a_table_that_was_lines_of_json(start: Callable[..., RunningGateway], tmp_path: Path) -> None:
    """``pandas.read_csv`` of an ``s3://`` URL reads what ``jsonl2csv`` makes."""
    folder = tmp_path / "tables"
    folder.mkdir()
    rows = [{"name": f"ü{number}", "width": number} for number in range(1000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gateway = start("--upstream", str(folder), "--transform", "jsonl2csv")
    code = "import json, pandas; print(json.dumps(pandas.read_csv('s3://tables/rows.jsonl').to_dict('records')))"
    assert json.loads(run(gateway, sys.executable, "-c", code)) == rows
