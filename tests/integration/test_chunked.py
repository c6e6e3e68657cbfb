"""Answers whose length nobody told, as functions and streaming proxies give them: whole with their last chunk, or not at all.

Plain HTTP is read by sockets of our own, TLS by libcurl: every promise holds on both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from exchanges import KeptServer, RawServer
from penstock.cache import CacheConfig, Cached
from penstock.config import KIB, MIB, FetchConfig, RetryConfig
from penstock.errors import ChecksumError, ConfigError, ObjectChangedError, PenstockError, ProtocolError, ShortReadError
from penstock.fetch import Budget, PlanItem
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

FAST = RetryConfig(backoff_s=0.005, backoff_s_max=0.05)
OBJECTS = {
    "0-empty": b"",
    "1-byte": b"x",
    "2-small": random.Random(2).randbytes(50_000),
    "3-large": random.Random(3).randbytes(3 * MIB + 11),
    "4-larger": random.Random(4).randbytes(20 * MIB + 7),
}
LARGE = OBJECTS["3-large"]


@pytest.fixture(params=["plain", "tls"])
def server(request: pytest.FixtureRequest) -> Iterator[FaultyServer]:
    with FaultyServer(OBJECTS, tls=request.param == "tls") as server:
        yield server


@pytest.fixture
def connect(server: FaultyServer) -> Iterator[Callable[..., ps.Store]]:
    stores = []

    def connect(**settings: Any) -> ps.Store:
        transport = ps.TransportConfig(ca_bundle=server.ca_bundle)
        defaults = {"endpoint_url": server.endpoint_url, "anonymous": True, "transport": transport, "retry": FAST}
        stores.append(ps.connect(server.url, **(defaults | settings)))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def joined(store: ps.Store, keys: list[str]) -> dict[str, bytes]:
    """What ``read_parts`` gives, by key."""
    found = dict.fromkeys(keys, b"")
    for chunk in store.read_parts(keys):
        assert chunk.offset_bytes == len(found[chunk.key])
        found[chunk.key] += bytes(chunk.data)
    return found


# ── whole reads ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whole_reads_of_every_kind_are_exact(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """``read``, ``read_many`` and ``read_parts`` give the bytes, the version and the checksum of a body in chunks."""
    server.fail("chunked_whole", times=None)
    store = connect()
    for key, data in OBJECTS.items():
        blob = store.read(key)
        assert bytes(blob.data) == data
        assert blob.etag == server.objects.versions[key].etag
        assert blob.verified == ("crc32c" if data else "length")
    assert {blob.key: bytes(blob.data) for blob in store.read_many(list(OBJECTS), ordered=False)} == OBJECTS
    assert joined(store, list(OBJECTS)) == OBJECTS
    listed = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list("2")]
    assert [bytes(blob.data) for blob in store.read_many(listed)] == [OBJECTS["2-small"]]


def test_a_kept_connection_serves_the_next_request(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """After the last chunk the connection is used again."""
    server.fail("chunked", times=None)
    store = connect()
    for _ in range(5):
        assert bytes(store.read("2-small").data) == OBJECTS["2-small"]
    assert server.connections_total == 1


def test_the_cache_keeps_what_came_in_chunks(
    server: FaultyServer, connect: Callable[..., ps.Store], tmp_path: Path
) -> None:
    """An object of unknown length is stored once it is whole, and read from the disk afterwards."""
    server.fail("chunked_whole", times=None)
    for _ in range(2):
        config = CacheConfig(tmp_path / "cache", 10**9, free_ratio_min=0.0, metadata_ttl_s=3600)
        store = Cached(connect(), config)
        assert bytes(store.read("3-large").data) == LARGE
        assert joined(store, ["3-large"]) == {"3-large": LARGE}
        store.close()
    assert len([request for request in server.requests if request.is_read]) == 1


# ── broken bodies ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("after_bytes", [0, 1, 1 * MIB, len(LARGE) - 1])
def test_a_broken_body_goes_on_where_an_etag_pins_it(
    server: FaultyServer, connect: Callable[..., ps.Store], after_bytes: int
) -> None:
    """A body that breaks before its last chunk is resumed by a range of the same version, never returned short."""
    server.fail("chunked_cut", times=2, after_bytes=after_bytes)
    blob = connect().read("3-large")
    assert bytes(blob.data) == LARGE
    assert blob.verified == "crc32c"
    reads = [request for request in server.requests if request.is_read]
    if after_bytes:
        assert reads[1].span == (after_bytes, None)
        assert {request.headers.get("if-match") for request in reads[1:]} == {blob.etag}


@pytest.mark.parametrize("refusal", ["501", "chunked_whole", "ignore_range"])
def test_a_broken_body_begins_anew_where_ranges_are_refused(
    server: FaultyServer, connect: Callable[..., ps.Store], refusal: str
) -> None:
    """A server that refuses ranges, or ignores them, is asked for the whole object again."""
    server.fail(refusal, times=None, match=lambda request: request.span is not None)
    server.fail("chunked_cut", times=1, after_bytes=1 * MIB)
    store = connect()
    assert bytes(store.read("3-large").data) == LARGE
    server.fail("chunked_cut", times=1, after_bytes=1 * MIB)
    assert joined(store, ["3-large"]) == {"3-large": LARGE}
    server.fail("close", times=1, after_bytes=1 * MIB)  # the same where the length was told
    assert bytes(store.read("2-small").data) == OBJECTS["2-small"]


def test_without_an_etag_a_broken_body_begins_anew() -> None:
    """Where nothing pins the version, nothing is resumed."""
    with FaultyServer(OBJECTS, etags="none") as server:
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=FAST) as store:
            server.fail("chunked_cut", times=2, after_bytes=1 * MIB)
            assert bytes(store.read("3-large").data) == LARGE
            assert [request.span for request in server.requests] == [None] * 3


def test_a_body_that_is_replaced_while_it_breaks_is_not_mixed(
    server: FaultyServer, connect: Callable[..., ps.Store]
) -> None:
    """Broken, then replaced: ``ObjectChangedError``."""

    def replace(request: Any) -> bool:
        if request.span is not None:
            server.objects["3-large"] = LARGE[::-1]
        return False

    server.fail("500", match=replace)
    server.fail("chunked_cut", times=1, match="3-large", after_bytes=1 * MIB)
    with pytest.raises(ObjectChangedError):
        connect().read("3-large")


def test_a_body_that_always_breaks_is_an_error(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """When the attempts are used up, the error says that the connection ended."""
    server.fail("chunked_cut", times=None, after_bytes=1000)
    with pytest.raises(ShortReadError):
        connect().read("2-small")


def test_a_corrupt_body_is_found_by_its_checksum(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """The checksum of the whole is held against a body in chunks."""
    server.fail("wrong_checksum", times=None)
    with pytest.raises(ChecksumError):
        connect().read("2-small")


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_body_beyond_half_the_budget_is_refused_with_numbers(
    server: FaultyServer, connect: Callable[..., ps.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of unknown length is collected up to half of the budget; then the error names both, and nothing is kept."""
    budget = Budget(4 * MIB)
    monkeypatch.setattr("penstock.store.base.process_budget", lambda: budget)
    server.fail("chunked_whole", times=None)
    store = connect()
    with pytest.raises(ConfigError, match=rf"unknown length has \d+ bytes or more.*budget of {4 * MIB} bytes"):
        store.read("4-larger")
    with pytest.raises(ConfigError, match="unknown length"):
        joined(store, ["4-larger"])
    assert bytes(store.read("2-small").data) == OBJECTS["2-small"]
    assert budget.statistics().used_bytes <= budget.statistics().free_bytes


