"""Objects that are transformed while they are read: sizes that listings get wrong, no ranges, lengths that nobody knows."""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli.app import run
from penstock.config import MIB
from penstock.errors import ConfigError, ObjectChangedError, ProtocolError
from penstock.fetch import Budget, PlanItem
from servers.faulty import FaultyServer
from servers.transforming import TransformingServer

pytestmark = pytest.mark.server


def tar_of(shard: int, samples_count: int) -> bytes:
    """A shard of text files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(samples_count):
            member = tarfile.TarInfo(f"{shard}-{number:03d}.txt")
            member.size = 3000
            tar.addfile(member, io.BytesIO(b"%03d" % number * 1000))
    return file.getvalue()


OBJECTS = {
    "lines.jsonl": b"".join(b'{"a": %d}\n' % number for number in range(20_000)),
    "large.bin": random.Random(1).randbytes(20 * MIB + 13),
    "s/0.tar": tar_of(0, 20),
    "s/1.tar": tar_of(1, 30),
}
FAST = ps.RetryConfig(attempts_max=2, backoff_s=0.005)
EXCESS = [500, -500, 0]


def place(server: TransformingServer) -> dict[str, Any]:
    return {"endpoint_url": server.url, "anonymous": True, "retry": FAST}


@pytest.fixture(params=[True, False], ids=["ranges", "no-ranges"])
def has_ranges(request: pytest.FixtureRequest) -> bool:
    """Whether the server sends ranges."""
    return bool(request.param)


@pytest.mark.parametrize("excess_bytes", EXCESS)
@pytest.mark.parametrize("head_tells", [True, False], ids=["head", "no-head"])
def test_listed_sizes_are_hints_for_whole_objects(has_ranges: bool, excess_bytes: int, head_tells: bool) -> None:
    """What is listed with a wrong size is read whole and right, by all ways that read whole objects."""
    with TransformingServer(
        OBJECTS,
        has_ranges=has_ranges,
        listed_excess_bytes=excess_bytes,
        head_excess_bytes=excess_bytes if head_tells else None,
    ) as server:
        with ps.connect("s3://bucket", **place(server)) as store:
            plan = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
            assert {blob.key: bytes(blob.data) for blob in store.read_many(plan)} == OBJECTS
            found = dict.fromkeys(OBJECTS, b"")
            for chunk in store.read_parts(plan):
                assert chunk.offset_bytes == len(found[chunk.key])
                found[chunk.key] += bytes(chunk.data)
            assert found == OBJECTS


def test_a_wrong_size_costs_no_more_than_once() -> None:
    """After the first wrong size, objects are requested whole at once."""
    objects = {f"{number:03d}": b"x" * 2000 for number in range(200)}
    with (
        TransformingServer(objects, has_ranges=True, listed_excess_bytes=7) as server,
        ps.connect("s3://bucket", **place(server)) as store,
    ):
        plan = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
        blobs = store.read_many(plan)
        assert [bytes(blob.data) for blob in blobs] == list(objects.values())
        requests_count = len(server.requests)
    assert requests_count < 300


WHOLE_READS: dict[str, Callable[[ps.Store, list[PlanItem]], dict[str, bytes]]] = {
    "read_many": lambda store, plan: {blob.key: bytes(blob.data) for blob in store.read_many(plan)},
    "read_parts": lambda store, plan: {
        key: b"".join(bytes(chunk.data) for chunk in chunks)
        for key, chunks in itertools.groupby(store.read_parts(plan), key=lambda chunk: chunk.key)
    },
}


@pytest.mark.parametrize("read", WHOLE_READS.values(), ids=WHOLE_READS)
def test_a_listing_that_a_head_refutes_is_no_contradiction(has_ranges: bool, read: Any) -> None:
    """If objects are sent with a length that only the listing contradicts, they are read, for a HEAD each at most."""
    objects = OBJECTS | {f"{number:03d}": b"x" * 2000 for number in range(100)}
    with (
        TransformingServer(
            objects, has_ranges=has_ranges, listed_excess_bytes=7, head_excess_bytes=0, states_length=True
        ) as server,
        ps.connect("s3://bucket", hedge=ps.HedgeConfig(ratio_max=0), **place(server)) as store,
    ):
        plan = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
        assert read(store, plan) == objects
        assert sum(method == "HEAD" for method, *_ in server.requests) <= len(objects) + 1


@pytest.mark.parametrize(("excess_bytes", "head_tells"), [(1000, True), (-1000, False)], ids=["head", "no-head"])
@pytest.mark.parametrize("read", WHOLE_READS.values(), ids=WHOLE_READS)
@pytest.mark.parametrize("key", ["lines.jsonl", "large.bin", "empty"])
def test_a_length_that_others_contradict_is_an_error(
    has_ranges: bool, excess_bytes: int, head_tells: bool, read: Any, key: str
) -> None:
    """An answer that states another length than the listing, and no HEAD that agrees, is never taken for the object."""
    with (
        TransformingServer(
            OBJECTS | {"empty": b""},
            has_ranges=has_ranges,
            listed_excess_bytes=excess_bytes,
            head_excess_bytes=excess_bytes if head_tells else None,
            states_length=True,
        ) as server,
        ps.connect("s3://bucket", **place(server)) as store,
    ):
        plan = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list(key)]
        with pytest.raises((ProtocolError, ObjectChangedError)):
            read(store, plan)


def test_a_wrong_size_of_another_version_stays_an_error() -> None:
    """Only the same version may have another size than the listing; else the object was replaced."""
    with (
        TransformingServer(OBJECTS, has_ranges=True) as server,
        ps.connect("s3://bucket", **place(server)) as store,
    ):
        for etag in ('"2"', None):
            plan = [PlanItem("lines.jsonl", etag=etag, size_bytes=5)]
            with pytest.raises(ObjectChangedError):
                list(store.read_many(plan))


@pytest.mark.parametrize("excess_bytes", EXCESS)
def test_open_reads_them(has_ranges: bool, excess_bytes: int) -> None:
    """Files of objects without ranges or with a wrong listed size read in sequence, by lines and after a jump."""
    with (
        TransformingServer(OBJECTS, has_ranges=has_ranges, listed_excess_bytes=excess_bytes) as server,
        ps.connect("s3://bucket", **place(server)) as store,
    ):
        for key, data in OBJECTS.items():
            with store.open(key) as file:
                assert file.read() == data
                assert file.seek(-100, io.SEEK_END) == len(data) - 100
                assert file.read() == data[-100:]
        with store.open("lines.jsonl") as file:
            assert sum(1 for _ in file) == 20_000


@pytest.mark.parametrize("excess_bytes", EXCESS)
@pytest.mark.parametrize("named", [True, False], ids=["named", "listed"])
def test_the_loader_reads_them(has_ranges: bool, excess_bytes: int, named: bool) -> None:
    """Shards of a format that streams give every sample, whatever the listing says."""
    with TransformingServer(
        OBJECTS, has_ranges=has_ranges, listed_excess_bytes=excess_bytes, head_excess_bytes=excess_bytes
    ) as server:
        shards: Any = ["s3://bucket/s/0.tar", "s3://bucket/s/1.tar"] if named else "s3://bucket/s/"
        with ps.Loader(ps.shards(shards, **place(server)).batch(4)) as loader:
            keys = [key for batch in loader for key in batch["__key__"]]
    assert len(keys) == len(set(keys)) == 50


@pytest.mark.parametrize("excess_bytes", EXCESS)
def test_the_commands_copy_them(
    has_ranges: bool, excess_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cp`` and ``sync`` write what arrived, one object and a folder."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with TransformingServer(OBJECTS, has_ranges=has_ranges, listed_excess_bytes=excess_bytes) as server:
        options = ["--endpoint-url", server.url, "--anonymous"]
        assert run(["cp", "s3://bucket/large.bin", str(tmp_path / "one.bin"), *options]) == 0
        assert (tmp_path / "one.bin").read_bytes() == OBJECTS["large.bin"]
        for command in ("cp", "sync"):
            assert run([command, "s3://bucket/", f"{tmp_path}/{command}/", *options]) == 0
            found = {key: (tmp_path / command / key).read_bytes() for key in OBJECTS}
            assert found == OBJECTS


@pytest.mark.parametrize("refusal", ["501", "ignore_range"])
def test_large_objects_with_a_length_are_read_without_ranges(refusal: str) -> None:
    """A store that tells the length, but refuses or ignores ranges, is asked for the whole object in one request."""
    data = random.Random(4).randbytes(40 * MIB + 7)
    with (
        FaultyServer({"large": data, "small": data[:100]}) as server,
        ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True, retry=FAST) as store,
    ):
        server.fail(refusal, times=None, match=lambda request: request.span is not None)
        assert bytes(store.read("large").data) == data
        assert [bytes(blob.data) for blob in store.read_many(["large", "small", "large"])] == [data, data[:100], data]
        with store.open("large") as file:
            assert file.read() == data


def test_a_body_beyond_half_the_budget_streams_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long body of unknown length is given up and streamed in parts, within the budget; without ranges it is refused."""
    budget = Budget(8 * MIB)
    monkeypatch.setattr("penstock.store.base.process_budget", lambda: budget)
    for has_ranges in (True, False):
        with (
            TransformingServer(OBJECTS, has_ranges=has_ranges) as server,
            ps.connect("s3://bucket", fetch=ps.FetchConfig(part_bytes=1 * MIB), **place(server)) as store,
        ):
            if not has_ranges:
                with pytest.raises(ConfigError, match=r"unknown length has \d+ bytes or more.*budget of"):
                    list(store.read_parts(["large.bin"]))
                continue
            found = bytearray()
            for chunk in store.read_parts(["large.bin", "lines.jsonl"]):
                found += chunk.data
                assert budget.statistics().used_bytes <= 2 * budget.bytes_max
                del chunk
            assert bytes(found) == OBJECTS["large.bin"] + OBJECTS["lines.jsonl"]
            with pytest.raises(ConfigError, match="more than half of the budget"):
                store.read("large.bin")
    assert budget.statistics().used_bytes <= budget.statistics().free_bytes
