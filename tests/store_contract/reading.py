"""The contract of reading: whole objects, ranges, many requests, parts, versions and errors."""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING

import pytest

from penstock.config import KIB, FetchConfig
from penstock.errors import ConfigError, ObjectChangedError, ObjectMissingError, SpanError, StoreError
from penstock.fetch import PlanItem
from penstock.types import Blob, ByteRange, Get
from store_contract.support import Capabilities, content, submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.fetch import Request
    from penstock.store import Store

LARGE_BYTES = 20_000_003  # three parts of at most 8 MiB, the last one of odd size
SMALL_PARTS = FetchConfig(part_bytes=256 * KIB)


class ReadingContract(Capabilities):
    """What reading must do."""

    def test_read_gives_the_whole_object(self, store: Store) -> None:
        """A read without a span returns all bytes, with their key and version."""
        data = content(100_000)
        self.seed(store, {"a/b": data})
        blob = store.read("a/b")
        assert blob.data == data
        assert (blob.key, blob.span, blob.request_index, len(blob)) == ("a/b", None, 0, len(data))
        assert blob.etag == store.stat("a/b").etag
        assert (blob.etag is not None) == self.has_etags
        assert blob.verified

    @pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 1000), (1, 999), (500, 501), (999, 1000)])
    def test_read_gives_exactly_the_span(self, store: Store, start: int, end: int) -> None:
        """A span is half-open and exact."""
        data = content(1000)
        self.seed(store, {"k": data})
        assert store.read("k", ByteRange(start, end)).data == data[start:end]

    def test_a_span_past_the_end_is_cut(self, store: Store) -> None:
        """A range that begins inside the object and ends past it is cut at its end, as in HTTP."""
        data = content(1000)
        self.seed(store, {"k": data})
        for end in (5000, 30_000_000, 10**15):  # one part, several parts, and more than fits into memory
            span = ByteRange(990, end)
            assert store.read("k", span).data == data[990:]
            assert [bytes(blob.data) for blob in store.read_many([("k", span)])] == [data[990:]]
            assert b"".join(chunk.data for chunk in store.read_parts([("k", span)])) == data[990:]

    @pytest.mark.parametrize("start", [1000, 1001, 10**15])
    def test_a_span_that_starts_past_the_end_is_refused(self, store: Store, start: int) -> None:
        """A range that contains no byte of the object raises ``SpanError``, which is also a ``ValueError``."""
        self.seed(store, {"k": content(1000)})
        for length in (10, 30_000_000):
            with pytest.raises(SpanError) as caught:
                store.read("k", ByteRange(start, start + length))
            assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 5), (6, 5), (0, 1.5), ("0", "1"), (0, None)])
    def test_what_is_no_span_is_refused_at_once(self, store: Store, start: int, end: int) -> None:
        """A range that is negative, empty or reversed, or does not consist of integers, raises ``ConfigError``."""
        self.seed(store, {"k": b"0123456789"})
        with pytest.raises(ConfigError):
            store.read("k", ByteRange(start, end))

    def test_an_empty_object_is_read(self, store: Store) -> None:
        """An empty object can be read, but no range of it."""
        self.seed(store, {"empty": b""})
        assert bytes(store.read("empty").data) == b""
        assert store.stat("empty").size_bytes == 0
        with pytest.raises(SpanError):
            store.read("empty", ByteRange(0, 1))

    def test_a_missing_object_is_named(self, store: Store) -> None:
        """Reading a missing object raises ``ObjectMissingError``, a ``FileNotFoundError`` that names the object."""
        self.seed(store, {"k": b"x"})
        for key, span in (("none", None), ("none", ByteRange(0, 1)), ("deeper/none", None)):
            with pytest.raises(ObjectMissingError, match="none") as caught:
                store.read(key, span)
            assert isinstance(caught.value, FileNotFoundError)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with pytest.raises(ObjectMissingError, match="none"):
            store.stat("none")

    def test_a_prefix_is_no_object(self, store: Store) -> None:
        """A key that only has objects below it can neither be read nor be passed to ``stat``."""
        self.seed(store, {"folder/k": b"x"})
        with pytest.raises(ObjectMissingError):
            store.read("folder")
        with pytest.raises(ObjectMissingError):
            store.stat("folder")

    def test_a_large_object_is_read_exactly(self, store: Store) -> None:
        """Objects of several parts, and ranges across parts, are read completely and in order."""
        data = content(LARGE_BYTES)
        self.seed(store, {"large": data})
        assert store.read("large").data == data
        assert store.read("large", ByteRange(8_000_000, 18_000_000)).data == data[8_000_000:18_000_000]

    def test_a_changed_object_is_not_read(self, store: Store) -> None:
        """With ``if_match``, another version raises ``ObjectChangedError``, and its bytes are never returned."""
        self.seed(store, {"k": b"first"})
        etag = store.stat("k").etag
        if not self.has_etags:
            assert etag is None
            return
        first = submit(store, Get("k", None, etag))[1].wait()
        assert first.error is None
        assert bytes(first.body) == b"first"
        self.seed(store, {"k": b"second, longer"})
        for span in (None, ByteRange(0, 3)):
            completion = submit(store, Get("k", span, etag))[1].wait()
            assert isinstance(completion.error, ObjectChangedError)

    def test_read_many_keeps_the_order_asked(self, store: Store) -> None:
        """With ``ordered=True``, blobs come in the order of the requests, each once, with its index."""
        objects = {f"k{index:03}": content(index * 37, index) for index in range(1, 60)}
        self.seed(store, objects)
        asked: list[str | tuple[str, ByteRange | None]] = [
            *reversed(objects),
            ("k050", ByteRange(3, 9)),
            "k001",
            "k001",
        ]
        blobs = list(store.read_many(asked))
        assert [blob.request_index for blob in blobs] == list(range(len(asked)))
        for request, blob in zip(asked, blobs, strict=True):
            key, span = request if isinstance(request, tuple) else (request, None)
            assert (blob.key, blob.span) == (key, span)
            assert blob.data == (objects[key][span.start : span.end] if span else objects[key])

    def test_read_many_unordered_gives_each_once(self, store: Store) -> None:
        """With ``ordered=False``, every request has exactly one blob, whose index identifies it."""
        objects = {f"k{index:03}": content(index * 37, index) for index in range(60)}
        self.seed(store, objects)
        keys = list(objects)
        blobs = {blob.request_index: blob for blob in store.read_many(iter(keys), ordered=False)}
        assert sorted(blobs) == list(range(60))
        assert all(blobs[index].data == objects[key] for index, key in enumerate(keys))

    def test_read_many_of_nothing(self, store: Store) -> None:
        """Without requests there are no blobs."""
        assert list(store.read_many([])) == []
        assert list(store.try_read_many(iter(()), ordered=False)) == []

    def test_read_many_ends_at_the_first_error(self, store: Store) -> None:
        """With ``ordered=True``, all blobs before the failing request come, then its error, then nothing."""
        self.seed(store, {"a": b"1", "b": b"2", "c": b"3"})
        blobs = store.read_many(["a", "b", "none", "c"])
        assert [next(blobs).key, next(blobs).key] == ["a", "b"]
        with pytest.raises(ObjectMissingError, match="none"):
            next(blobs)
        assert list(blobs) == []

    @pytest.mark.parametrize("ordered", [True, False])
    def test_try_read_many_goes_on_after_errors(self, store: Store, ordered: bool) -> None:
        """``try_read_many`` returns a blob or an error for every request."""
        self.seed(store, {"a": b"1", "c": b"3"})
        answers = list(store.try_read_many(["none", "a", ("a", ByteRange(5, 6)), "c"], ordered=ordered))
        assert len(answers) == 4
        assert {answer.key: bytes(answer.data) for answer in answers if isinstance(answer, Blob)} == {
            "a": b"1",
            "c": b"3",
        }
        assert {type(answer) for answer in answers if isinstance(answer, StoreError)} == {ObjectMissingError, SpanError}
        if ordered:
            assert [type(answer) for answer in answers] == [ObjectMissingError, Blob, SpanError, Blob]

    @pytest.mark.parametrize("ordered", [True, False])
    def test_each_request_gets_its_own_answer(self, store: Store, ordered: bool) -> None:
        """Even if neighbouring ranges are read with one request to the store, each has one answer of its own."""
        data = content(1000)
        self.seed(store, {"a": data, "b": data[::-1]})
        asked: list[tuple[str, ByteRange]] = []
        for key in ("none", "a", "nor this", "b"):
            asked += [(key, ByteRange(start, start + 100)) for start in (0, 100, 150, 990, 2000, 2050)]
        answers = list(store.try_read_many(asked, ordered=ordered))
        by_index = {answer.request_index: answer for answer in answers}
        assert by_index.keys() == set(range(len(asked)))
        assert len(answers) == len(asked)
        assert not ordered or list(by_index) == list(range(len(asked)))
        for index, (key, span) in enumerate(asked):
            answer = by_index[index]
            if isinstance(answer, Blob):
                assert (answer.key, answer.span) == (key, span)
                assert answer.data == (data if key == "a" else data[::-1])[span.start : span.end]
                continue
            assert isinstance(answer, SpanError if key in "ab" else ObjectMissingError)
            assert answer.span == tuple(span)
            assert answer.url is not None
            assert answer.url.endswith(f"/{key}")
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        assert len({id(error) for error in errors}) == len(errors) == 2 * 6 + 2 * 2

    @pytest.mark.parametrize("length", [5, 1000, 100_000])
    def test_a_file_is_of_one_version(self, store: Store, length: int) -> None:
        """If an object is replaced after it was opened, the file cannot be read any more, with or without seeking."""
        self.seed(store, {"k": content(600_000)})
        file = store.open("k")
        assert file.read(10) == content(10)
        self.seed(store, {"k": content(600_001, 1)})
        file.seek(300_000)
        with pytest.raises(ObjectChangedError):
            file.read(length)

    def test_read_many_takes_requests_as_it_goes(self, store: Store) -> None:
        """An endless iterator of requests is consumed only a little ahead, and the blobs may be dropped at any time."""
        self.seed(store, {"k": b"x" * 100})
        taken: list[int] = []

        def endless() -> Iterator[str]:
            for index in itertools.count():
                taken[:] = [index]
                yield "k"

        blobs = store.read_many(endless())
        for _ in range(50):
            assert next(blobs).data == b"x" * 100
        del blobs
        assert taken[0] < 5000
        assert store.read("k").data == b"x" * 100

    def test_read_into_fills_the_callers_memory(self, store: Store) -> None:
        """Whole objects and ranges, large, small, neighbouring and empty, land in their buffers and nowhere else."""
        data = content(2_000_003)
        store.fetch_config = SMALL_PARTS
        self.seed(store, {"large": data, "small": data[:1000], "empty": b""})
        spans = [None, ByteRange(3, 1_200_003), *(ByteRange(start, start + 90) for start in range(0, 3000, 100))]
        asked = [("large", span) for span in spans] + [
            ("small", None),
            ("small", ByteRange(999, 1000)),
            ("empty", None),
        ]
        objects = {"large": data, "small": data[:1000], "empty": b""}
        wanted = [objects[key][span.start : span.end] if span else objects[key] for key, span in asked]
        memory = [bytearray(b"#" * (len(piece) + 20)) for piece in wanted]
        requests = ((*asked[index], memoryview(memory[index])[10:-10]) for index in range(len(asked)))
        with store.read_into(requests) as landed:
            assert sorted(landed) == list(range(len(asked)))
        for buffer, piece in zip(memory, wanted, strict=True):
            assert buffer == b"#" * 10 + piece + b"#" * 10

    def test_read_into_refuses_what_does_not_fit(self, store: Store) -> None:
        """A range past the end, and an object of another size than its buffer, are errors that name the object."""
        store.fetch_config = SMALL_PARTS
        self.seed(store, {"k": content(1000)})
        for span, length in (
            (ByteRange(990, 1001), 11),
            (ByteRange(500, 1_000_000), 999_500),
            (ByteRange(2000, 2001), 1),
        ):
            with pytest.raises(SpanError, match="k"):
                list(store.read_into([("k", span, bytearray(length))]))
        for length in (0, 999, 1001, 1_000_000):
            with pytest.raises(ObjectChangedError if self.tells_lengths else StoreError, match="k"):
                list(store.read_into([("k", None, bytearray(length))]))
        with pytest.raises(SpanError, match="k"):  # near ranges, which one request reads
            list(store.read_into([("k", ByteRange(900 + i, 1000 + i), bytearray(100)) for i in range(2)]))
        with pytest.raises(ObjectMissingError, match="none"):
            list(store.read_into([("none", None, bytearray(1))]))

    def test_read_into_reads_the_version_that_is_named(self, store: Store) -> None:
        """An item with an ETag is read in this version, or raises ``ObjectChangedError``."""
        self.seed(store, {"k": content(1000)})
        info = store.stat("k")
        item = PlanItem("k", etag=info.etag, size_bytes=info.size_bytes)
        buffer = bytearray(1000)
        assert list(store.read_into([(item, buffer), (item._replace(span=ByteRange(1, 3)), bytearray(2))])) in (
            [0, 1],
            [1, 0],
        )
        assert buffer == content(1000)
        self.seed(store, {"k": content(1001, 1)})
        if self.has_etags:
            with pytest.raises(ObjectChangedError):
                list(store.read_into([(item._replace(span=ByteRange(1, 3)), bytearray(2))]))

    def test_read_parts_streams_in_order(self, store: Store) -> None:
        """Chunks come in order and without gaps, with their positions, and the last one of each object is marked."""
        objects = {"one": content(LARGE_BYTES), "two": content(10, 1), "empty": b""}
        self.seed(store, objects)
        asked: list[Request] = ["one", ("one", ByteRange(100, 200)), "two"]
        pieces: dict[int, bytearray] = {}
        for chunk in store.read_parts(asked, part_bytes=4 << 20):
            joined = pieces.setdefault(chunk.request_index, bytearray())
            assert chunk.offset_bytes == len(joined) + (100 if chunk.request_index == 1 else 0)
            joined += chunk.data
            wanted = (LARGE_BYTES, 100, 10)[chunk.request_index]
            assert chunk.last == (len(joined) == wanted)
        assert [bytes(pieces[index]) for index in range(3)] == [objects["one"], objects["one"][100:200], objects["two"]]

    def test_stores_pickle_as_their_configuration(self, store: Store) -> None:
        """A pickled store reads the same objects elsewhere."""
        self.seed(store, {"k": b"bytes"})
        with pickle.loads(pickle.dumps(store)) as other:
            assert other.read("k").data == b"bytes"
            assert other.describe("k") == store.describe("k")

    def test_close_is_idempotent(self, store: Store) -> None:
        """Closing a store twice, or without having used it, does nothing."""
        self.seed(store, {"k": b"x"})
        other = pickle.loads(pickle.dumps(store))
        other.close()
        other.close()
        assert store.read("k").data == b"x"
        store.close()
        store.close()

    def test_describe_names_the_object(self, store: Store) -> None:
        """The description of an object is a URL that ends with the key."""
        assert store.describe("a/b.tar").endswith("a/b.tar")
        assert "://" in store.describe("k")
        store.statistics()
