"""Headers and names of entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.entry import (
    BLOCK,
    FOLDERS_COUNT,
    MISSING,
    MISSING_COUNT_MAX,
    STAT,
    CorruptEntryError,
    Identities,
    block_name,
    check_data,
    decode,
    digest_of,
    encode,
    entry_name,
    header_bytes_of,
    identity_of,
)
from penstock.store import Store
from penstock.store.fsspec import FsspecStore
from penstock.store.http import HttpStore
from penstock.store.s3 import S3Store
from penstock.store.s3_endpoint import S3Endpoint
from penstock.types import Buffer


@given(st.lists(st.text(max_size=300), min_size=1, max_size=5), st.binary(max_size=500), st.integers(0, 2**31))
def test_a_header_says_what_it_was_made_of(fields: list[str], data: bytes, index: int) -> None:
    """Decoding returns everything that was encoded, and the data matches its checksum."""
    identity = identity_of(*[field.encode(errors="replace").decode() for field in fields])
    raw = encode(BLOCK, identity, data, block_index=index, object_bytes=7, block_bytes=4096, sent_s=1.5)
    assert len(raw) == header_bytes_of(identity, len(data))
    header = decode(raw + data)
    assert (header.kind, header.identity, header.block_index, header.object_bytes) == (BLOCK, identity, index, 7)
    assert (header.block_bytes, header.sent_s, header.data_bytes) == (4096, 1.5, len(data))
    check_data(header, data)


def read(raw: Buffer) -> None:
    """Decode and check bytes as a reader of files does."""
    header = decode(raw)
    check_data(header, raw[header.header_bytes :])


@given(st.data())
def test_any_changed_bit_is_found(data: st.DataObject) -> None:
    """Flipping any bit of header or data makes the entry invalid."""
    raw = bytearray(encode(BLOCK, b"identity", b"the data") + b"the data")
    at = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[at // 8] ^= 1 << at % 8
    with pytest.raises(CorruptEntryError):
        read(raw)


@pytest.mark.parametrize("cut_bytes", [0, 1, 55, 56, 63, 64, 70])
def test_a_torn_entry_is_found(cut_bytes: int) -> None:
    """An entry that ends early is invalid."""
    raw = (encode(STAT, b"x", b"the data") + b"the data")[:cut_bytes]
    with pytest.raises(CorruptEntryError):
        read(raw)


def test_consecutive_blocks_lie_in_different_folders() -> None:
    """The blocks of a large object are spread evenly over all folders, so a few folders are a fair sample of the cache."""
    digest = digest_of(b"object")
    folders = [block_name(digest, index).folder for index in range(2 * FOLDERS_COUNT)]
    assert sorted(folders) == sorted(2 * list(range(FOLDERS_COUNT)))


def test_what_is_missing_has_a_bounded_number_of_names() -> None:
    """However many keys are missing, the number of their entries is bounded."""
    names = {entry_name(MISSING, b"%d" % number) for number in range(100_000)}
    assert 0.9 * MISSING_COUNT_MAX < len(names) <= MISSING_COUNT_MAX
    assert max(name.folder for name in names) < FOLDERS_COUNT


def s3(endpoint_url: str | None) -> Store:
    return S3Store(S3Endpoint(bucket="bucket", endpoint_url=endpoint_url), provider=None)


@pytest.mark.parametrize(
    "stores",
    [
        pytest.param(lambda: [s3(url) for url in (None, "http://one:9", "http://two:9")], id="endpoints"),
        pytest.param(lambda: [HttpStore(f"http://h/d/{query}") for query in ("", "?of=1", "?of=2")], id="queries"),
        pytest.param(lambda: [FsspecStore(f"memory://{login}h/d") for login in ("", "a:p@", "b:p@")], id="logins"),
        pytest.param(
            lambda: [FsspecStore("memory://d", options={"at": at} if at else {}) for at in ("", "one", "two")],
            id="options",
        ),
    ],
)
def test_stores_that_show_one_url_share_nothing(stores: Callable[[], list[Store]]) -> None:
    """Whatever leads to another object under the same key is part of its identity, whether or not URLs show it."""
    made = stores()
    identities = [Identities(store, "", 1 << 20) for store in made]
    assert len({each.of_version("k", '"e"') for each in identities}) == len(made)
    assert len({each.of_key("k") for each in identities}) == len(made)
    assert Identities(stores()[-1], "", 1 << 20).of_key("k") == identities[-1].of_key("k")
