"""What bad input gets: one test for each row of the table in docs/reference/errors.md."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.store.base import Store
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

QUICK = ps.RetryConfig(attempts_max=2, backoff_s=0.01, backoff_s_max=0.02)


def message(call: Callable[[], object], kind: type[Exception], *says: str) -> str:
    """The text of the error of `kind` that `call` raises, which holds `says`."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for part in says:
        assert part in text
    assert type(caught.value) is kind
    return text


def test_missing_bucket(connect_s3: Callable[..., Store]) -> None:
    """``BucketMissingError``, for reading and for listing, naming the URL."""
    store = connect_s3("s3://no-such-bucket-anywhere")
    message(lambda: store.read("key"), ps.BucketMissingError, "s3://no-such-bucket-anywhere/key", "404")
    message(lambda: list(store.list("a/b")), ps.BucketMissingError, "LIST s3://no-such-bucket-anywhere/a/b:", "404")
    assert issubclass(ps.BucketMissingError, FileNotFoundError)


def test_missing_key(s3_store: Store, bucket: str) -> None:
    """``ObjectMissingError`` (a ``FileNotFoundError``), for reading, asking and opening."""
    for call in (s3_store.read, s3_store.stat, s3_store.open):
        text = message(
            lambda call=call: call("no/such key"), ps.ObjectMissingError, f"s3://{bucket}/no/such key", "404"
        )
        assert "GET" in text or "HEAD" in text


def test_no_permission(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """``AccessDeniedError`` (a ``PermissionError``), at the first attempt."""
    faulty.objects["key"] = b"secret"
    faulty.fail("403", times=None)
    store = connect_faulty()
    message(lambda: store.read("key"), ps.AccessDeniedError, "s3://bucket/key", "403 AccessDenied", "1 attempt")
    assert len(faulty.requests) == 1
    assert issubclass(ps.AccessDeniedError, PermissionError)


def test_wrong_secret(connect_s3: Callable[..., Store], s3_endpoint: Any, bucket: str) -> None:
    """``CredentialsError``, with a hint and without the secret."""
    wrong = ps.Credentials(access_key=s3_endpoint.access_key, secret_key="not-the-secret")
    store = connect_s3(f"s3://{bucket}", credentials=wrong)
    text = message(lambda: store.read("key"), ps.CredentialsError, f"s3://{bucket}/key", "403", "Hint")
    assert "not-the-secret" not in text
    assert s3_endpoint.access_key not in text


def test_no_credentials_at_all(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CredentialsError`` before anything is sent, naming what to set."""
    monkeypatch.setenv("HOME", "/nonexistent")
    with ps.connect(faulty.url, endpoint_url=faulty.endpoint_url) as store:
        message(lambda: store.read("key"), ps.CredentialsError, "credentials", "Hint", "anonymous")
    assert not faulty.requests


def test_unreachable_endpoint() -> None:
    """Nobody listens: ``UnavailableError`` (a ``ConnectionError``), with the attempts made, promptly."""
    start_s = time.monotonic()
    with ps.connect("s3://bucket", endpoint_url="http://127.0.0.1:1", anonymous=True, retry=QUICK) as store:
        message(lambda: store.read("key"), ps.UnavailableError, "s3://bucket/key", "127.0.0.1", "2 attempts")
    assert time.monotonic() - start_s < 5
    assert issubclass(ps.UnavailableError, ConnectionError)


def test_dns_failure() -> None:
    """A name that nobody has: ``UnavailableError``, naming it."""
    with ps.connect("s3://bucket", endpoint_url="http://no-such-host.invalid", anonymous=True, retry=QUICK) as store:
        message(lambda: store.read("key"), ps.UnavailableError, "no-such-host.invalid", "2 attempts")


def test_tls_failure() -> None:
    """A certificate of an unknown authority: ``UnavailableError`` that says so; with ``ca_bundle`` it works."""
    with FaultyServer({"key": b"data"}, tls=True) as server:
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=QUICK) as store:
            message(lambda: store.read("key"), ps.UnavailableError, "certificate", "Hint")
        trusting = ps.TransportConfig(ca_bundle=server.ca_bundle)
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, transport=trusting) as store:
            assert bytes(store.read("key").data) == b"data"


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "", "nonsense://x/y", "file://other-host/path"])
def test_malformed_url(url: str) -> None:
    """``ConfigError`` (a ``ValueError``) when connecting, naming the URL."""
    with pytest.raises(ps.ConfigError) as caught:
        ps.connect(url)
    assert repr(url) in str(caught.value) or url.partition(":")[0] in str(caught.value)


@pytest.mark.parametrize("endpoint_url", ["127.0.0.1:9000", "ftp://host", "http://"])
def test_malformed_endpoint(endpoint_url: str) -> None:
    """``ConfigError`` when connecting, naming the endpoint."""
    with pytest.raises(ps.ConfigError, match="endpoint"):
        ps.connect("s3://bucket", endpoint_url=endpoint_url, anonymous=True)


def test_not_an_s3_server(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """A web page instead of S3's answer: ``ProtocolError`` with a hint, for reading, asking and listing."""
    faulty.fail("html", times=None)
    store = connect_faulty(retry=QUICK)
    for call in (lambda: store.read("key"), lambda: store.stat("key"), lambda: list(store.list())):
        message(call, ps.ProtocolError, "s3://bucket", "Hint", "S3")


def test_range_past_the_end(s3_store: Store, bucket: str) -> None:
    """A range that starts past the end is ``SpanError`` (a ``ValueError``); one that only ends there is cut."""
    s3_store.write("key", b"0123456789")
    message(lambda: s3_store.read("key", ps.ByteRange(10, 20)), ps.SpanError, f"s3://{bucket}/key", "10")
    assert bytes(s3_store.read("key", ps.ByteRange(8, 20)).data) == b"89"
    message(lambda: s3_store.read("key", ps.ByteRange(5, 5)), ps.ConfigError, "start < end")


def test_empty_object(s3_store: Store) -> None:
    """It reads as no bytes by every way, and has no range."""
    s3_store.write("empty", b"")
    assert bytes(s3_store.read("empty").data) == b""
    assert [bytes(blob.data) for blob in s3_store.read_many(["empty", "empty"])] == [b"", b""]
    with s3_store.open("empty") as file:
        assert file.read() == b""
    message(lambda: s3_store.read("empty", ps.ByteRange(0, 1)), ps.SpanError, "empty")


def test_object_of_5_gb(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """It is refused as one piece, with both numbers and before it is read; ranges and files of it work."""
    size = 5_000_000_000
    faulty.objects.store_zeros("huge", size)
    store = connect_faulty()
    assert store.stat("huge").size_bytes == size
    message(lambda: store.read("huge"), ps.ConfigError, str(size), str(store.budget.bytes_max), "Hint", "open")
    assert bytes(store.read("huge", ps.ByteRange(size - 10, size)).data) == bytes(10)
    with store.open("huge") as file:
        file.seek(-5, 2)
        assert file.read() == bytes(5)
    chunks = store.read_parts(["huge"])
    assert sum(len(chunk.data) for chunk in itertools.islice(chunks, 4)) > 0
