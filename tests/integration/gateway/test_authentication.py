"""Signed requests over real sockets: boto3, presigned URLs, uploads in chunks, and clients that mean harm."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import penstock as ps
from fronts import RunningFront, raw_exchange, s3_client
from penstock.compose import split
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator, presign
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.objects import Answer
from penstock.store import MemoryStore
from penstock.store.s3 import presigned_get
from signed_requests import KEY, READER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.gateway.objects import GatewayRequest, RequestBody

pytestmark = pytest.mark.server

LARGE = hashlib.sha256(b"seed").digest() * (3 << 15)
OBJECTS = {"dir/a b+c~(d)é.txt": b"hello", "large.bin": LARGE}


class UploadBucket(UpstreamBucket):
    """A bucket that remembers what was written to it, decoded."""

    def __init__(self, name: str) -> None:
        super().__init__(name, MemoryStore(OBJECTS))
        self.taken: dict[str, tuple[bytes, dict[str, str]]] = {}

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Take the body, and answer as S3 does."""
        data = b"".join([bytes(piece) async for piece in body])
        self.taken[request.key] = data, dict(body.checksums)
        return Answer(headers={"ETag": '"1"'})


@pytest.fixture(scope="module")
def bucket() -> UploadBucket:
    """The bucket that all keys may use."""
    return UploadBucket("data")


@pytest.fixture(scope="module")
def front(bucket: UploadBucket) -> Iterator[RunningFront]:
    """A front that wants signatures; ``READER`` may use ``train`` only."""
    known = SignatureAuthenticator(AccessKeys([KEY, READER]), region="us-east-1")
    with RunningFront(bucket, UpstreamBucket("train", MemoryStore(OBJECTS)), authenticator=known) as running:
        yield running


def client_of(front: RunningFront, key: Any = KEY, **options: Any) -> Any:
    """boto3 with a key."""
    pair = {"aws_access_key_id": key.access_key, "aws_secret_access_key": key.secret_key}
    return s3_client(options.pop("url", front.url), **(pair | options))


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_boto3_reads_with_a_key(front: RunningFront) -> None:
    """Keys with odd characters and queries with odd values are signed as they are sent."""
    client = client_of(front)
    for key, data in OBJECTS.items():
        assert client.get_object(Bucket="data", Key=key)["Body"].read() == data
    assert client.list_objects_v2(Bucket="data", Prefix="dir/a b+", Delimiter="/é")["KeyCount"] == 1
    assert [row["Name"] for row in client.list_buckets()["Buckets"]] == ["data", "train"]


def test_a_key_sees_only_its_access_points(front: RunningFront) -> None:
    """Others are neither listed nor read."""
    client = client_of(front, READER)
    assert [row["Name"] for row in client.list_buckets()["Buckets"]] == ["train"]
    assert client.get_object(Bucket="train", Key="large.bin")["Body"].read() == LARGE
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="data", Key="large.bin")
    assert code_of(caught) == "AccessDenied"
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="train", Key="new", Body=b"x")
    assert code_of(caught) == "AccessDenied"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"aws_secret_access_key": "wrong-secret"}, "SignatureDoesNotMatch"),
        ({"aws_access_key_id": "UNKNOWN"}, "InvalidAccessKeyId"),
        ({"aws_session_token": "token"}, "InvalidToken"),
    ],
)
def test_wrong_keys_are_refused(front: RunningFront, options: dict[str, str], code: str) -> None:
    """Each with S3's code."""
    with pytest.raises(ClientError) as caught:
        client_of(front, **options).get_object(Bucket="data", Key="large.bin")
    assert code_of(caught) == code


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


@pytest.mark.parametrize("checksum", ["CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME"])
def test_uploads_with_checksums_arrive(front: RunningFront, bucket: UploadBucket, checksum: str) -> None:
    """What boto3 signs and what it streams in chunks is decoded and compared."""
    for signs in (True, False):
        client = client_of(front, config={"request_checksum_calculation": "when_required"})
        client.meta.config.s3["payload_signing_enabled"] = signs
        client.put_object(Bucket="data", Key="up", Body=io.BytesIO(LARGE), ChecksumAlgorithm=checksum)
        data, checksums = bucket.taken.pop("up")
        assert data == LARGE
        assert list(checksums) == [checksum.lower()]


def test_presigned_urls_of_a_store_are_read_by_ranges(front: RunningFront) -> None:
    """A process without keys reads a whole object, ranges of it, and its size, by a URL."""
    keys = ps.Credentials(access_key=KEY.access_key, secret_key=KEY.secret_key)
    with ps.connect("s3://data/dir/", endpoint_url=front.url, credentials=keys) as store:
        place, name = split(presigned_get(store, "a b+c~(d)é.txt", expires_s=60))
    with ps.connect(place) as reader:
        assert bytes(reader.read(name).data) == b"hello"
    with ps.connect("s3://data", endpoint_url=front.url, credentials=keys) as store:
        place, name = split(presigned_get(store, "large.bin", expires_s=60))
    with ps.connect(place, fetch=ps.FetchConfig(part_bytes=1 << 20)) as reader:
        assert reader.stat(name).size_bytes == len(LARGE)
        assert bytes(reader.read(name).data) == LARGE
        spans = [(name, ps.ByteRange(start, start + 1000)) for start in range(0, 1 << 20, 99_999)]
        found = [bytes(blob.data) for blob in reader.read_many(spans)]
    assert found == [LARGE[span.start : span.end] for _, span in spans]


def test_presigned_urls_of_the_gateway_permit_one_thing(front: RunningFront) -> None:
    """A URL for one object reads neither another one, nor by another method."""
    import urllib.error
    import urllib.request

    url = presign(f"{front.url}/data/large.bin", KEY, expires_s=60)
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.read() == LARGE
    for wrong, method in (
        (url.replace("large.bin", "large.bim"), "GET"),
        (url.replace("Expires=60", "Expires=61"), "GET"),
        (url.replace("Expires=60", "Expires=60&versionId=1"), "GET"),
        (url, "DELETE"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(wrong, method=method), timeout=10)
        with caught.value:
            assert caught.value.status == 403
            assert b"SignatureDoesNotMatch" in caught.value.read()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], b"AccessDenied"),
        (["Authorization: AWS4-HMAC-SHA256 garbage"], b"AuthorizationHeaderMalformed"),
        (["Authorization: AWS AKID:c2ln"], b"InvalidRequest"),
        (["Authorization: " + "A" * 8000], b"InvalidRequest"),
        (["Authorization: AWS4-HMAC-SHA256 Credential=A/1/2/s3/aws4_request, SignedHeaders=host, Signature=" + "0" * 64],
         b"AccessDenied"),
    ],
)  # fmt: skip
def test_raw_requests_are_refused(front: RunningFront, lines: list[str], code: bytes) -> None:
    """Whatever a socket sends, the answer is an error document of S3."""
    head = ["GET /data/large.bin HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *lines, "", ""]
    answer = raw_exchange(front.port, "\r\n".join(head).encode())
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))
    assert b"<Code>" + code + b"</Code>" in answer


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
