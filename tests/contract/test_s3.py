"""The S3 store, as ``connect`` composes it, keeps every promise on a real server (ministack, or Ceph where asked)."""

import os

import pytest

from penstock.testing.contract import StoreContract

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
