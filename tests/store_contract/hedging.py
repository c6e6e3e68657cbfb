"""The contract of reading when the second request of a hedge always wins: the bytes are right and land in the right place."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import CancelledOperationError, ObjectMissingError
from penstock.store.base import Store, Wrapper
from penstock.store.hedged import Hedged, HedgedOperation, SecondRequest
from penstock.transport import engine
from penstock.types import Blob, ByteRange, Completion, Get, Head, Landing, ObjectInfo, Operation, Sink, Transfer
from store_contract.support import Capabilities, WatchingSink, content, raise_error, submit

if TYPE_CHECKING:
    from penstock.fetch import Request


class Overtaken(Hedged):
    """A wrapper that hedges every GET and HEAD at once, and lets the second request win.

    Before the first request ends, it writes garbage to the landing that its caller named. A real body does the same if it
    arrives after the other request has won.

    Args:
        inner: The store inside.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(_HeldBack(inner))

    def __reduce__(self) -> tuple[Any, ...]:
        return Overtaken, (self.inner.inner,)  # type: ignore[attr-defined]

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start the operation and its hedge."""
        transfer = super().submit(operation, sink)
        if isinstance(transfer, HedgedOperation):
            transfer.hedge()
        return transfer


class _HeldBack(Wrapper):
    """A wrapper that lets no first request of a ``Hedged`` end before its second request has won or failed."""

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        if isinstance(sink, HedgedOperation):
            self.inner.submit(operation, WatchingSink())  # so that it takes place, and invalid operations are refused
            return _First(operation, sink)
        return self.inner.submit(operation, _Winner(sink) if isinstance(sink, SecondRequest) else sink)


class _First:
    """A first request that gets no answer before it is cancelled."""

    def __init__(self, operation: Operation, sink: Sink) -> None:
        self._waiting = [(operation, sink)]  # the thread that pops it notifies the sink

    def cancel(self) -> None:
        engine.call_later(0.0, self._end)

    def unanswered_s(self) -> float:
        return 3600.0 if self._waiting else 0.0

    def _end(self) -> None:
        try:
            operation, sink = self._waiting.pop()
        except IndexError:
            return
        if (landing := sink.landing) is not None:
            view = memoryview(landing.buffer)[landing.offset : landing.end]
            view[:] = b"\xee" * len(view)
            landing.offset += len(view)
        sink.done(Completion(operation, error=CancelledOperationError("cancelled")))


class _Winner:
    """The sink of a second request; if that fails, it cancels the first one too."""

    def __init__(self, sink: SecondRequest) -> None:
        self._sink = sink
        self.landing = sink.landing

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        return self._sink.head(info, span)

    def done(self, completion: Completion) -> None:
        first = self._sink.entry.first
        self._sink.done(completion)
        if completion.error is not None and first is not None:
            first.cancel()


class HedgingContract(Capabilities):
    """What reading must do when the second request wins."""

    def test_a_hedge_that_wins_lands_where_the_body_was_wanted(self, store: Store) -> None:
        """A landing named beforehand receives the body of the second request, and no byte around it changes."""
        data = content(100_000)
        self.seed(store, {"k": data})
        for span, length in ((ByteRange(10, 90_010), 90_000), (ByteRange(99_000, 120_000), 1000), (None, 100_000)):
            buffer = bytearray(b"#" * 200_000)
            landing = Landing(buffer, 1000, 1000 + (span.length_bytes if span is not None else length))
            _, sink = submit(Overtaken(store), Get("k", span), WatchingSink(landing, beforehand=True))
            completion = sink.wait()
            raise_error(completion)
            assert completion.landing is landing
            assert landing.offset == 1000 + length
            start = span.start if span is not None else 0
            assert buffer[1000 : 1000 + length] == data[start : start + length]
            assert set(buffer[:1000]) | set(buffer[landing.end :]) == {ord("#")}

    def test_every_verb_gives_the_bytes_of_a_hedge_that_wins(self, store: Store) -> None:
        """All reading methods return the right bytes of small and large objects, of ranges, and of empty objects."""
        objects = {"one": content(3_000_000), "two": content(100, 1), "empty": b""}
        self.seed(store, objects)
        hedged = Overtaken(store)
        asked: list[Request] = ["one", ("one", ByteRange(5, 2_500_000)), "two", ("two", ByteRange(90, 200)), "empty"]
        wanted = [objects["one"], objects["one"][5:2_500_000], objects["two"], objects["two"][90:], b""]
        assert [bytes(blob.data) for blob in hedged.read_many(asked)] == wanted
        assert {blob.request_index: bytes(blob.data) for blob in hedged.read_many(asked, ordered=False)} == dict(
            enumerate(wanted)
        )
        assert [bytes(hedged.read(key).data) for key in objects] == list(objects.values())
        spans = [(key, None) if isinstance(key, str) else key for key in asked[:4]]
        memory = [bytearray(len(data)) for data in wanted[:4]]
        assert sorted(hedged.read_into([(*spans[index], memory[index]) for index in range(3)])) == [0, 1, 2]
        assert memory[:3] == wanted[:3]
        streamed = [bytearray() for _ in asked]
        for chunk in hedged.read_parts(asked[:4], part_bytes=1 << 20):
            streamed[chunk.request_index] += chunk.data
        assert streamed[:4] == wanted[:4]
        assert [hedged.stat(key).size_bytes for key in objects] == [len(data) for data in objects.values()]
        assert hedged.won_count > len(asked)
        first, second = hedged.try_read_many(["none", "two"])
        assert isinstance(first, ObjectMissingError)
        assert isinstance(second, Blob)

    @pytest.mark.parametrize("length_bytes", [100_000, 300_000, 1_200_000])
    def test_a_file_gives_the_bytes_of_a_hedge_that_wins(self, store: Store, length_bytes: int) -> None:
        """Seeking, small reads after it, and sequential reading return what a file in memory would return."""
        data = content(3_000_000)
        self.seed(store, {"k": data})
        with Overtaken(store).open("k") as file:
            for number in range(6):
                file.seek(start := (number * 1_234_567) % (len(data) - length_bytes))
                assert file.read(length_bytes) == data[start : start + length_bytes]
                assert file.read(10) == data[start + length_bytes : start + length_bytes + 10]
            file.seek(0, io.SEEK_SET)
            assert file.read() == data

    def test_a_missing_object_is_missing_behind_a_hedge(self, store: Store) -> None:
        """If both requests fail, the sink gets the store's own error, once."""
        self.seed(store, {"k": b"x"})
        for operation in (Get("none"), Head("none")):
            _, sink = submit(Overtaken(store), operation)
            assert isinstance(sink.wait().error, ObjectMissingError)
            assert len(sink.completions) == 1
