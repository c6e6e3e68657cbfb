"""Objects behind plain HTTP: read only, of one version, by URLs as they are given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from exchanges import KeptServer
from penstock.cli.app import run
from penstock.config import KIB
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

DATA = random.Random(0).randbytes(1_800_000)
PARTS = ps.FetchConfig(part_bytes=256 * KIB)
Script = Callable[[int, int, bytes], list[bytes]]


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer({"d/a b é%+": b"odd", "d/big": DATA, "d/empty": b""}) as running:
        yield running


@pytest.fixture
def store(server: FaultyServer) -> Iterator[ps.Store]:
    with ps.connect(f"{server.endpoint_url}/bucket/d/", fetch=PARTS) as opened:
        yield opened


def test_it_reads_whatever_the_key(store: ps.Store) -> None:
    """Whole objects, ranges, files and sizes; missing objects and ranges past the end are what they are everywhere."""
    assert bytes(store.read("a b é%+").data) == b"odd"
    assert bytes(store.read("big").data) == DATA
    assert bytes(store.read("big", ps.ByteRange(1_799_990, 1_800_100)).data) == DATA[-10:]
    assert bytes(store.read("empty").data) == b""
    assert b"".join(bytes(chunk.data) for chunk in store.read_parts(["big", "big"])) == DATA * 2
    with store.open("big") as file:
        file.seek(-100, 2)
        assert file.read() == DATA[-100:]
    assert store.stat("big").size_bytes == len(DATA)
    with pytest.raises(ps.ObjectMissingError, match="/bucket/d/none"):
        store.read("none")
    with pytest.raises(ps.SpanError):
        store.read("big", ps.ByteRange(1_800_000, 1_800_001))


def test_one_object_is_warmed(server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line reads one object by its URL into a cache, although such a store cannot be listed."""
    command = [
        "cache",
        "warm",
        f"{server.endpoint_url}/bucket/d/big?sig=a/b",
        "--cache",
        f"{tmp_path}/cache:100MB",
        "--json",
    ]
    assert run(command) == 0
    assert run(command) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["size_bytes"], first["fetched_bytes"]) == (len(DATA), len(DATA))
    assert second["fetched_bytes"] == 0


def test_it_is_read_only(store: ps.Store) -> None:
    """Listing, writing and deleting are refused by name, and so are keys that a server would resolve away."""
    for call in (lambda: list(store.list()), lambda: store.write("x", b"x"), lambda: store.delete("x")):
        with pytest.raises(ps.ConfigError, match="cannot list"):
            call()
    for key in ("../x", "a/./b", ""):
        with pytest.raises(ps.ConfigError, match="segment"):
            store.read(key)


def test_what_breaks_goes_on_and_what_changes_is_told(server: FaultyServer, store: ps.Store) -> None:
    """A body that breaks is resumed, a redirect followed; an object that changes between parts is never a mix."""
    server.fail("close", times=1, match="big", after_bytes=1000)
    assert bytes(store.read("big").data) == DATA
    server.fail("redirect_self", times=1, match="big")
    assert bytes(store.read("big").data) == DATA
    server.fail("change", times=1, match="big")
    with pytest.raises(ps.ObjectChangedError):
        store.read("big")


def test_queries_are_kept_and_never_shown(server: FaultyServer) -> None:
    """A signed URL is asked as it is, slashes in its query included; messages and reprs leave the query out."""
    url = f"{server.endpoint_url}/bucket/d/big?X-Sig=s3cr3t/+%2B"
    with ps.open(url) as file:
        assert file.read(5) == DATA[:5]
    assert server.requests[-1].path.endswith("/d/big?X-Sig=s3cr3t/+%2B")
    with pytest.raises(ps.ObjectMissingError) as caught:
        ps.open(url.replace("big", "none"))
    assert "s3cr3t" not in str(caught.value) + repr(file) + file.name
    with ps.connect(f"{server.endpoint_url}/bucket/d/?token=s3cr3t") as store:
        assert bytes(store.read("empty").data) == b""
        assert server.requests[-1].query == {"token": "s3cr3t"}
        assert "s3cr3t" not in store.describe("x")


