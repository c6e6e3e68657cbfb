"""Readers behave like files in memory, whatever was read ahead, except that no position lies past the end."""

from __future__ import annotations

import io
import operator
import os
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from compat_stores import MemoryBuckets
from penstock.compat.s3torchconnector import S3Exception, S3ReaderConstructor, S3Writer
from penstock.compat.s3torchconnector import objects as objects_module
from penstock.compat.s3torchconnector.objects import ObjectLocation, ObjectSource
from penstock.compat.s3torchconnector.readers import SequentialS3Reader, kind_of
from penstock.errors import ObjectMissingError, ShortReadError

pytestmark = pytest.mark.torch

LINES = b"".join(b"line %d\n" % number * (number % 5 + 1) for number in range(400))
KINDS = {
    "sequential": S3ReaderConstructor.sequential(),
    "range_based": S3ReaderConstructor.range_based(),
    "buffered": S3ReaderConstructor.range_based(64),
    "unbuffered": S3ReaderConstructor.range_based(0),
    "dcp_optimized": S3ReaderConstructor.dcp_optimized(),
}
CALLS = st.one_of(
    st.tuples(st.just("read"), st.integers(-9, 900) | st.just(sys.maxsize)),
    st.tuples(st.just("seek"), st.integers(0, len(LINES) + 100), st.just(0)),
    st.tuples(st.just("seek"), st.integers(-50, 300), st.just(1)),
    st.tuples(st.just("seek"), st.integers(-len(LINES), 20), st.just(2)),
    st.tuples(st.just("readinto"), st.integers(0, 700)),
    st.tuples(st.just("readline")),
    st.tuples(st.just("tell")),
)


@pytest.fixture(scope="module")
def buckets() -> MemoryBuckets:
    return MemoryBuckets({"lines": LINES, "empty": b""})


def reader_of(
    buckets: MemoryBuckets, kind: str, *, key: str = "lines", size: int | None = None, answer: Any = None
) -> Any:
    return kind_of(KINDS[kind]).make(ObjectSource(buckets, ObjectLocation("bucket", key, size), answer=answer))


def called(file: Any, call: tuple[Any, ...]) -> Any:
    name, *arguments = call
    if name == "readinto":
        buffer = bytearray(arguments[0])
        return file.readinto(buffer), bytes(buffer)
    return getattr(file, name)(*arguments)


def model_called(file: io.BytesIO, call: tuple[Any, ...]) -> Any:
    """What a file in memory answers, with positions cut at the end; the type of the error if there is one."""
    try:
        if call[0] == "seek":
            base = (0, file.tell(), len(LINES))[call[2]]
            if base + call[1] < 0:
                return ValueError
            return file.seek(min(base + call[1], len(LINES)))
        return called(file, call)
    except ValueError:
        return ValueError


@given(st.sampled_from(sorted(KINDS)), st.booleans(), st.booleans(), st.lists(CALLS, max_size=12))
def test_a_reader_answers_as_a_file_in_memory(
    buckets: MemoryBuckets, kind: str, listed: bool, ahead: bool, calls: list[tuple[Any, ...]]
) -> None:
    """Any sequence of calls on any kind of reader, with size known or not and read ahead or not, answers as a BytesIO."""
    location = ObjectLocation("bucket", "lines", len(LINES) if listed else None)
    answer = next(buckets.made.read_many([objects_module.first_part(location)])) if ahead else None
    reader, model = reader_of(buckets, kind, size=location.size_bytes, answer=answer), io.BytesIO(LINES)
    for call in calls:
        try:
            found = called(reader, call)
        except ValueError:
            found = ValueError
        assert found == model_called(model, call)
        assert reader.tell() == model.tell()


@given(st.lists(CALLS, max_size=10))
def test_the_rest_of_a_large_object_follows_its_first_part(calls: list[tuple[Any, ...]]) -> None:
    """A reader whose object was read ahead in part only answers as if all of it were there."""
    buckets = MemoryBuckets({"lines": LINES})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects_module, "WHOLE_BYTES_MAX", 1000)
        patch.setattr(objects_module, "FIRST_BYTES", 500)
        location = ObjectLocation("bucket", "lines", len(LINES))
        answer = next(buckets.made.read_many([objects_module.first_part(location)]))
        assert len(answer.data) == 500
        reader, model = reader_of(buckets, "sequential", size=len(LINES), answer=answer), io.BytesIO(LINES)
        for call in calls:
            try:
                found = called(reader, call)
            except ValueError:
                found = ValueError
            assert found == model_called(model, call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 0])
