"""The S3 store keeps every promise on a gateway: in front of a directory, with and without extended attributes, and of S3."""

import uuid
from functools import partial

import pytest

import penstock as ps
from fronts import FixedBuckets, RunningFront
from penstock.gateway.authentication import AccessKeys, SignatureAuthenticator
from penstock.gateway.buckets.directory import DirectoryBuckets, files
from penstock.gateway.buckets.store_operations import operations_for
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store.records import FileRecords
from store_contract import StoreContract

pytestmark = [pytest.mark.server, pytest.mark.heavy]


@pytest.fixture(scope="module", params=["attributes", "sidecars"])
def served(request, tmp_path_factory):
    """A directory and the gateway in front of it; a file system without attributes is one that says it has none."""
    root = tmp_path_factory.mktemp("served")
    keys = AccessKeys.parse("test:test-secret:rw", source="test")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sidecars":
            patch.setattr(files, "FileRecords", partial(FileRecords, has_attributes=False))
        table = DirectoryBuckets(root, read_write=True, is_durable=False)
        with RunningFront(table=table, authenticator=SignatureAuthenticator(keys)) as front:
            yield root, front


class TestGatewayOfDirectory(StoreContract):
    """``connect("s3://bucket")`` at a gateway whose upstream is a directory."""

    part_bytes_min = 5 << 20

    @pytest.fixture
    def store(self, served):
        root, front = served
        bucket = f"b{uuid.uuid4().hex}"
        self.folder = root / bucket
        self.folder.mkdir()
        credentials = ps.Credentials(access_key="test", secret_key="test-secret")
        with ps.connect(f"s3://{bucket}", endpoint_url=front.url, credentials=credentials) as store:
            yield store

    def uploads_left(self, store):
        uploads = self.folder / ".penstock-gateway.tmp" / "uploads"
        return len(list(uploads.iterdir())) if uploads.exists() else 0


class GrowingBuckets(FixedBuckets):
    """A table that gets a bucket for each test."""

    def __init__(self):
        super().__init__([])
        self.buckets = self._buckets

    async def close(self):
        """Close what writes; the stores belong to the tests."""
        for bucket in self.buckets.values():
            await bucket.close()


@pytest.fixture(scope="module")
def growing():
    """A gateway whose table grows."""
    table = GrowingBuckets()
    keys = AccessKeys.parse("test:test-secret:rw", source="test")
    with RunningFront(table=table, authenticator=SignatureAuthenticator(keys)) as front:
        yield table, front


class TestGatewayOfS3(StoreContract):
    """The same where the upstream is a bucket at another S3 server, to which the gateway passes writes on."""

    part_bytes_min = 5 << 20

    @pytest.fixture
    def store(self, connect_s3, bucket, growing):
        table, front = growing
        upstream = connect_s3(f"s3://{bucket}")
        name = f"p{uuid.uuid4().hex}"
        table.buckets[name] = UpstreamBucket(name, upstream, operations=operations_for(upstream))
        credentials = ps.Credentials(access_key="test", secret_key="test-secret")
        with ps.connect(f"s3://{name}", endpoint_url=front.url, credentials=credentials) as store:
            yield store