def test_a_url_is_taken_as_a_url(server: FaultyServer) -> None:
    """Percent-encoding in a whole URL means what it means in a browser; a key of a store is taken as it is."""
    assert ps.open(f"{server.endpoint_url}/bucket/d/a%20b%20%C3%A9%25+").read() == b"odd"
    assert ps.open(f"{server.endpoint_url}/bucket/d/a b é%+").read() == b"odd"
    assert ps.open(f"{server.endpoint_url}/bucket/d/a%20b%20%C3%A9%25%2B?x=1").read() == b"odd"


def answering(head: bytes, *, head_status: int = 200, ranges: bool = True) -> Script:
    """A server of ``DATA`` whose answers carry `head`, that has no strong version and so refuses every ``If-Match``."""

    def script(_connection: int, _exchange: int, request: bytes) -> list[bytes]:
        lines = request.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        is_head = lines[0].startswith("HEAD")
        if "if-match" in headers:
            return [b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n"]
        if is_head and head_status != 200:
            return [b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % head_status]
        status, body, more = 200, DATA, b""
        if ranges and "range" in headers:
            first, last = headers["range"].removeprefix("bytes=").split("-")
            body = DATA[int(first) : int(last) + 1]
            more = b"Content-Range: bytes %d-%d/%d\r\n" % (int(first), int(first) + len(body) - 1, len(DATA))
            status = 206
        lead = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n%b%b\r\n" % (status, len(body), head, more)
        return [lead] if is_head else [lead, body]

    return script


def test_a_weak_etag_pins_nothing() -> None:
    """``W/"..."`` never matches ``If-Match``: such an object is read in parts all the same, pinned by length and time."""
    head = b'ETag: W/"1"\r\nLast-Modified: Sat, 21 Nov 2026 19:00:00 GMT\r\n'
    with KeptServer(answering(head)) as server, ps.connect(f"{server.url}/x/", fetch=PARTS) as store:
        assert bytes(store.read("big").data) == DATA
        assert store.stat("big").etag is None
        with store.open("big") as file:
            assert file.read() == DATA


@pytest.mark.parametrize(("status", "ranges"), [(403, True), (405, True), (501, False)])
def test_a_refused_head_becomes_a_get(status: int, ranges: bool) -> None:
    """URLs are signed, and some servers made, for GET alone: ``stat`` asks for one byte, or for the head of it all."""
    with KeptServer(answering(b'ETag: "1"\r\n', head_status=status, ranges=ranges)) as server:
        with ps.connect(f"{server.url}/x/") as store:
            assert store.stat("big")[:3] == ("big", len(DATA), '"1"')
    assert [head.split(b" ")[0] for head in server.heads] == [b"HEAD", b"GET"]


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_costs_one_request_more_only_once(status: int) -> None:
    """What is redirected is requested again to be followed; the next requests of the store are followed at once."""

    def script(_connection: int, _exchange: int, request: bytes) -> list[bytes]:
        if b" /x/" in request.partition(b"\r\n")[0]:
            head = b"HTTP/1.1 %d Elsewhere\r\nLocation: /y/big\r\nContent-Length: 5\r\n\r\n" % status
            return [head, b"moved"]
        return [b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 3\r\n\r\n', b"odd"]

    with KeptServer(script) as server, ps.connect(f"{server.url}/x/") as store:
        for requested in ([b"/x/big", b"/x/big", b"/y/big"], [b"/x/big", b"/y/big"]):
            before_count = len(server.heads)
            assert bytes(store.read("big").data) == b"odd"
            assert [head.split(b" ")[1] for head in server.heads[before_count:]] == requested
