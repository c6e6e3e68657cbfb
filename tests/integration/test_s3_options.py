"""Options of the S3 store on a real server: keys of customers, payers, owners, presigned URLs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.config import KIB, MIB
from penstock.store import Store

pytestmark = pytest.mark.server

DATA = bytes(range(256)) * (11 * MIB // 256)


def test_a_customers_key_encrypts_and_decrypts(connect_s3: Callable[..., Store], bucket: str) -> None:
    """SSE-C: written, in parts, copied, listed, read whole and in ranges with the key; without it, or with another, not."""
    store = connect_s3(f"s3://{bucket}", sse_customer_key=b"k" * 32, fetch=ps.FetchConfig(part_bytes=256 * KIB))
    store.write("small", b"secret")
    with store.writer("large", part_bytes=5 * MIB) as writer:
        writer.write(DATA)
    store.copy("large", "copied")
    assert bytes(store.read("small").data) == b"secret"
    assert bytes(store.read("copied").data) == DATA
    assert bytes(store.read("copied", ps.ByteRange(5_000_000, 6_000_000)).data) == DATA[5_000_000:6_000_000]
    assert store.stat("large").size_bytes == len(DATA)
    for other in (connect_s3(f"s3://{bucket}"), connect_s3(f"s3://{bucket}", sse_customer_key=b"o" * 32)):
        for call in (lambda other=other: other.read("small"), lambda other=other: other.stat("small")):
            with pytest.raises(ps.StoreError) as caught:
                call()
            assert not caught.value.retryable


@pytest.mark.parametrize("options", [{}, {"sign_payloads": True}, {"upload_checksums": False}])
def test_what_is_signed_of_a_body(connect_s3: Callable[..., Store], bucket: str, options: dict[str, bool]) -> None:
    """A server that verifies signatures takes bodies of all sizes, whether their SHA-256 or their CRC-32C is signed."""
    store = connect_s3(f"s3://{bucket}", **options)
    for size_bytes in (0, 1, MIB, MIB + 1, 7 * MIB):
        store.write("whole", DATA[:size_bytes])
        assert bytes(store.read("whole").data) == DATA[:size_bytes]
    with store.writer("parts", part_bytes=5 * MIB) as writer:
        writer.write(DATA)
    assert bytes(store.read("parts").data) == DATA


def test_a_presigned_url_is_read_like_any_other(s3_client: Any, s3_store: Store, bucket: str) -> None:
    """Signed for GET alone: opened, read in ranges, asked for its size."""
    s3_store.write("folder/a b+c", DATA)
    url = s3_client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "folder/a b+c"})
    with ps.open(url) as file:
        assert file.size_bytes == len(DATA)
        file.seek(-1000, 2)
        assert file.read() == DATA[-1000:]
        file.seek(0)
        assert file.read() == DATA
    folder, _, name = url.rpartition("/")
    with ps.connect(f"{folder}/") as store:
        assert store.stat(name).size_bytes == len(DATA)
