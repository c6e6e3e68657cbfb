"""The origin keeps S3's rules where the benchmarks lean on them (needs nginx with Lua, and boto3)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3")

from botocore.config import Config  # noqa: E402
from botocore.exceptions import ClientError  # noqa: E402

from penstock.bench.origin.server import MODULE, Origin  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.skipif(not MODULE.exists(), reason="nginx has no Lua")]
LETTERS = ["a", "b", "/", "é", " ", "+", "%", "&", "<", "日", "😀", "~", "-", "\uffff"]


def client_of(origin: Origin) -> Any:
    config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0})
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y"}
    ca = str(origin.ca_path) if origin.ca_path else None
    return boto3.client("s3", endpoint_url=origin.url, region_name="us-east-1", verify=ca, config=config, **keys)


def model(keys: list[str], prefix: str, delimiter: str, start_after: str) -> tuple[list[str], list[str]]:
    """Keys and common prefixes that S3 documents for this listing."""
    found, prefixes = [], {}
    for key in keys:
        if key.startswith(prefix) and key.encode() > start_after.encode():
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                found.append(key)
            else:
                prefixes[key[: cut + len(delimiter)]] = None
    return found, list(prefixes)


def test_listings_equal_the_model(tmp_path: Path) -> None:
    """Any prefix, delimiter, start and page size lists exactly S3's keys and common prefixes, in byte order."""
    chance = random.Random(1)
    words = {"".join(chance.choices(LETTERS, k=chance.randint(1, 7))) for _ in range(3000)}
    keys = sorted((word for word in words if not word.startswith("/")), key=str.encode)
    with Origin(tmp_path, listed={"bucket": keys}) as origin:
        paginator = client_of(origin).get_paginator("list_objects_v2")
        for _ in range(60):
            prefix = "".join(chance.choices(LETTERS, k=chance.randint(0, 2)))
            delimiter, after = chance.choice(["", "/", "a", "é/"]), chance.choice(["", "", chance.choice(keys)])
            paging = {"PageSize": chance.choice([1, 3, 7, 100]) if prefix else 1000}
            asked = {"Bucket": "bucket", "Prefix": prefix, "Delimiter": delimiter, "StartAfter": after}
            found: list[str] = []
            prefixes: list[str] = []
            for page in paginator.paginate(PaginationConfig=paging, **asked):
                contents, common = page.get("Contents", []), page.get("CommonPrefixes", [])
                assert page["KeyCount"] == len(contents) + len(common) <= paging["PageSize"]
                found += [item["Key"] for item in contents]
                prefixes += [item["Prefix"] for item in common]
            assert (found, prefixes) == model(keys, prefix, delimiter, after), asked


def test_objects_ranges_and_conditions(tmp_path: Path) -> None:
    """A folder's files are objects: listed with the ETag and size they are served with, ranged, refused as S3 does."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "key").write_bytes(b"0123456789")
    with Origin(tmp_path, tls=True) as origin:
        client = client_of(origin)
        listed = client.list_objects_v2(Bucket="bucket")["Contents"][0]
        got = client.get_object(Bucket="bucket", Key="key", Range="bytes=2-4", IfMatch=listed["ETag"])
        with got["Body"] as body:
            assert (body.read(), listed["Size"], got["ETag"]) == (b"234", 10, listed["ETag"])
        bad = {404: {"Key": "no"}, 412: {"Key": "key", "IfMatch": '"x"'}, 416: {"Key": "key", "Range": "bytes=99-"}}
        for status, asked in bad.items():
            with pytest.raises(ClientError) as refused:
                client.get_object(Bucket="bucket", **asked)
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
        client.close()


def test_listed_keys_can_have_content(tmp_path: Path) -> None:
    """Listed keys without files are served with the size and ETag that are listed; other keys do not exist."""
    (tmp_path / "bucket" / "a").mkdir(parents=True)
    (tmp_path / "bucket" / "a" / "file").write_bytes(b"real")
    with Origin(tmp_path, listed={"bucket": ["a/x y", "b"]}, content=b"0123456789") as origin:
        client = client_of(origin)
        for item in client.list_objects_v2(Bucket="bucket")["Contents"]:
            got = client.get_object(Bucket="bucket", Key=item["Key"], IfMatch=item["ETag"], Range="bytes=1-3")
            with got["Body"] as body:
                assert body.read() == (b"eal" if item["Key"] == "a/file" else b"123")
            assert got["ETag"] == item["ETag"]
            assert got["ContentRange"].rpartition("/")[2] == str(item["Size"])
        for key in ("a", "a/", "a/x", "c"):
            with pytest.raises(ClientError) as refused:
                client.head_object(Bucket="bucket", Key=key)
            assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
        client.close()


@pytest.mark.parametrize("key", ["folder", "folder/"])
def test_a_folder_is_no_object(tmp_path: Path, key: str) -> None:
    """A folder of files is answered like a missing key: some file systems take any other answer for a file."""
    (tmp_path / "bucket" / "folder").mkdir(parents=True)
    (tmp_path / "bucket" / "folder" / "key").write_bytes(b"0")
    with Origin(tmp_path) as origin:
        client = client_of(origin)
        with pytest.raises(ClientError) as refused:
            client.head_object(Bucket="bucket", Key=key)
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
        client.close()


def test_it_ends_with_its_block(tmp_path: Path) -> None:
    """Leaving the block, by an error too, ends nginx and removes its folder."""
    seen: list[Any] = []

    def interrupted() -> None:
        with Origin(tmp_path) as origin:
            seen.extend((origin._process.pid, origin._folder))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    pid, folder = seen
    assert not Path("/proc", str(pid)).exists()
    assert not folder.exists()


def test_what_is_written_is_listed(tmp_path: Path) -> None:
    """With lists_writes, names and sizes of objects, of uploads in parts and of copies are listed, until they are deleted."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "m").write_bytes(b"there")
    with Origin(tmp_path, lists_writes=True) as origin:
        client = client_of(origin)
        client.put_object(Bucket="bucket", Key="a", Body=b"x" * 7)
        upload = client.create_multipart_upload(Bucket="bucket", Key="z")["UploadId"]
        for number in (1, 2):
            client.upload_part(Bucket="bucket", Key="z", UploadId=upload, PartNumber=number, Body=b"x" * 10)
        client.complete_multipart_upload(Bucket="bucket", Key="z", UploadId=upload)

        def listed() -> dict[str, int]:
            return {item["Key"]: item["Size"] for item in client.list_objects_v2(Bucket="bucket")["Contents"]}

        assert listed() == {"a": 7, "m": 5, "z": 20}
        assert client.head_object(Bucket="bucket", Key="z")["ContentLength"] == 20
        client.delete_object(Bucket="bucket", Key="a")
        assert listed() == {"m": 5, "z": 20}
        client.close()
