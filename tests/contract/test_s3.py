"""The S3 store, as ``connect`` composes it, keeps every promise on a real server: ministack, or another where asked."""

import os

import pytest

import penstock as ps
from servers.faulty import FaultyServer
from store_contract import StoreContract

pytestmark = pytest.mark.server


SERVER = os.environ.get("PENSTOCK_TEST_S3", "ministack")


class TestS3Store(StoreContract):
    """``connect("s3://bucket")``; what a server truly lacks is a capability here."""

    part_bytes_min = 5 << 20 if SERVER in ("ceph", "moto") else 1
    keys_are_files = SERVER == "rclone"
    knows_if_absent = SERVER != "rclone"
    copies_parts = SERVER != "rclone"
    commits_tell_etags = SERVER != "rclone"
    knows_if_match = SERVER == "ministack"  # moto and rclone ignore it, and Ceph 16 refuses every ETag

    @pytest.fixture(autouse=True)
    def _witness(self, s3_client, bucket):
        self.client, self.bucket = s3_client, bucket

    @pytest.fixture
    def store(self, connect_s3, bucket):  # moto and Ceph answer some requests with 500 for ever
        return connect_s3(f"s3://{bucket}", retry=ps.RetryConfig(total_s_max=10))

    def uploads_left(self, store):
        if SERVER == "rclone":  # it knows no such request
            return None
        return len(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))


class OddServer(StoreContract):
    """The same store on a server that answers in another way than S3 does, and says the same; with small pages."""

    keys_many = 120
    keeps_headers = False
    knows_if_match = False

    @pytest.fixture
    def store(self, odd):
        with FaultyServer(etags=odd.get("etags", "quoted"), tls=odd.get("tls", False), page_keys_max=50) as self.server:
            if "fault" in odd:
                self.server.fail(odd["fault"], times=None)
            place = {"endpoint_url": self.server.endpoint_url, "anonymous": True}
            transport = ps.TransportConfig(ca_bundle=self.server.ca_bundle)
            with ps.connect(self.server.url, transport=transport, **place) as store:
                yield store

    def uploads_left(self, store):
        return len(self.server.uploads)


class TestUnquoted(OddServer):
    """ETags have no quotes, everywhere or in listings alone."""

    @pytest.fixture(params=["unquoted", "unquoted in listings"])
    def odd(self, request):
        return {"etags": request.param}


class TestWithoutETags(OddServer):
    """Reading tells no ETag, or only weak ones, which pin nothing; listings may know strong ones."""

    has_etags = False

    @pytest.fixture(params=["none", "weak", "weak in headers"])
    def odd(self, request):
        return {"etags": request.param}


class TestChunked(OddServer):
    """Bodies come without their lengths, over plain HTTP and TLS."""

    tells_lengths = False

    @pytest.fixture(params=[False, True], ids=["plain", "tls"])
    def odd(self, request):
        return {"tls": request.param, "fault": "chunked"}
