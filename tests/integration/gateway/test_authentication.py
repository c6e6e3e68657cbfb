"""Signed requests over real sockets: boto3, presigned URLs, uploads in chunks, and clients that mean harm."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from fronts import RunningFront, raw_exchange, s3_client
from penstock.compose import split
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store import MemoryStore
from penstock.store.s3 import presigned_get
from signed_requests import KEY, READER

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.server

LARGE = hashlib.sha256(b"seed").digest() * (3 << 15)
OBJECTS = {"dir/a b+c~(d)é.txt": b"hello", "large.bin": LARGE}


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    """A front that wants signatures; ``READER`` may use ``train`` only."""
    known = SignatureAuthenticator(AccessKeys([KEY, READER]), region="us-east-1")
    with RunningFront(
        *(UpstreamBucket(name, MemoryStore(OBJECTS)) for name in ("data", "train")), authenticator=known
    ) as running:
        yield running


def client_of(front: RunningFront, key: Any = KEY, **options: Any) -> Any:
    """boto3 with a key."""
    pair = {"aws_access_key_id": key.access_key, "aws_secret_access_key": key.secret_key}
    return s3_client(options.pop("url", front.url), **(pair | options))


def test_penstock_corrects_a_wrong_region(front: RunningFront) -> None:
    """The answer names the right region, and our own store signs again."""
    keys = ps.Credentials(access_key=KEY.access_key, secret_key=KEY.secret_key)
    with ps.connect("s3://data", endpoint_url=front.url, credentials=keys, region="eu-west-1") as store:
        assert bytes(store.read("large.bin").data) == LARGE


@pytest.mark.parametrize("addressing", ["auto", "path"])
def test_an_object_lambda_arn_reads_from_the_gateway(front: RunningFront, addressing: Any) -> None:
    """A program that names the ARN changes its endpoint and nothing else; requests are signed for Object Lambda."""
    keys = ps.Credentials(access_key=READER.access_key, secret_key=READER.secret_key)
    url = "s3://arn:aws:s3-object-lambda:us-east-1:000000000000:accesspoint/train/dir/"
    with ps.connect(url, endpoint_url=front.url, credentials=keys, addressing=addressing) as store:
        assert [info.key for info in store.list()] == ["a b+c~(d)é.txt"]
        assert bytes(store.read("a b+c~(d)é.txt").data) == b"hello"
        place, name = split(presigned_get(store, "a b+c~(d)é.txt"))
    with ps.connect(place) as reader:
        assert bytes(reader.read(name).data) == b"hello"


def test_boto3_addresses_the_arn_by_its_host(front: RunningFront) -> None:
    """boto3 sends ``name-account.host``; here its request goes to the same port under the name that it signs."""
    client = client_of(front, READER, url=f"http://localhost:{front.port}")
    arn = "arn:aws:s3-object-lambda:us-east-1:000000000000:accesspoint/train"
    url = client.generate_presigned_url("get_object", Params={"Bucket": arn, "Key": "large.bin"})
    host, _, target = url.removeprefix("http://").partition("/")
    assert host == f"train-000000000000.localhost:{front.port}"
    request = f"GET /{target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    head, _, body = raw_exchange(front.port, request.encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == LARGE


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_a_presigned_url_is_not_moved_to_another_bucket(version: str) -> None:
    """If the request line names a host, that host is the one that must have been signed."""
    known = SignatureAuthenticator(AccessKeys([KEY]), accepts_version_2=True)
    secret = UpstreamBucket("secret", MemoryStore({"data/k": b"the secret", "k": b"the secret"}))
    with RunningFront(UpstreamBucket("data", MemoryStore({"k": b"open"})), secret, authenticator=known) as front:
        client = client_of(front, config={"signature_version": version})
        url = client.generate_presigned_url("get_object", {"Bucket": "data", "Key": "k"})
        host, path = f"127.0.0.1:{front.port}", url.removeprefix(front.url)

        def answer(target: str, named: str) -> bytes:
            return raw_exchange(
                front.port, f"GET {target} HTTP/1.1\r\nHost: {named}\r\nConnection: close\r\n\r\n".encode()
            )

        assert answer(path, host).endswith(b"open")
        assert answer(url, host).endswith(b"open")
        assert answer(url, "secret.localhost").endswith(b"open")
        for target, named in (
            (f"http://secret.localhost:{front.port}{path}", host), (path, "secret.localhost"),
            (f"http://secret.localhost{path}", host), (path.replace("/data/", "/secret/"), host),
            (path.replace("/data/", "/"), "secret.localhost"),
        ):  # fmt: skip
            found = answer(target, named)
            assert b"SignatureDoesNotMatch" in found
            assert b"the secret" not in found
