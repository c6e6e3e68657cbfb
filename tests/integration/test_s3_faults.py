"""The S3 store and its wrappers against a server that misbehaves: what heals, what is retried, what is refused."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from exchanges import RawServer
from penstock.cli.app import run
from penstock.config import KIB, MIB, FetchConfig, HedgeConfig, RetryConfig, TransportConfig
from penstock.errors import (
    CancelledOperationError,
    ChecksumError,
    ConfigError,
    CredentialsError,
    DeadlineError,
    ObjectChangedError,
    ObjectMissingError,
    ProtocolError,
    ShortReadError,
    StoreError,
    ThrottledError,
    UnavailableError,
)
from penstock.fetch import Budget, PlanItem
from penstock.store.base import Wrapper
from penstock.store.faulty import Faulty
from penstock.store.inflight import perform
from penstock.store.retrying import Retrying
from penstock.store.writing import copy
from penstock.transport import engine
from penstock.types import CompleteMultipart, CreateMultipart, Get, Part
from servers.faulty import FaultyServer
from servers.shape import ETAGS
from store_contract.support import WatchingSink

pytestmark = pytest.mark.server

SECRET = "wJalrXUtnFEMI-s3cr3t-K7MDENG"
TOKEN = "FwoGZXIvYXdzE-t0ken-Ko"
KEYS = ps.Credentials(access_key="AKIDEXAMPLE", secret_key=SECRET, session_token=TOKEN)
FAST = RetryConfig(backoff_s=0.005, backoff_s_max=0.05)
SMALL_PARTS = FetchConfig(part_bytes=256 * KIB)
DATA = b"".join(number.to_bytes(4, "big") for number in range(400_000))  # 1.6 MB: seven parts, no two alike

Connect = Callable[..., ps.Store]


@pytest.fixture
def store(faulty: FaultyServer, connect_faulty: Connect) -> ps.Store:
    faulty.objects["a"] = b"the object"
    faulty.objects["big"] = DATA
    return connect_faulty(retry=FAST, fetch=SMALL_PARTS)


def of_layer(statistics: Any, name: str) -> Any:
    """The statistics of one layer of the stack."""
    while type(statistics).__name__ != name:
        statistics = statistics.inner
    return statistics


# ── healing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["wrong_region_301", "wrong_region_400"])
def test_a_wrong_region_heals(faulty: FaultyServer, connect_faulty: Connect, kind: str) -> None:
    """The region that a refusal names is used from then on; no attempt of ``Retrying`` is spent."""
    faulty.objects["a"] = b"x"
    faulty.region = "eu-central-1"
    faulty.fail(kind, times=1, region="eu-central-1")
    store = connect_faulty(anonymous=False, credentials=KEYS, region="us-east-1", retry=RetryConfig(attempts_max=1))
    assert bytes(store.read("a").data) == b"x"
    assert bytes(store.read("a").data) == b"x"
    scopes = [request.headers["authorization"].split("/")[2] for request in faulty.requests]
    assert scopes == ["us-east-1", "eu-central-1", "eu-central-1"]


def test_cancelling_reaches_what_was_sent_again(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may come, and be healed by another sending, before the first one has returned: cancelling ends that one."""
    faulty.objects["a"] = b"x"
    faulty.fail("wrong_region_400", times=1, region="eu-central-1")
    faulty.fail("stall_head", times=None)
    store = connect_faulty(anonymous=False, credentials=KEYS, region="us-east-1")
    submit, sent, again = engine.submit, itertools.count(), threading.Event()

    def submit_slowly(request: Any) -> Any:
        transfer = submit(request)
        if next(sent):
            again.set()
        else:
            assert again.wait(10)
        return transfer

    monkeypatch.setattr(engine, "submit", submit_slowly)
    sink = WatchingSink()
    store.submit(Get("a"), sink).cancel()
    assert isinstance(sink.wait().error, CancelledOperationError)


@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_clock_skew_heals(faulty: FaultyServer, connect_faulty: Connect, offset_s: float) -> None:
    """The store's clock is taken over, from GET's error document and from HEAD's bare 403 alike."""
    faulty.objects["a"] = b"x"
    faulty.clock_offset_s = offset_s
    store = connect_faulty(anonymous=False, credentials=KEYS, retry=RetryConfig(attempts_max=1))
    assert store.stat("a").size_bytes == 1
    assert len(faulty.requests) == 2
    assert bytes(store.read("a").data) == b"x"
    assert len(faulty.requests) == 3


