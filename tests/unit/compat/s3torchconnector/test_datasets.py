"""Reading ahead: many objects at once, in order, only while readers are read, and nothing after the iterator was dropped."""

from __future__ import annotations

import gc
import pickle
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from compat_stores import MemoryBuckets
from penstock.compat.s3torchconnector import S3Exception, S3IterableDataset, S3MapDataset, S3ReaderConstructor
from penstock.compat.s3torchconnector.datasets import ReadersAhead
from penstock.compat.s3torchconnector.objects import UNREAD_MAX, ObjectLocation, ReadCounter
from penstock.compat.s3torchconnector.readers import kind_of

pytestmark = pytest.mark.torch

OBJECTS = {f"{number:04d}": b"%d" % number * 50 for number in range(400)}


def readers(buckets: MemoryBuckets, *, constructor: Any = None, listed: bool = True) -> ReadersAhead:
    locations = [ObjectLocation("bucket", key, len(data) if listed else None) for key, data in OBJECTS.items()]
    return ReadersAhead(buckets, locations, kind=kind_of(constructor), demand=ReadCounter())


@pytest.mark.parametrize("listed", [True, False])
def test_every_object_in_order_by_one_request_each(listed: bool) -> None:
    """Readers come in order with their bytes, and each object costs one request."""
    buckets = MemoryBuckets(OBJECTS)
    found = [(reader.key, reader.read()) for reader in readers(buckets, listed=listed)]
    assert found == list(OBJECTS.items())
    assert len(buckets.requests("Get")) == len(OBJECTS)


def test_several_objects_are_requested_before_the_first_is_read() -> None:
    """When the first reader is handed out, the objects behind the next ones are requested already."""
    buckets = MemoryBuckets(OBJECTS)
    next(readers(buckets))
    assert len(buckets.requests("Get")) >= 8


def test_readers_that_are_kept_may_be_read_later() -> None:
    """Readers that a program collects first and reads afterwards, in any order, have their own bytes."""
    kept = list(readers(MemoryBuckets(OBJECTS)))
    assert {reader.key: reader.read() for reader in reversed(kept)} == OBJECTS


def test_objects_that_nobody_reads_are_not_read_ahead_for_long() -> None:
    """A program that only looks at keys costs what is requested until 16 readers were dropped, and no more."""
    buckets = MemoryBuckets(OBJECTS)
    assert [reader.key for reader in readers(buckets)] == list(OBJECTS)
    assert UNREAD_MAX <= len(buckets.requests("Get")) < 200


def test_reading_ahead_begins_again_when_readers_are_read() -> None:
    """After readers that were dropped, those that are read still have their bytes, and reading ahead begins again."""
    buckets = MemoryBuckets(OBJECTS)
    iterator = readers(buckets)
    for _ in range(100):
        next(iterator)
    stopped_at = len(buckets.requests("Get"))
    rest = [(reader.key, reader.read()) for reader in iterator]
    assert rest == list(OBJECTS.items())[100:]
    assert len(buckets.requests("Get")) - stopped_at <= len(rest) + UNREAD_MAX
    counter = ReadCounter()
    for _ in range(UNREAD_MAX):
        counter.note(is_read=False)
    assert not counter.is_wanted
    for _ in range(UNREAD_MAX):
        counter.note(is_read=True)
    assert counter.is_wanted


@pytest.mark.parametrize("constructor", [S3ReaderConstructor.range_based(), lambda **_: "mine"])
def test_other_readers_are_not_read_ahead(constructor: Any) -> None:
    """For ranged readers and a user's own, nothing is requested before they are read."""
    buckets = MemoryBuckets(OBJECTS)
    assert len(list(readers(buckets, constructor=constructor))) == len(OBJECTS)
    assert buckets.made.operations == []


