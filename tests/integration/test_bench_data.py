"""What a benchmark finds out of a URL before it measures: odd data has an answer, too."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock as ps
from loading import counted, shard
from penstock.bench.data import look_at
from penstock.bench.record import BenchRecord

if TYPE_CHECKING:
    from penstock.testing.ministack import Ministack

pytestmark = pytest.mark.server


@pytest.fixture
def store(ministack: Ministack, monkeypatch: pytest.MonkeyPatch) -> Iterator[ps.Store]:
    """A bucket, to which the environment leads."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    ministack.create_bucket("odd")
    with ps.connect("s3://odd/") as store:
        yield store


def test_nothing_and_one_object(store: ps.Store) -> None:
    """An empty URL is an error; a single object is a data set of one sample."""
    with pytest.raises(ps.ObjectMissingError):
        look_at("s3://odd/empty/", {})
    store.write("one.tar", shard(counted(range(2))))
    named = look_at("s3://odd/one.tar", {})
    assert (named.objects_count, named.format, named.total_bytes) == (1, "tar", store.stat("one.tar").size_bytes)
    store.write("one/a.jpg", b"\xff\xd8\xff" + bytes(100))
    facts = look_at("s3://odd/one/", {})
    assert (facts.objects_count, facts.format, facts.prefix, facts.is_picture) == (1, "objects", "one", True)


def test_many_objects_are_sampled(store: ps.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more objects than clients can be told of, the first ones are read, and the title says how many."""
    monkeypatch.setattr("penstock.bench.data.KEYS_MAX", 3)
    for number in range(5):
        store.write(f"many/{number % 2}/{number}.bin", bytes(10))
    facts = look_at("s3://odd/many/", {})
    assert (len(facts.keys), facts.objects_count, facts.prefix) == (3, 5, "many")
    record = BenchRecord(Path("unused"), run={"url": facts.url, "part": "", "data": facts.record()})
    assert "(5 objects, of which other libraries read the first 3, 50 B, first byte after " in record.title
    monkeypatch.setattr("penstock.bench.data.OBJECTS_MAX", 2)
    record.run["data"] = look_at("s3://odd/many/", {}).record()
    assert "(about 5 objects, of which other libraries read the first 2, about 50 B, first byte after " in record.title


def test_mixed_formats(store: ps.Store) -> None:
    """Objects of unknown formats are samples; beside shards, objects of other formats are left out, and that is said."""
    store.write("mixed/a.unknown", bytes(10))
    store.write("mixed/b.jpg", bytes(20))
    facts = look_at("s3://odd/mixed/", {})
    assert (facts.format, facts.objects_count) == ("objects", 2)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("0.bin")
        member.size = 1000
        archive.addfile(member, io.BytesIO(bytes(1000)))
    for number in range(4):
        store.write(f"mixed/{number}.tar", out.getvalue())
    facts = look_at("s3://odd/mixed/", {})
    assert (facts.format, facts.objects_count, facts.sample_bytes, facts.stored_bytes) == ("tar", 4, 1000, 1536)
    record = BenchRecord(Path("unused"), run={"url": facts.url, "part": "", "data": facts.record()})
    assert "mixed formats: this looks at 4 objects of tar, and leaves out 2 objects of other formats" in record.title


def test_without_permission_to_list(store: ps.Store) -> None:
    """A store that refuses is an error of the credentials, which says so."""
    store.write("closed/a.jpg", bytes(10))
    with pytest.raises(ps.StoreError, match=r"403|[Dd]enied|InvalidAccessKeyId|SignatureDoesNotMatch"):
        look_at("s3://odd/closed/", {"credentials": ps.Credentials(access_key="AKIANOBODY", secret_key="wrong")})


def test_other_urls() -> None:
    """Only S3 is measured, since other libraries read nothing else."""
    with pytest.raises(ps.ConfigError, match="benchmarks read S3"):
        look_at("/data/train/", {})
