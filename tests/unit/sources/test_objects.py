"""``FunctionReader``: a user's function of a key, called ahead in threads."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ClosedError, DecodeError
from penstock.sources.objects import CALLS_AHEAD_PER_THREAD, FunctionReader

KEYS = [f"k{number}" for number in range(40)]


def encoded(key: str) -> bytes:
    return key.encode()


def reader_of(read: Any) -> FunctionReader:
    source: Any = ps.objects(KEYS, read=read).source
    return FunctionReader(source)


def threads_count() -> int:
    return sum(thread.name.startswith("penstock-read-fn") for thread in threading.enumerate())


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_samples_come_in_the_order_asked_for(threads: int | None) -> None:
    """Whatever threads call: number, key and value of each sample, in the order of the numbers."""
    reader = pickle.loads(pickle.dumps(reader_of(encoded)))
    numbers = [7, 3, 39, 0, 3]
    stream = reader.stream(numbers, threads_count=threads)
    given = [(number, sample.key, bytes(sample.fields["data"]), url) for number, sample, url in stream]
    stream.close()
    reader.close()
    assert given == [(number, KEYS[number], KEYS[number].encode(), KEYS[number]) for number in numbers]


def test_calls_run_ahead_within_bounds() -> None:
    """Before the first sample is taken nothing is called; then a few calls for each thread."""
    called: list[str] = []
    reader = reader_of(lambda key: called.append(key) or b"")
    stream = reader.stream(range(40), threads_count=2)
    assert not called
    next(stream)
    assert len(called) <= 2 * CALLS_AHEAD_PER_THREAD
    stream.close()
    assert len(called) <= 2 * CALLS_AHEAD_PER_THREAD


def test_threads_end_with_their_stream_or_reader() -> None:
    """Closed or dropped: no thread is left behind."""
    before = threads_count()
    reader = reader_of(encoded)
    assert len(list(reader.stream(range(5), threads_count=4))) == 5  # dropped at its end
    assert len(list(reader.read_batch([1, 2]))) == 2
    reader.close()
    dropped = reader_of(encoded)
    next(dropped.stream([0]))
    del dropped
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-read-fn"):
            thread.join(10)
    assert threads_count() <= before


def test_a_call_that_fails_names_its_key() -> None:
    """The error is raised where its sample would come, behind the samples before it."""

    def read(key: str) -> bytes:
        if key == "k2":
            raise ValueError("no such row")
        return b""

    stream = reader_of(read).stream(range(5), threads_count=2)
    assert [next(stream)[0], next(stream)[0]] == [0, 1]
    with pytest.raises(DecodeError, match="no such row") as caught:
        next(stream)
    assert caught.value.sample_key == "k2"
    stream.close()


def test_a_closed_reader_calls_nothing() -> None:
    """A stream of a reader that was closed raises ``ClosedError``."""
    reader = reader_of(encoded)
    reader.close()
    with pytest.raises(ClosedError):
        next(reader.stream([0]))
