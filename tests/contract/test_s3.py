"""The S3 store, as ``connect`` composes it, keeps every promise on a real server (ministack, or Ceph where asked)."""

import os

import pytest

import penstock as ps
from penstock.testing.contract import StoreContract
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server


class TestS3Store(StoreContract):
    """``connect("s3://bucket")``."""

    part_bytes_min = 5 << 20 if os.environ.get("PENSTOCK_TEST_S3") == "ceph" else 1

    @pytest.fixture(autouse=True)
    def _witness(self, s3_client, bucket):
        self.client, self.bucket = s3_client, bucket

    @pytest.fixture
    def store(self, s3_store):
        return s3_store

    def uploads_left(self, store):
        return len(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))


class OnFaulty(StoreContract):
    """The same store on a server that writes ETags in its own way, with small pages."""

    keys_many = 120

    @pytest.fixture
    def store(self, etags):
        with FaultyServer(etags=etags, page_keys_max=50) as self.server:
            with ps.connect(self.server.url, endpoint_url=self.server.endpoint_url, anonymous=True) as store:
                yield store

    def uploads_left(self, store):
        return len(self.server.uploads)


class TestUnquoted(OnFaulty):
    """ETags have no quotes, everywhere or in listings alone."""

    @pytest.fixture(params=["unquoted", "unquoted in listings"])
    def etags(self, request):
        return request.param


class TestWithoutETags(OnFaulty):
    """Reading tells no ETag, or only weak ones, which pin nothing; listings may know strong ones."""

    has_etags = False

    @pytest.fixture(params=["none", "weak", "weak in headers"])
    def etags(self, request):
        return request.param