def write_keys(path: Path, token: str) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = AKID\naws_secret_access_key = {SECRET}\naws_session_token = {token}\n"
    )


def test_expired_tokens_are_renewed(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ExpiredToken asks the credential chain again; with other keys the same operation goes through."""
    from penstock.store import credentials

    credentials._provider.cache_clear()
    credentials.botocore_session.cache_clear()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_keys(tmp_path / "credentials", "old-token")
    faulty.objects["a"] = b"x"
    faulty.tokens = {"old-token"}
    try:
        store = connect_faulty(anonymous=False)
        assert bytes(store.read("a").data) == b"x"
        write_keys(tmp_path / "credentials", "new-token")
        faulty.tokens = {"new-token"}
        assert bytes(store.read("a").data) == b"x"
        tokens = [request.headers["x-amz-security-token"] for request in faulty.requests]
        assert tokens == ["old-token", "old-token", "new-token"]
    finally:
        credentials._provider.cache_clear()
        credentials.botocore_session.cache_clear()


def test_fixed_keys_that_expired_are_an_error(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """Keys given as arguments cannot be renewed: CredentialsError at once, with a hint."""
    faulty.objects["a"] = b"x"
    faulty.tokens = set()
    with pytest.raises(CredentialsError, match="renew them"):
        connect_faulty(anonymous=False, credentials=KEYS).read("a")
    assert len(faulty.requests) == 1


@pytest.mark.parametrize(
    "process",
    [
        "/bin/false",
        "/bin/echo no json hunter2",
        "sh -c 'echo hunter2 >&2; exit 1'",
        """/bin/echo '{"Version": "hunter2"}'""",
    ],
)
def test_a_chain_that_breaks_is_an_error(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: str
) -> None:
    """Whatever goes wrong while credentials are looked up reaches whoever waits for them."""
    from penstock.store import credentials

    credentials._provider.cache_clear()
    credentials.botocore_session.cache_clear()
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {process}\n")
    try:
        with pytest.raises(
            CredentialsError, match=r"GET s3://bucket/a: the AWS credential chain failed.*Hint"
        ) as caught:
            connect_faulty(anonymous=False).read("a")
        assert "hunter2" not in "".join(traceback.format_exception(caught.value)).replace(process, "")
        for broken in (b"\xff\xfe[[[ not an ini file", b"what is this\n"):
            (tmp_path / "config").write_bytes(broken)
            credentials.botocore_session.cache_clear()
            with pytest.raises(ConfigError, match="parse"):
                connect_faulty(anonymous=False)
    finally:
        credentials._provider.cache_clear()
        credentials.botocore_session.cache_clear()


def test_a_chain_that_hangs_is_an_error(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A ``credential_process`` that waits for somebody keeps nobody waiting for ever; when it answers, reading goes on."""
    from penstock.store import credentials

    credentials._provider.cache_clear()
    credentials.botocore_session.cache_clear()
    faulty.objects["a"] = b"x"
    monkeypatch.setattr(credentials, "CHAIN_S_MAX", 0.2)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = /bin/cat {tmp_path}/keys\n")
    os.mkfifo(tmp_path / "keys")
    store = connect_faulty(anonymous=False)
    try:
        with pytest.raises(CredentialsError, match=r"GET s3://bucket/a: .* within 0\.2 s.*Hint"):
            store.read("a")
    finally:
        (tmp_path / "keys").write_text('{"Version": 1, "AccessKeyId": "AKID", "SecretAccessKey": "secret"}')
        credentials._provider.cache_clear()
        credentials.botocore_session.cache_clear()
    monkeypatch.setattr(credentials, "CHAIN_S_MAX", 20.0)
    assert bytes(store.read("a").data) == b"x"


def test_redirects_inside_the_endpoint_are_followed(faulty: FaultyServer, store: ps.Store) -> None:
    """A 307 to the endpoint itself is followed; one that never ends is an error."""
    faulty.fail("redirect_self", times=2)
    assert bytes(store.read("a").data) == b"the object"
    faulty.fail("redirect_self", times=None)
    with pytest.raises(ProtocolError, match="307"):
        store.read("a")


@pytest.mark.parametrize("location", ["http://10.0.0.1", "http://elsewhere.invalid", "https://127.0.0.1", "http://127.0.0.1:1",
                                      "http://[::1", "ftp://127.0.0.1", "http://x@127.0.0.2"])  # fmt: skip
def test_redirects_elsewhere_are_refused(faulty: FaultyServer, store: ps.Store, location: str) -> None:
    """A redirect to another host, port or scheme is an error: keys sign for nobody else. The engine lives on."""
    faulty.fail("redirect", times=1, location=location)
    with pytest.raises(ProtocolError, match="not followed"):
        store.read("a")
    assert bytes(store.read("a").data) == b"the object"


# ── pins ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_have_the_size_asked_for(faulty: FaultyServer, store: ps.Store) -> None:
    """A large object is asked for in parts, each pinned to one version, which cover it exactly."""
    info = store.stat("big")
    chunks = list(store.read_parts([("big", ps.ByteRange(0, info.size_bytes))]))
    assert b"".join(chunk.data for chunk in chunks) == DATA
    gets = [request for request in faulty.requests if request.method == "GET"]
    spans = sorted(request.span for request in gets if request.span is not None)
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert {end - start for start, end in spans[:-1] if end is not None} == {256 * KIB}


@pytest.mark.parametrize("verb", ["read", "read_parts", "read_many", "open"])
def test_a_change_between_parts_is_never_a_mix(faulty: FaultyServer, store: ps.Store, verb: str) -> None:
    """An object replaced between two parts is ``ObjectChangedError``, whichever way it is read."""
    faulty.fail("change", times=1, match="big")

    def piecewise() -> None:
        with store.open("big") as file:
            file.read(70_000)
            file.seek(1_500_000)
            file.read()

    call = {
        "read": lambda: store.read("big"),
        "read_many": lambda: list(store.read_many(["big"])),
        "read_parts": lambda: list(store.read_parts(["big"])),
        "open": piecewise,
    }[verb]
    with pytest.raises(ObjectChangedError) as caught:
        call()
    assert "s3://bucket/big" in str(caught.value)
    assert caught.value.hint


def test_a_server_that_ignores_if_match_is_caught(faulty: FaultyServer, store: ps.Store) -> None:
    """A body resumed on another version is refused also where the server does not look at If-Match."""
    faulty.objects["big"] = DATA
    operation = Get("big", ps.ByteRange(0, 100), if_match='"another"')
    answer = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/1600000\r\nETag: "this"\r\n\r\n'
    with RawServer(answer + bytes(100)) as raw:
        lax = ps.connect("s3://bucket", endpoint_url=raw.url, anonymous=True)
        with pytest.raises(ObjectChangedError):
            perform(lax, operation)


# ── wrong and short answers ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["ignore_range", "wrong_range"])
def test_an_answer_to_another_question_is_refused(faulty: FaultyServer, store: ps.Store, kind: str) -> None:
    """200 to a ranged request, or another range than asked, is ProtocolError: never other bytes."""
    faulty.fail(kind, times=None)
    with pytest.raises(ProtocolError, match="requested"):
        store.read("big", ps.ByteRange(1000, 2000))


def test_a_whole_answer_to_a_range_that_is_the_whole_is_used(faulty: FaultyServer, store: ps.Store) -> None:
    """200 is used where it provably holds the bytes asked for."""
    faulty.fail("ignore_range", times=None)
    assert bytes(store.read("a", ps.ByteRange(0, 10)).data) == b"the object"
    assert bytes(store.read("a", ps.ByteRange(0, 100)).data) == b"the object"


@pytest.mark.parametrize(("kind", "what"), [("close", "close"), ("reset", "reset"), ("promise_more", "promise_more")])
def test_a_broken_body_goes_on_where_it_broke(faulty: FaultyServer, store: ps.Store, kind: str, what: str) -> None:
    """The rest is asked for from the offset reached, with If-Match; the bytes are exact and verified."""
    faulty.objects["one"] = DATA[:50_000]
    faulty.fail(kind, times=2, match="one", after_bytes=20_000)
    etag = faulty.objects.versions["one"].etag
    if kind == "promise_more":
        with pytest.raises((ShortReadError, ProtocolError)):
            perform(
                ps.connect(
                    faulty.url, endpoint_url=faulty.endpoint_url, anonymous=True, retry=RetryConfig(attempts_max=1)
                ),
                Get("one"),
            )
        return
    blob = store.read("one")
    assert bytes(blob.data) == DATA[:50_000]
    assert blob.verified == "crc32c"
    first, *resumed = [request for request in faulty.requests if request.key == "one"]
    assert first.span is None
    for request in resumed:
        assert request.headers["if-match"] == etag
        assert request.span is not None
        assert request.span[1] == 50_000
    if kind == "close":
        assert [request.span for request in resumed] == [(20_000, 50_000), (40_000, 50_000)]
        assert of_layer(store.statistics(), "RetryStatistics").resumed_count == 2


def test_a_body_that_breaks_after_a_change_is_not_resumed(faulty: FaultyServer, store: ps.Store) -> None:
    """Broken, then replaced: ObjectChangedError, not half of each."""
    faulty.objects["one"] = DATA[:50_000]

    def replace(request: Any) -> bool:
        if request.key == "one" and request.span is not None:
            faulty.objects["one"] = DATA[1:50_001]
        return False

    faulty.fail("500", match=replace)
    faulty.fail("close", times=1, match="one", after_bytes=20_000)
    with pytest.raises(ObjectChangedError):
        store.read("one")


def test_without_etags_a_broken_body_begins_anew() -> None:
    """Where nothing pins the version, a broken body is asked for from its first byte."""
    with FaultyServer({"one": DATA[:50_000]}, etags="none") as server:
        store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=FAST)
        server.fail("close", times=2, after_bytes=20_000)
        assert bytes(store.read("one").data) == DATA[:50_000]
        assert [request.span for request in server.requests] == [None] * 3
        server.fail("close", times=1, after_bytes=100)
        assert bytes(store.read("one", ps.ByteRange(7, 40_000)).data) == DATA[7:40_000]