def test_an_object_that_cannot_be_read_does_not_stop_the_others() -> None:
    """The error of a missing object is raised by its own reader; the others have their bytes."""
    buckets = MemoryBuckets(OBJECTS)
    buckets.made.delete("0003")
    failed, found = [], {}
    for reader in readers(buckets):
        try:
            found[reader.key] = reader.read()
        except S3Exception:
            failed.append(reader.key)
    assert failed == ["0003"]
    assert found == {key: data for key, data in OBJECTS.items() if key != "0003"}


def test_a_dropped_iterator_cancels() -> None:
    """After an iterator was dropped, nothing that it held is charged to the budget any more."""
    buckets = MemoryBuckets(OBJECTS)
    iterator = readers(buckets)
    next(iterator).read()
    del iterator
    gc.collect()
    deadline_s = time.monotonic() + 20
    while (held := buckets.made.budget.statistics()).used_bytes > held.free_bytes:
        assert time.monotonic() < deadline_s  # what was in flight ends on other threads


def test_more_is_requested_of_objects_that_turn_out_long() -> None:
    """Of objects of unknown size that are longer than what was requested, twice as much is requested, up to 8 MiB."""
    counter = ReadCounter()
    for length, wanted in (
        (100, 1),
        (1, 1),
        (1 << 18, 2),
        (1 << 18, 2),
        (1 << 19, 4),
        (1 << 20, 8),
        (1 << 21, 16),
        (1 << 22, 32),
    ):
        counter.note_length(length)
        assert counter.unknown_bytes == wanted << 18
    counter.note_length(8 << 20)
    assert counter.unknown_bytes == 8 << 20


class Uris:
    """An iterable that is no list, and can be iterated once."""

    def __init__(self, *uris: str) -> None:
        self.uris = iter(uris)

    def __iter__(self) -> Any:
        return self.uris


@pytest.mark.parametrize("kind", [S3MapDataset, S3IterableDataset])
def test_a_data_set_takes_one_uri_or_an_iterable(kind: Any) -> None:
    """``from_objects`` takes a str or any iterable, which is consumed once, and the data set can be iterated twice."""
    for uris, keys in (("s3://b/k", ["k"]), (Uris("s3://b/k", "s3://c/l/m"), ["k", "l/m"]), (["s3://b/k"], ["k"])):
        dataset = kind.from_objects(
            uris, region="us-east-1", reader_constructor=S3ReaderConstructor.range_based(), transform=key_of
        )
        assert [list(dataset), list(pickle.loads(pickle.dumps(dataset)))] == [keys, keys]


def key_of(reader: Any) -> str:
    return str(reader.key)


@pytest.mark.parametrize("kind", [S3MapDataset, S3IterableDataset])
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda kind: kind.from_prefix("https://bucket/x", region="r"), "s3://"),
        (lambda kind: kind.from_prefix("s3://", region="r"), "bucket"),
        (lambda kind: kind.from_prefix(7, region="r"), "7"),
        (lambda kind: kind.from_objects(["s3://b/k", "k"], region="r"), "'k'"),
        (lambda kind: kind.from_objects(3, region="r"), "object_uris=3"),
        (lambda kind: kind.from_prefix("s3://b", region=3), "region=3"),
        (lambda kind: kind.from_prefix("s3://b", region="r", endpoint=b"x"), "endpoint"),
        (lambda kind: kind.from_prefix("s3://b", region="r", transform=3), "transform=3"),
        (lambda kind: kind.from_prefix("s3://b", region="r", s3client_config={}), "s3client_config"),
        (lambda kind: kind.from_prefix("s3://b", region="r", reader_constructor="range"), "reader_constructor"),
        (lambda kind: kind.from_prefix("s3://b", regon="r"), "region"),
    ],
)
def test_odd_arguments_are_refused_at_once(kind: Any, call: Any, named: str) -> None:
    """An argument that cannot be meant is a ``ValueError`` when the data set is made, and names itself."""
    with pytest.raises(ValueError, match=named):
        call(kind)