def test_many_at_once_stay_within_the_budget(
    server: FaultyServer, connect: Callable[..., ps.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that outgrow the budget together are asked for again, one after the other: no deadlock, no byte wrong."""
    budget = Budget(12 * MIB)
    monkeypatch.setattr("penstock.store.base.process_budget", lambda: budget)
    for number in range(12):
        server.objects[f"many/{number:02d}"] = random.Random(number).randbytes(2 * MIB + number)
    keys = sorted(key for key in server.objects if key.startswith("many/"))
    server.fail("chunked_whole", times=None)
    store = connect()
    for key, blob in zip(keys, store.read_many(keys), strict=True):
        assert bytes(blob.data) == server.objects[key]
        assert budget.statistics().used_bytes <= 2 * budget.bytes_max
    assert joined(store, keys) == {key: server.objects[key] for key in keys}
    assert budget.statistics().used_bytes <= budget.statistics().free_bytes


# ── what stays refused ──────────────────────────────────────────────────────────────────────────────────────────────


def test_neither_length_nor_chunks_is_refused(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """A body that ends with its connection may be short, so it is refused; a HEAD without a length is a typed error."""
    server.fail("unsized", times=None)
    store = connect()
    with pytest.raises(ProtocolError, match="neither Content-Length nor chunks"):
        store.read("2-small")
    with pytest.raises(ProtocolError, match="size is not known before it is read") as caught:
        store.stat("2-small")
    assert "read()" in str(caught.value)


def test_a_range_is_served_only_by_a_body_that_holds_it(server: FaultyServer, connect: Callable[..., ps.Store]) -> None:
    """A whole object in answer to a range counts where the range covers it; elsewhere it is an error, never other bytes."""
    server.fail("chunked_whole", times=None)
    store, data = connect(), OBJECTS["2-small"]
    assert bytes(store.read("2-small", ps.ByteRange(0, len(data))).data) == data
    assert bytes(store.read("2-small", ps.ByteRange(0, 2 * len(data))).data) == data
    for span in (ps.ByteRange(0, len(data) - 1), ps.ByteRange(1, len(data)), ps.ByteRange(0, 1)):
        with pytest.raises(ProtocolError):
            store.read("2-small", span)
    with pytest.raises(PenstockError):
        store.read("3-large", ps.ByteRange(0, 2 * MIB))


def test_a_range_in_chunks_that_broke_goes_on_to_its_own_end(
    server: FaultyServer, connect: Callable[..., ps.Store]
) -> None:
    """A range whose answer told no length, and broke, is resumed up to where it was asked for, not to the object's end."""
    server.fail("chunked_cut", times=1)
    blob = connect().read("3-large", ps.ByteRange(10, 60_000))
    assert bytes(blob.data) == LARGE[10:60_000]


HEAD = b'HTTP/1.1 200 OK\r\nETag: "1"\r\n'
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RIGHT = {
    "trailers": CHUNKED + b'3\r\nabc\r\n0\r\nETag: "2"\r\nContent-Length: 9\r\n\r\n',
    "extensions": CHUNKED + b'3;a=b;c="d;e"\r\nabc\r\n0;x\r\n\r\n',
    "zeros": CHUNKED + b"0003\r\nabc\r\n000\r\n\r\n",
    "pieces": CHUNKED + b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n",
    "encoded": HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "cased": HEAD + b"transfer-encoding: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
}
WRONG = {
    "no last chunk": CHUNKED + b"3\r\nabc\r\n",
    "cut trailers": CHUNKED + b"3\r\nabc\r\n0\r\nX: y\r\n",
    "no size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "negative": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "prefixed": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "huge": CHUNKED + b"f" * 40 + b"\r\nabc\r\n0\r\n\r\n",
    "a size without an end": CHUNKED + b"1" * 100_000,
    "longer than its size": CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "coded twice": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: identity\r\n\r\nabc",
}


@pytest.mark.parametrize("verb", ["read_many", "read_parts"])
def test_chunks_that_end_before_the_range_does_are_an_error(verb: str) -> None:
    """A body in chunks that is shorter than its Content-Range says is never handed out, though its last chunk came."""
    head = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/20\r\nETag: "1"\r\nTransfer-Encoding: chunked\r\n\r\n'
    once = RetryConfig(attempts_max=1)
    with (
        RawServer(head + b"5\r\n01234\r\n0\r\n\r\n") as server,
        ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True, retry=once) as store,
        pytest.raises(ProtocolError, match="5 of 10 bytes"),
    ):
        list(getattr(store, verb)([("a", ps.ByteRange(0, 10))]))


@pytest.mark.parametrize("name", sorted(RIGHT | WRONG))
@pytest.mark.parametrize("redirects", [False, True])
def test_chunks_are_read_strictly(name: str, redirects: bool) -> None:
    """Odd but legal framing gives exactly the body, undecoded; every other framing is an error, whoever carries it."""
    with RawServer((RIGHT | WRONG)[name]) as server:
        store = (
            ps.connect(server.url)  # over libcurl, which follows redirects
            if redirects
            else ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True, retry=RetryConfig(attempts_max=1))
        )
        with store:
            if name in RIGHT:
                assert bytes(store.read("a").data) == b"abc"
            else:
                with pytest.raises(ps.StoreError):
                    store.read("a")


def test_a_body_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that never stop are read up to half of the budget."""
    budget = Budget(8 * MIB)
    monkeypatch.setattr("penstock.store.base.process_budget", lambda: budget)
    chunk = b"%x\r\n%b\r\n" % (64 * KIB, bytes(64 * KIB))

    def script(*_: Any) -> Iterator[bytes]:
        yield CHUNKED
        while True:
            yield chunk

    with KeptServer(script) as server:
        fetch = FetchConfig(part_bytes=1 * MIB)
        with ps.connect("s3://bucket", endpoint_url=server.url, anonymous=True, fetch=fetch) as store:
            with pytest.raises(ConfigError, match="unknown length"):
                store.read("a")