@pytest.mark.parametrize("etags", ["none", "weak"])
@pytest.mark.parametrize("verb", ["read", "read_parts", "open"])
def test_without_etags_parts_of_two_versions_are_never_one_body(etags: str, verb: str) -> None:
    """A part that broke, and was asked for again after the object was replaced, is not joined to parts of the old version."""
    with FaultyServer({"big": DATA}, etags=etags) as server:
        store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=FAST, fetch=SMALL_PARTS)

        def replace(request: Any) -> bool:
            if request.attempt and server.objects["big"] == DATA:
                server.objects["big"] = DATA[::-1]
            return False

        server.fail("500", match=replace, times=None)
        server.fail("close", match=lambda request: request.span is not None and request.span[0] > 1_000_000)
        read: dict[str, Callable[[], Any]] = {
            "read": lambda: store.read("big").data,
            "read_parts": lambda: b"".join(chunk.data for chunk in store.read_parts(["big"])),
            "open": lambda: store.open("big").read(),
        }
        with pytest.raises(ObjectChangedError):
            read[verb]()


@pytest.mark.parametrize("etags", sorted(ETAGS))
def test_what_was_listed_can_be_read_whatever_the_etags_look_like(etags: str, tmp_path: Path) -> None:
    """Objects pinned by their listing are read whole, in parts, as a file and by ``cp``; a replaced one is refused."""
    with FaultyServer({"a": b"small", "big": DATA}, etags=etags) as server:
        place = {"endpoint_url": server.endpoint_url, "anonymous": True}
        with ps.connect(server.url, retry=FAST, fetch=SMALL_PARTS, **place) as store:
            listed = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
            assert [bytes(blob.data) for blob in store.read_many(listed)] == [b"small", DATA]
            assert b"".join(bytes(chunk.data) for chunk in store.read_parts(listed)) == b"small" + DATA
            with store.open("big") as file:
                assert file.read(10) == DATA[:10]
                assert file.read() == DATA[10:]
            command = ["cp", f"{server.url}/", f"{tmp_path}/", "--endpoint-url", server.endpoint_url]
            assert run([*command, "--anonymous"]) == 0
            assert (tmp_path / "big").read_bytes() == DATA
            if listed[0].etag is not None:
                server.objects["a"] = b"other"
                with pytest.raises(ObjectChangedError):
                    next(store.read_many(listed))


