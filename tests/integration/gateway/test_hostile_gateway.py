"""A whole gateway in processes of its own, against clients that mean harm and files that change under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from fronts import s3_client
from servers.gateway import Gateway

pytestmark = pytest.mark.server

SECRET = "a-secret-of-the-usual-length"
Start = Callable[..., Gateway]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts gateways that end with the test."""
    started: list[Gateway] = []

    def make(*arguments: str, **environment: str) -> Gateway:
        folder = tmp_path / f"gateway{len(started)}"
        folder.mkdir()
        started.append(Gateway(*arguments, "--port", "0", folder=folder, environment=environment))
        return started[-1]

    yield make
    for each in started:
        if each.process.poll() is None:
            each.kill()


def client_of(gateway: Gateway, access_key: str, secret_key: str = SECRET, **options: Any) -> Any:
    return s3_client(gateway.url, aws_access_key_id=access_key, aws_secret_access_key=secret_key, **options)


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return str(caught.value.response["Error"]["Code"])


SCOPES = """
directory = "{root}"
read_write = true

[access_points.secret]
upstream = "{root}/secret-files"
keys = ["owner"]
"""


@pytest.mark.parametrize(
    "source",
    ["secret/k", "/secret/k", "//secret/k", "%73ecret/k", "secret%2Fk", "secret/k?versionId=null",
     "arn:aws:s3:us-east-1:000000000000:accesspoint/secret/object/k",
     "arn%3Aaws%3As3%3Aus-east-1%3A000000000000%3Aaccesspoint%2Fsecret%2Fobject%2Fk",
     "arn:aws:s3-object-lambda:us-east-1:000000000000:accesspoint/secret/object/k"],
)  # fmt: skip
def test_no_copy_reads_what_its_caller_may_not(start: Start, tmp_path: Path, source: str) -> None:
    """Whatever way a copy names the source's bucket, the caller's key must be good for it."""
    root = tmp_path / "root"
    (root / "secret-files").mkdir(parents=True)
    (root / "open").mkdir()
    outside = tmp_path / "secret-files"
    outside.mkdir()
    (outside / "k").write_bytes(b"the secret")
    (tmp_path / "gateway.toml").write_text(SCOPES.format(root=root).replace(f"{root}/secret-files", str(outside)))
    keys = f"owner:{SECRET}:rw,other:{SECRET}:rw,narrow:{SECRET}:rw:open"
    gateway = start("--config", str(tmp_path / "gateway.toml"), PENSTOCK_GATEWAY_KEYS=keys)
    assert client_of(gateway, "owner").get_object(Bucket="secret", Key="k")["Body"].read() == b"the secret"
    for name in ("other", "narrow"):
        client = client_of(gateway, name)
        assert code_of(client.get_object, Bucket="secret", Key="k") == "AccessDenied"
        code = code_of(client.copy_object, Bucket="open", Key="stolen", CopySource=source)
        assert code in ("AccessDenied", "InvalidArgument", "NoSuchBucket")
        upload = client.create_multipart_upload(Bucket="open", Key="stolen")["UploadId"]
        where = {"Bucket": "open", "Key": "stolen", "UploadId": upload, "PartNumber": 1, "CopySource": source}
        assert code_of(client.upload_part_copy, **where) == code
    assert not (root / "open" / "stolen").exists()
