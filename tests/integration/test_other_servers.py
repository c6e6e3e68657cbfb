"""moto and rclone, which people use in the place of S3: what each of them needs. ``make test-servers`` runs whole suites."""

from __future__ import annotations

import random

import pytest

import penstock as ps
from connecting import connection_to
from penstock.config import MIB
from penstock.fetch import PlanItem
from penstock.testing.s3_server import S3Server

pytestmark = pytest.mark.server

DATA = random.Random(0).randbytes(11 * MIB)


def connect(server: S3Server) -> ps.Store:
    """A store on a new bucket of `server`."""
    return ps.connect(f"s3://{server.create_bucket()}", **connection_to(server))


def write(store: ps.Store) -> None:
    """``DATA`` as an object of three parts."""
    with store.writer("parts", part_bytes=5 * MIB) as file:
        file.write(DATA)


def test_what_rclone_lists_can_be_read(rclone: S3Server) -> None:
    """Unquoted ETags in listings, ranges with a status of 200 and another root of the upload's document change nothing."""
    with connect(rclone) as store:
        store.write("small", b"small")
        write(store)
        listed = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
        assert [bytes(blob.data) for blob in store.read_many(listed)] == [DATA, b"small"]
        assert bytes(store.read("parts", ps.ByteRange(5 * MIB - 1, 9 * MIB)).data) == DATA[5 * MIB - 1 : 9 * MIB]
        store.write("small", b"other")
        with pytest.raises(ps.ObjectChangedError):
            next(store.read_many(listed[1:]))


def test_what_moto_was_sent_can_be_read() -> None:
    """moto without crc32c keeps wrong checksums: an error of the first upload, and the next can be read."""
    from servers.others import Moto

    with Moto(crc32c=False) as server, connect(server) as store:
        with pytest.raises(ps.ChecksumError, match="keeps the crc32c"):
            write(store)
        write(store)
        assert bytes(store.read("parts").data) == DATA