def test_an_empty_object_is_empty(buckets: MemoryBuckets, kind: str, size: int | None) -> None:
    """An object without bytes reads as empty, and its end is its beginning."""
    reader = reader_of(buckets, kind, key="empty", size=size)
    assert (reader.seek(0, 2), reader.read(), reader.read(5), reader.readline()) == (0, b"", b"", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_requested_before_the_first_use(buckets: MemoryBuckets, kind: str) -> None:
    """Making a reader, and asking for its name, position and kind, sends no request."""
    buckets.made.operations.clear()
    reader = reader_of(buckets, kind)
    assert (reader.bucket, reader.key, reader.tell(), reader.seek(0)) == ("bucket", "lines", 0, 0)
    assert (reader.readable(), reader.seekable(), reader.writable(), reader.closed) == (True, True, False, False)
    reader.close()
    assert buckets.made.operations == []


@pytest.mark.parametrize("size", [None, len(LINES)])
def test_a_whole_object_costs_one_request(buckets: MemoryBuckets, size: int | None) -> None:
    """A sequential reader reads an object of up to 8 MiB by one request, whether its size is known or not."""
    buckets.made.operations.clear()
    assert reader_of(buckets, "sequential", size=size).read() == LINES
    assert len(buckets.made.operations) == 1


def test_an_unbuffered_reader_requests_what_is_read(buckets: MemoryBuckets) -> None:
    """With ``buffer_size=0`` each read is one request for exactly these bytes; with a buffer, neighbours cost nothing."""
    for kind, spans in (("unbuffered", [(10, 14), (14, 18)]), ("buffered", [(10, 74)])):
        buckets.made.operations.clear()
        reader = reader_of(buckets, kind)
        reader.seek(10)
        assert reader.read(4) + reader.read(4) == LINES[10:18]
        assert [tuple(get.span) for get in buckets.requests("Get")] == spans


def test_prefetch_requests_without_waiting(buckets: MemoryBuckets) -> None:
    """``prefetch()`` sends the request of the next read, once, and the read then costs nothing more."""
    buckets.made.operations.clear()
    reader = reader_of(buckets, "sequential")
    reader.prefetch()
    reader.prefetch()
    assert len(buckets.requests("Get")) == 1
    assert reader.read() == LINES
    assert len(buckets.requests("Get")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_taken_for_what_is_there(buckets: MemoryBuckets, kind: str) -> None:
    """A read of far more bytes than the object has allocates no memory for them."""
    reader = reader_of(buckets, kind)
    assert LINES.startswith(reader.read1(sys.maxsize))
    reader.seek(7)
    tracemalloc.start()
    assert reader.read(1 << 40) == LINES[7:]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_object_is_an_s3_exception(buckets: MemoryBuckets, kind: str) -> None:
    """Reading what is not there raises an error that ``except S3Exception`` catches, and that names the object."""
    with pytest.raises(S3Exception, match=r"gone") as caught:
        reader_of(buckets, kind, key="gone").read()
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(S3Exception):
        reader_of(buckets, kind, key="gone").seek(0, 2)


def test_an_error_of_reading_ahead_is_the_readers(buckets: MemoryBuckets) -> None:
    """What went wrong while an object was read ahead is raised when its reader is read, not before."""
    reader = reader_of(buckets, "sequential", answer=ShortReadError("10 of 100 bytes arrived"))
    assert reader.key == "lines"
    with pytest.raises(S3Exception, match=r"10 of 100"):
        reader.read()


def test_an_object_that_was_replaced_after_it_was_listed_is_read_as_it_is(buckets: MemoryBuckets) -> None:
    """A size that is no longer true is no error: the reader gives the bytes of the present version."""
    assert reader_of(buckets, "sequential", size=17).read() == LINES


@pytest.mark.parametrize("call", [("read", "1"), ("read", 1.0), ("seek", "1"), ("seek", 0, "0")])
def test_arguments_of_a_wrong_type_are_refused(buckets: MemoryBuckets, call: tuple[Any, ...]) -> None:
    """Sizes and positions must be integers."""
    with pytest.raises(TypeError, match=r"integer"):
        called(reader_of(buckets, "sequential"), call)


@pytest.mark.parametrize("call", [("seek", -1), ("seek", -1, 1), ("seek", -len(LINES) - 1, 2), ("seek", 0, 3)])
def test_positions_before_the_start_are_refused(buckets: MemoryBuckets, call: tuple[Any, ...]) -> None:
    """A position before the start, or of an unknown kind, is a ``ValueError``, and the reader stays where it was."""
    reader = reader_of(buckets, "sequential")
    with pytest.raises(ValueError, match=r"seek|whence"):
        called(reader, call)
    assert reader.tell() == 0


@pytest.mark.parametrize("call", [("read", 1), ("seek", 0), ("readline",), ("readinto", 4), ("prefetch",)])
def test_a_closed_reader_refuses(buckets: MemoryBuckets, call: tuple[Any, ...]) -> None:
    """After ``close()``, which may be called twice, using a reader is a ``ValueError``."""
    reader = reader_of(buckets, "sequential")
    reader.read(3)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match=r"closed"):
        called(reader, call)


def test_a_reader_is_a_file_for_others(buckets: MemoryBuckets) -> None:
    """Lines, iteration, text and ``with`` work as for Python's own files."""
    assert list(reader_of(buckets, "sequential")) == LINES.splitlines(keepends=True)
    assert io.TextIOWrapper(reader_of(buckets, "range_based"), encoding="ascii").read() == LINES.decode()
    with reader_of(buckets, "sequential") as reader:
        assert reader.readlines(20) == [b"line 0\n", b"line 1\n", b"line 1\n"]
    assert reader.closed
    assert isinstance(reader, SequentialS3Reader)


def test_a_users_own_constructor_is_given_the_object(buckets: MemoryBuckets) -> None:
    """A function as constructor is called with bucket, key, and functions for the object's facts and its bytes."""

    class Own(SequentialS3Reader):
        def __init__(self, bucket: str, key: str, get_object_info: Any, get_stream: Any) -> None:
            self.parts = bucket, get_object_info().size, b"".join(get_stream(3, 9)), b"".join(get_stream())

    source = ObjectSource(buckets, ObjectLocation("bucket", "lines"))
    assert kind_of(Own).make(source).parts == ("bucket", len(LINES), LINES[3:9], LINES)
    assert S3ReaderConstructor.get_reader_type_string(Own) == "unknown"
    assert [S3ReaderConstructor.get_reader_type_string(KINDS[name]) for name in ("sequential", "buffered")] == [
        "sequential", "range_based"
    ]  # fmt: skip
    assert S3ReaderConstructor.get_reader_type_string(None) == "sequential"


@pytest.mark.parametrize(
    "make",
    [
        lambda: kind_of(3),
        lambda: S3ReaderConstructor.range_based(-1),
        lambda: S3ReaderConstructor.range_based(1.5),
        lambda: S3ReaderConstructor.dcp_optimized(-1),
    ],
)
def test_odd_constructors_are_refused(make: Any) -> None:
    """What is no constructor, and buffers or gaps of impossible sizes, are refused at once."""
    with pytest.raises(ValueError, match=r"reader_constructor|buffer_size|max_gap_size"):
        make()


def test_a_descriptor_is_not_left(buckets: MemoryBuckets) -> None:
    """Readers that are dropped while open leave no descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    for kind in KINDS:
        reader_of(buckets, kind).read(1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_close_a_writer_once() -> None:
    """Threads that close a writer at the same time store its object once."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(200):
            buckets = MemoryBuckets()
            writer, together = S3Writer(buckets.made, "key"), threading.Barrier(4)
            writer.write(b"data")
            steps = (together.wait, writer.close)
            for closed in [threads.submit(list, map(operator.call, steps)) for _ in range(4)]:
                closed.result()
            assert len(buckets.requests("Put")) == 1


def test_missing_is_file_not_found() -> None:
    """The alias is the engine's class, whose subclasses are Python's own exceptions, too."""
    assert issubclass(ObjectMissingError, S3Exception)
    assert str(S3Exception("text")) == "text"