@pytest.mark.parametrize("kind", ["wrong_checksum", "corrupt"])
def test_wrong_checksums_are_retried_then_told(faulty: FaultyServer, store: ps.Store, kind: str) -> None:
    """Bytes that do not match their checksum are asked for again; if they never match, it is ChecksumError."""
    faulty.fail(kind, times=1)
    assert bytes(store.read("a").data) == b"the object"
    faulty.fail(kind, times=None)
    with pytest.raises(ChecksumError) as caught:
        store.read("a")
    assert caught.value.attempts_count == 5


def test_a_store_that_keeps_another_checksum_is_found_at_the_commit(
    faulty: FaultyServer, connect_faulty: Connect
) -> None:
    """A kept checksum that is not that of the bytes sent is an error of the upload, and later ones ask for none."""

    def spoil(request: Any) -> bool:
        if request.method == "HEAD":
            faulty.objects.versions["new"] = faulty.objects.versions["new"]._replace(crc32c="AAAAAA==")
        return False

    def written() -> None:
        with store.writer("new", part_bytes=100_000) as file:
            file.write(DATA[:300_000])

    def asked() -> list[bool]:
        return ["x-amz-checksum-type" in request.headers for request in faulty.requests if "uploads" in request.query]

    store = connect_faulty()
    written()
    written()
    assert [request.method for request in faulty.requests].count(
        "HEAD"
    ) == 1  # it keeps the right one, once and for all
    assert asked() == [True, True]
    store = connect_faulty()
    faulty.fail("500", match=spoil)
    with pytest.raises(ChecksumError, match="keeps the crc32c AAAAAA==,"):
        written()
    assert not faulty.uploads
    written()
    assert asked() == [True, True, True, False]
    assert bytes(store.read("new").data) == DATA[:300_000]


