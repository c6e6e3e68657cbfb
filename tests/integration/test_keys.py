"""Any legal key works exactly, or is refused by name; never another object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import penstock as ps
from penstock.errors import ConfigError
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

KEYS = [
    "plain",
    "with space",
    " leading and trailing ",
    "a+b",
    "100%",
    "%41",
    "%2F%2e%2E",
    "a//b",
    "/leading",
    "//",
    "trailing/",
    "~tilde~",
    "a.b..c...",
    ".hidden/..almost/...",
    "question?mark=1&x#fragment",
    "semi;colon:comma,at@dollar$bang!star*quote'(paren)=",
    "back\\slash",
    'quote"<xml>&amp;',
    "gr\u00fc\u00dfe/\u4f60\u597d/\U0001f600",
    "e\u0301 is not \u00e9",
    "\u00e9 is not e\u0301",
    "[brackets]{braces}|pipe^caret`tick",
    "x" * 1024,
    "\u00e9" * 512,
    "a/" * 512,
]
REFUSED = [".", "..", "a/..", "../a", "a/./b", "./", "a/../b", "a/.", "", "y" * 1025, "\u00e9" * 513, "\ud800"]


@pytest.mark.parametrize("key", KEYS)
def test_a_legal_key_works_exactly(s3_store: ps.Store, s3_client: Any, bucket: str, key: str) -> None:
    """What is written is found by botocore under the very same key, read back, listed, described, copied and deleted."""
    data = key.encode()
    s3_store.write(key, data)
    assert s3_client.get_object(Bucket=bucket, Key=key)["Body"].read() == data
    assert bytes(s3_store.read(key).data) == data
    assert s3_store.stat(key).size_bytes == len(data)
    assert [info.key for info in s3_store.list()] == [key]
    assert s3_store.describe(key) == f"s3://{bucket}/{key}"
    s3_store.copy(key, "copy")
    assert bytes(s3_store.read("copy").data) == data
    s3_store.delete([key, "copy"])
    assert list(s3_store.list()) == []


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_cannot_be_asked_for_is_refused(faulty: FaultyServer, connect_faulty: Any, key: str) -> None:
    """A '.' or '..' segment, an empty and an overlong key are ConfigError for every verb, and nothing is sent."""
    faulty.objects["source"] = b"x"
    store = connect_faulty()
    for call in (
        lambda: store.read(key),
        lambda: store.stat(key),
        lambda: store.write(key, b"x"),
        lambda: store.delete(key),
        lambda: store.delete([key, "other"]),
        lambda: store.copy(key, "target"),
        lambda: store.copy("source", key),
        lambda: list(store.read_many([key])),
    ):
        with pytest.raises(ConfigError):
            call()
    assert [request for request in faulty.requests if request.key != "source"] == []


def test_a_dot_segment_is_refused_below_a_prefix(connect_faulty: Any, faulty: FaultyServer) -> None:
    """A store's prefix never lets a key climb out of it."""
    store = connect_faulty("inside/")
    with pytest.raises(ConfigError, match=r"\.\."):
        store.read("../outside")
    assert faulty.requests == []


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FaultyServer, ps.Store]]:
    with FaultyServer() as server:
        yield server, ps.connect(f"{server.url}/pre fix+/", endpoint_url=server.endpoint_url, anonymous=True)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40))
def test_any_text_is_a_key(shared: tuple[FaultyServer, ps.Store], key: str) -> None:
    """Write, read and list give the same key and the same bytes for any text without '.' and '..' segments."""
    server, store = shared
    if re.search(r"(^|/)\.\.?(/|$)", key):
        with pytest.raises(ConfigError):
            store.write(key, b"x")
        return
    server.objects.clear()
    server.objects.versions.clear()
    server.objects._ordered = None
    data = key.encode()
    store.write(key, data)
    assert list(server.objects) == [f"pre fix+/{key}"]
    assert bytes(store.read(key).data) == data
    assert [info.key for info in store.list()] == [key]
    assert [info.key for info in store.list(key[:1])] == [key]