def test_a_corrupt_part_is_caught_by_the_whole(faulty: FaultyServer, store: ps.Store) -> None:
    """A byte flipped in one part of many is found by the checksum of the whole: read again, or told, never handed out."""

    def part(request: Any) -> bool:
        return bool(request.is_read and request.span and request.span[0] > 0)

    faulty.fail("corrupt", times=1, match=part)
    assert bytes(store.read("big").data) == DATA
    faulty.fail("corrupt", times=1, match=part)
    (blob,) = store.try_read_many(["big"])
    assert isinstance(blob, ps.Blob)
    assert (bytes(blob.data), blob.verified) == (DATA, "crc32c")
    faulty.fail("corrupt", times=1, match=part)
    with pytest.raises(ChecksumError):  # at the last part: the others were handed out
        list(store.read_parts(["big"]))
    faulty.fail("corrupt", times=None, match=part)
    with pytest.raises(ChecksumError, match=r"s3://bucket/big.*Hint"):
        store.read("big")
    with store.open("big") as file, pytest.raises(ChecksumError, match=r"s3://bucket/big.*Hint"):
        file.read()
    faulty.heal()
    with store.open("big") as file:
        assert file.read() == DATA


def test_error_inside_200_complete_is_an_error(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """CompleteMultipartUpload's 200 with an error inside is retried, and an error if it stays."""
    store = connect_faulty(retry=FAST)
    upload_id = perform(store, CreateMultipart("new")).value
    faulty.fail("complete_error", times=None)
    with pytest.raises(UnavailableError, match="InternalError") as caught:
        perform(store, CompleteMultipart("new", upload_id, (Part(1, '"x"'),)))
    assert caught.value.attempts_count == 5
    faulty.heal()
    faulty.fail("complete_error", times=1)
    with store.writer("new") as writer:
        writer.write(b"data" * 3_000_000)
    assert faulty.objects["new"] == b"data" * 3_000_000


def test_a_commit_whose_answer_is_lost_is_done(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """The repeated CompleteMultipartUpload finds no upload; the object tells that it was committed. So do large copies."""
    core: Any = connect_faulty()
    while isinstance(core, Wrapper):
        core = core.inner
    lossy = Retrying(Faulty(core, fail_at_call=9), config=FAST)  # CREATE, seven parts, COMPLETE
    with lossy.writer("new", part_bytes=256 * KIB) as writer:
        writer.write(DATA)
    assert lossy.retried_count == 1
    assert writer.info is not None
    assert (writer.info.size_bytes, writer.info.etag) == (len(DATA), core.stat("new").etag)
    assert faulty.objects["new"] == DATA
    assert len([request for request in faulty.requests if request.is_complete]) == 2
    lossy = Retrying(Faulty(core, fail_at_call=10), config=FAST)  # HEAD first
    assert copy(lossy, "new", "copied", copy_bytes_max=1, part_bytes=256 * KIB).size_bytes == len(DATA)
    assert lossy.retried_count == 1
    assert faulty.objects["copied"] == DATA
    assert not faulty.uploads


@pytest.mark.parametrize("there", ["nothing", "another size", "the same size and parts"])
def test_a_dropped_upload_is_not_taken_for_committed(faulty: FaultyServer, connect_faulty: Connect, there: str) -> None:
    """NoSuchUpload after a retry stays an error where the key holds nothing, or another version."""
    store = connect_faulty(retry=FAST)

    def write(data: bytes) -> None:
        with store.writer("key", part_bytes=256 * KIB) as writer:
            writer.write(data)

    if there != "nothing":
        write(DATA[::-1] if there == "the same size and parts" else DATA[:-1])
    before = dict(faulty.objects)

    def drop(request: Any) -> bool:
        if request.is_complete:
            faulty._shape.uploads.clear()  # as a lifecycle rule would
        return bool(request.is_complete)

    faulty.fail("500", times=1, match=drop)
    with pytest.raises(ObjectMissingError, match="NoSuchUpload") as caught:
        write(DATA)
    assert caught.value.attempts_count == 2
    assert dict(faulty.objects) == before


@pytest.mark.parametrize("kind", ["html", "empty_200"])
def test_a_page_with_status_200_is_no_write(faulty: FaultyServer, store: ps.Store, kind: str) -> None:
    """A portal answers everything with 200: writes and deletes go out again until the store has said so, or are errors."""
    for name, call in {
        "write": lambda: store.write("new", b"data"),
        "if_absent": lambda: store.write("claim", b"data", if_absent=True),
        "delete": lambda: store.delete("a"),
    }.items():
        faulty.fail(kind, times=2)
        call()
        assert ("new" in faulty.objects, "claim" in faulty.objects, "a" in faulty.objects) == {
            "write": (True, False, True),
            "if_absent": (True, True, True),
            "delete": (True, True, False),
        }[name]
    faulty.fail(kind, times=None)
    for call in (lambda: store.write("b", b"data"), lambda: store.delete("new")):
        with pytest.raises(ProtocolError, match="Hint"):
            call()


@pytest.mark.parametrize("kind", ["html", "empty_200", "truncated_listing", "garbage_headers", "garbage_status"])
def test_listings_that_are_none_are_refused(faulty: FaultyServer, connect_faulty: Connect, kind: str) -> None:
    """A listing that is no listing is a typed error, never an empty bucket."""
    faulty.objects["a"] = b"x"
    faulty.fail(kind, times=None)
    with pytest.raises(StoreError):
        list(connect_faulty(retry=FAST).list())


def test_a_giant_document_is_refused(connect_faulty: Connect) -> None:
    """A listing announced with 5 GB is refused without a buffer for it."""
    with RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n<") as raw:
        with pytest.raises(ProtocolError, match="5000000000"):
            list(ps.connect("s3://bucket", endpoint_url=raw.url, anonymous=True, retry=FAST).list())


# ── retrying ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["500", "503", "slow_down", "429", "reset_head", "close_head", "garbage_status"])
def test_what_passes_is_retried(faulty: FaultyServer, store: ps.Store, kind: str) -> None:
    """Failures that pass are tried again, with GET, HEAD, LIST, PUT and DELETE."""
    for verb in (
        lambda: store.read("a"),
        lambda: store.stat("a"),
        lambda: list(store.list()),
        lambda: store.write("b", b"y"),
        lambda: store.delete("b"),
    ):
        faulty.fail(kind, times=2)
        verb()
        faulty.heal()
    retried_count = of_layer(store.statistics(), "RetryStatistics").retried_count
    assert 5 <= retried_count <= 10  # on a reused connection, libcurl itself tries once more where nothing came back


def test_giving_up_tells_attempts_and_seconds(faulty: FaultyServer, store: ps.Store) -> None:
    """After ``attempts_max`` the error says how many there were, how long they took, and what the last one said."""
    faulty.fail("500", times=None)
    with pytest.raises(UnavailableError) as caught:
        store.read("a")
    error = caught.value
    assert (error.attempts_count, error.status, error.code) == (5, 500, "InternalError")
    assert error.elapsed_s is not None
    assert 0 < error.elapsed_s < 5
    assert "5 attempts in" in str(error)
    assert error.request_id == "REQ00000005"
    assert len(faulty.requests) == 5
    assert of_layer(store.statistics(), "RetryStatistics").given_up_count == 1


def test_total_time_bounds_the_attempts(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """No attempt starts after ``total_s_max``, however many would be left."""
    faulty.fail("503", times=None)
    store = connect_faulty(retry=RetryConfig(attempts_max=1000, total_s_max=0.3, backoff_s=0.02))
    started_s = time.monotonic()
    with pytest.raises(ThrottledError):
        store.read("a")
    assert time.monotonic() - started_s < 2


def test_retry_after_is_heeded(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A 503 with Retry-After is not asked again earlier, and the wait is bounded by ``backoff_s_max``."""
    faulty.objects["a"] = b"x"
    faulty.fail("503_retry_after", times=1, seconds=1)
    started_s = time.monotonic()
    connect_faulty(retry=RetryConfig(backoff_s=0.001)).read("a")
    assert time.monotonic() - started_s >= 1
    faulty.fail("503_retry_after", times=1, seconds=3600)
    started_s = time.monotonic()
    connect_faulty(retry=RetryConfig(backoff_s=0.001, backoff_s_max=0.05)).read("a")
    assert time.monotonic() - started_s < 1


def test_what_is_cancelled_gives_its_memory_back_without_the_collector(
    faulty: FaultyServer, connect_faulty: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing an iterator returns the memory of what was in flight to the budget, although no cycle is collected."""
    budget = Budget(64 * MIB)
    monkeypatch.setattr("penstock.store.base.process_budget", lambda: budget)
    faulty.objects["a"] = faulty.objects["b"] = bytes(8 * MIB)
    store = connect_faulty(fetch=FetchConfig(part_bytes=MIB))
    faulty.fail("stall", match="b", times=None, after_bytes=100)
    gc.collect()
    gc.disable()
    try:
        parts = store.read_parts(["a", "b"])
        assert next(parts).key == "a"
        while not any(request.fault == "stall" for request in faulty.requests):
            threading.Event().wait(0.01)
        parts.close()  # type: ignore[attr-defined]
        del parts
        deadline_s = time.monotonic() + 15
        while budget.statistics().used_bytes > budget.statistics().free_bytes:
            assert time.monotonic() < deadline_s, budget.statistics()
            threading.Event().wait(0.01)
    finally:
        gc.enable()


# ── throttling, hedging, limits ─────────────────────────────────────────────────────────────────────────────────────


def test_a_late_answer_is_overtaken(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A second request overtakes a first one that does not answer; the bytes are exact, and at most 5% are extra."""
    faulty.objects["a"] = b"the object"
    faulty.objects["late"] = DATA[:100_000]
    store = connect_faulty(hedge=HedgeConfig(wait_s_min=0.05))
    for _ in range(3):
        list(store.read_many(["a"] * 100))
    faulty.fail("stall_head", times=1, match="late")
    started_s = time.monotonic()
    assert bytes(store.read("late").data) == DATA[:100_000]
    assert time.monotonic() - started_s < 5
    statistics = of_layer(store.statistics(), "HedgeStatistics")
    assert (statistics.hedged_count, statistics.won_count) == (1, 1)
    faulty.fail("delay", times=None, match="late", seconds=0.3)
    list(store.read_many(["late"] * 200))
    statistics = of_layer(store.statistics(), "HedgeStatistics")
    assert statistics.hedged_count <= 11 + 0.05 * 501  # the bucket begins full, with 10


def test_hedging_and_resuming_never_share_a_buffer(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """An answer that broke, went on late and was asked for a second time gives the right bytes."""
    faulty.objects["a"] = b"the object"
    faulty.objects["torn"] = DATA[:100_000]
    store = connect_faulty(hedge=HedgeConfig(wait_s_min=0.02), retry=FAST)
    for _ in range(3):
        list(store.read_many(["a"] * 100))
    for _ in range(10):
        faulty.heal()
        faulty.fail("close", times=1, match="torn", after_bytes=30_000)
        faulty.fail("delay", times=1, match="torn", seconds=0.3)
        assert bytes(store.read("torn").data) == DATA[:100_000]
        assert bytes(store.read("torn", ps.ByteRange(5, 90_000)).data) == DATA[5:90_000]


def test_the_limit_holds(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """Never more than ``requests_max`` requests are under way, and all get through."""
    faulty.objects["a"] = b"x"
    store = connect_faulty(requests_max=3, retry=FAST)
    faulty.random_faults(["503", "reset"], ratio=0.1)
    assert len(list(store.read_many(["a"] * 300))) == 300
    statistics = of_layer(store.statistics(), "LimitStatistics")
    assert (statistics.in_flight_count, statistics.waiting_count) == (0, 0)
    assert statistics.waited_count > 0
    assert faulty.connections_total < 3 + len([request for request in faulty.requests if request.fault])


def test_deadlines_are_errors_with_hints(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A silent store is DeadlineError after the limits of ``TransportConfig``."""
    faulty.fail("stall_head", times=None)
    store = connect_faulty(
        transport=TransportConfig(first_byte_s_max=0.3), retry=RetryConfig(attempts_max=2, backoff_s=0)
    )
    with pytest.raises(DeadlineError, match=r"no answer within 0\.3 s.*2 attempts.*TransportConfig"):
        store.read("a")


# ── records and secrets ─────────────────────────────────────────────────────────────────────────────────────────────


def test_attempts_are_told(faulty: FaultyServer, store: ps.Store) -> None:
    """A completion lists every attempt: status, where it began, bytes, times, throttling, the store's name for it."""
    faulty.fail("slow_down", times=1)
    completion = perform(store, Get("a"))
    refused, right = completion.attempts
    assert (refused.status, refused.throttled, refused.received_bytes) == (503, True, 0)
    assert (right.status, right.throttled, right.received_bytes, right.offset_bytes) == (200, False, 10, 0)
    assert right.request_id == "REQ00000002"
    assert 0 < right.first_byte_s <= right.total_s
    assert right.start_s >= refused.start_s


def test_no_secret_is_ever_told(
    faulty: FaultyServer, connect_faulty: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither errors, nor their pickles, nor reprs, nor the log hold the secret key, the token or a signature."""
    caplog.set_level(logging.DEBUG)
    faulty.objects["a"] = b"x"
    store = connect_faulty(
        anonymous=False, credentials=KEYS, retry=RetryConfig(attempts_max=1), sse_customer_key=b"K" * 32
    )
    texts = [repr(store), repr(KEYS), str(KEYS), repr(store.statistics())]
    for kind in ("403", "500", "slow_down", "expired_token", "html", "reset", "close", "garbage_status", "redirect"):
        faulty.fail(kind, times=1, location="http://10.0.0.1", after_bytes=0)
        try:
            store.stat("a") if kind == "403" else store.read("a")
        except StoreError as error:
            texts += [
                str(error),
                str(pickle.loads(pickle.dumps(error))),
                repr(error),
                repr(error.__cause__),
                str(error.__dict__),
            ]
    layer: Any = store
    while layer is not None:
        texts += [repr(layer), str(getattr(layer, "endpoint", "")), repr(getattr(layer, "options", ""))]
        layer = getattr(layer, "inner", None)
    texts.append(caplog.text)
    assert len(texts) > 40
    for text in texts:
        for secret in (SECRET, TOKEN, "X-Amz-Signature", "Signature=", "S0tLS0tL", "K" * 32):
            assert secret not in text


def test_stores_pickle_as_their_configuration(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """A pickled stack has the same layers, limits and fetch settings, and reads the same bytes."""
    faulty.objects["a"] = b"x"
    store = connect_faulty(retry=FAST, fetch=SMALL_PARTS, requests_max=7, hedge=HedgeConfig(ratio_max=0.01))
    again = pickle.loads(pickle.dumps(store))
    assert bytes(again.read("a").data) == b"x"
    one: Any = store
    other: Any = again
    while one is not None:
        assert type(one) is type(other)
        assert other.fetch_config == SMALL_PARTS
        for name in ("config", "requests_max", "transport", "options"):
            assert getattr(one, name, None) == getattr(other, name, None)
        one, other = getattr(one, "inner", None), getattr(other, "inner", None)
    faulty.heal()
