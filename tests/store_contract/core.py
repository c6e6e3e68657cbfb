"""The contract of ``submit``: sinks, landings, cancellation, and multipart uploads step by step."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ObjectMissingError, SpanError, StoreError, UnavailableError
from penstock.types import (
    UNKNOWN_BYTES,
    AbortMultipart,
    ByteRange,
    CompleteMultipart,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Get,
    Head,
    Landing,
    ListPage,
    Part,
    Put,
    PutPart,
)
from store_contract.support import (
    Capabilities,
    WatchingSink,
    content,
    keys_of,
    one_version,
    raise_error,
    submit,
)

if TYPE_CHECKING:
    from penstock.store import Store
    from penstock.types import Operation


class CoreContract(Capabilities):
    """What ``submit`` must do."""

    def test_done_comes_exactly_once(self, store: Store) -> None:
        """Every operation ends exactly once, whether it succeeds or fails, and the completion contains it."""
        self.seed(store, {"k": b"0123456789", "empty": b"", "d": b""})
        operations: list[Operation] = [
            Get("k"),
            Get("k", ByteRange(2, 5)),
            Get("empty"),
            Get("none"),
            Get("k", ByteRange(50, 60)),
            Head("k"),
            Head("none"),
            ListPage(),
            Put("p", b"x"),
            Copy("k", "c"),
            Copy("none", "c"),
            Delete(("d", "none")),  # keys that no other operation here uses, since all run at the same time
            AbortMultipart("k", "0123456789abcdef"),
        ]
        sinks = [submit(store, operation)[1] for operation in operations]
        completions = [sink.wait() for sink in sinks]
        store.read("k")  # a second completion would have arrived by now
        for operation, sink, completion in zip(operations, sinks, completions, strict=True):
            assert len(sink.completions) == 1
            assert type(completion.operation) is type(operation)
        failed = [type(completion.error) for completion in completions[:12] if completion.error is not None]
        assert failed == [ObjectMissingError, SpanError, ObjectMissingError, ObjectMissingError]

    def test_done_comes_from_another_thread(self, store: Store) -> None:
        """``submit`` never calls the sink itself, so a sink may take a lock that the submitting thread holds."""
        self.seed(store, {"k": b"x"})
        for operation in (Get("k"), Head("k"), ListPage(), Put("p", b"x"), Get("none")):
            _, sink = submit(store, operation)
            sink.wait()
            assert threading.get_ident() not in sink.thread_ids

    def test_the_head_says_what_follows(self, store: Store) -> None:
        """Before a body arrives, ``head`` gets size, version and exact span; it is not called for an empty object."""
        self.seed(store, {"k": b"0123456789", "empty": b""})
        _, sink = submit(store, Get("k"))
        completion = sink.wait()
        told = 10 if self.tells_lengths else UNKNOWN_BYTES
        assert [(info.size_bytes, span) for info, span in sink.heads] == [(told, ByteRange(0, told))]
        assert sink.heads[0][0].etag == store.stat("k").etag
        assert (completion.span, bytes(completion.body)) == (ByteRange(0, 10), b"0123456789")
        _, sink = submit(store, Get("k", ByteRange(8, 99)))
        assert bytes(sink.wait().body) == b"89"
        assert [span for _, span in sink.heads] == [ByteRange(8, 10)]
        _, sink = submit(store, Get("empty"))
        completion = sink.wait()
        assert (completion.error, sink.heads, bytes(completion.body)) == (None, [], b"")
        assert completion.info is not None
        assert completion.info.size_bytes == 0

    def test_a_body_lands_where_the_sink_says(self, store: Store) -> None:
        """A landing is filled exactly, and no byte around it changes."""
        data = content(100_000)
        self.seed(store, {"k": data})
        buffer = bytearray(b"#" * 200_000)
        _, sink = submit(store, Get("k", ByteRange(10, 90_010)), WatchingSink(Landing(buffer, 1000, 91_000)))
        completion = sink.wait()
        raise_error(completion)
        assert completion.landing is sink.given
        assert completion.landing is not None
        assert completion.landing.offset == 91_000
        assert buffer[1000:91_000] == data[10:90_010]
        assert set(buffer[:1000]) | set(buffer[91_000:]) == {ord("#")}

    @pytest.mark.parametrize("span", [ByteRange(10, 90_010), ByteRange(99_990, 120_000), None], ids=str)
    def test_a_landing_named_beforehand_holds_the_body(self, store: Store, span: ByteRange | None) -> None:
        """A successful operation has filled the landing that its sink named, whichever request received the body."""
        data = content(100_000)
        self.seed(store, {"k": data})
        length = span.length_bytes if span is not None else len(data)
        wanted = data[span.start : span.end] if span is not None else data
        buffer = bytearray(b"#" * 200_000)
        landing = Landing(buffer, 1000, 1000 + length)
        _, sink = submit(store, Get("k", span), WatchingSink(landing, beforehand=True))
        completion = sink.wait()
        raise_error(completion)
        assert completion.landing is landing
        assert landing.offset == 1000 + len(wanted)
        assert buffer[1000 : landing.offset] == completion.body == wanted
        assert set(buffer[:1000]) | set(buffer[landing.end :]) == {ord("#")}

    @pytest.mark.parametrize("beforehand", [False, True])
    def test_a_shorter_landing_takes_what_it_holds(self, store: Store, beforehand: bool) -> None:
        """If the landing is shorter than the span, only its length is read, and the operation succeeds."""
        data = content(100_000)
        self.seed(store, {"k": data})
        buffer = bytearray(b"#" * 300)
        span = None if self.tells_lengths else ByteRange(0, len(data))
        _, sink = submit(store, Get("k", span), WatchingSink(Landing(buffer, 100, 200), beforehand=beforehand))
        raise_error(sink.wait())
        assert buffer == b"#" * 100 + data[:100] + b"#" * 100

    def test_a_sink_may_refuse_the_body(self, store: Store) -> None:
        """If ``head`` raises a ``StoreError``, the operation ends with it."""
        self.seed(store, {"k": content(100_000)})
        _, sink = submit(store, Get("k"), WatchingSink(refuse=StoreError("not this one")))
        error = sink.wait().error
        assert error is not None
        assert error.what == "not this one"
        assert len(sink.completions) == 1

    def test_cancelling_at_any_time(self, store: Store) -> None:
        """Whenever and however often ``cancel`` is called, ``done`` is called exactly once and the store remains usable."""
        data = content(3_000_000)
        self.seed(store, {"k": data})
        for turn in range(30):
            transfer, sink = submit(store, Get("k"))
            if turn % 3 == 1:
                store.stat("k")
            if turn % 3 == 2:
                sink.wait()
            transfer.cancel()
            transfer.cancel()
            completion = sink.wait()
            assert completion.error is not None or completion.body == data
        assert store.read("k").data == data
        assert len(sink.completions) == 1

    def test_an_answered_transfer_is_not_late(self, store: Store) -> None:
        """``unanswered_s`` returns 0 after the operation has ended."""
        self.seed(store, {"k": b"x"})
        transfer, sink = submit(store, Head("k"))
        sink.wait()
        assert transfer.unanswered_s() == 0

    def test_attempts_tell_of_the_work(self, store: Store) -> None:
        """A completion lists its attempts, whose received bytes add up to the bytes that landed."""
        self.seed(store, {"k": b"0123456789"})
        completion = submit(store, Get("k", ByteRange(0, 4)))[1].wait()
        assert completion.attempts
        assert sum(attempt.received_bytes for attempt in completion.attempts) == 4
        assert all(attempt.total_s >= 0 for attempt in completion.attempts)

    # ── multipart ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, store: Store, key: str = "m") -> str:
        """Begin a multipart upload and return its id."""
        completion = submit(store, CreateMultipart(key))[1].wait()
        raise_error(completion)
        assert isinstance(completion.value, str)
        return completion.value

    def part(self, store: Store, operation: PutPart | CopyPart) -> Part:
        """Upload or copy a part and return it."""
        completion = submit(store, operation)[1].wait()
        raise_error(completion)
        assert isinstance(completion.value, Part)
        assert completion.value.part_number == operation.part_number
        return completion.value

    def test_parts_become_an_object_by_complete(self, store: Store) -> None:
        """``CompleteMultipart`` joins parts by number, in whatever order they were sent; nothing is visible before it."""
        length = max(self.part_bytes_min, 1000)
        first, second = content(length, 1), content(10, 2)
        upload_id = self.begin(store)
        two = self.part(store, PutPart("m", upload_id, 2, second))
        one = self.part(store, PutPart("m", upload_id, 1, first))
        assert list(store.list()) == []
        completion = submit(store, CompleteMultipart("m", upload_id, (one, two)))[1].wait()
        raise_error(completion)
        assert store.read("m").data == first + second
        assert completion.info is not None
        if self.commits_tell_etags:
            assert one_version(completion.info.etag, store.stat("m").etag)  # Ceph 16 omits the first
        assert keys_of(store.list()) == ["m"]

    def test_an_aborted_upload_leaves_nothing(self, store: Store) -> None:
        """After ``AbortMultipart`` no part can be added, and nothing can be committed."""
        upload_id = self.begin(store)
        part = self.part(store, PutPart("m", upload_id, 1, b"x"))
        raise_error(submit(store, AbortMultipart("m", upload_id))[1].wait())
        for operation in (PutPart("m", upload_id, 2, b"x"), CompleteMultipart("m", upload_id, (part,))):
            assert isinstance(submit(store, operation)[1].wait().error, StoreError)
        assert list(store.list()) == []
        assert self.uploads_left(store) in (None, 0)

    def test_parts_that_were_not_sent_are_refused(self, store: Store) -> None:
        """Committing a part that the store does not hold is an error, and no object becomes visible."""
        upload_id = self.begin(store)
        self.part(store, PutPart("m", upload_id, 1, b"x"))
        wrong = Part(7, '"00000000000000000000000000000000"')
        error = submit(store, CompleteMultipart("m", upload_id, (wrong,)))[1].wait().error
        assert isinstance(error, StoreError)
        assert not isinstance(error, UnavailableError)
        assert list(store.list()) == []
        submit(store, AbortMultipart("m", upload_id))[1].wait()

    def test_parts_can_be_copied_from_an_object(self, store: Store) -> None:
        """``CopyPart`` copies a range of another object into a part."""
        if not self.copies_parts:
            pytest.skip("copies_parts is False")
        data = content(2 * max(self.part_bytes_min, 1000))
        self.seed(store, {"s": data})
        half = len(data) // 2
        upload_id = self.begin(store)
        parts = (
            self.part(store, CopyPart("s", ByteRange(half, 2 * half), "m", upload_id, 1)),
            self.part(store, CopyPart("s", ByteRange(0, 7), "m", upload_id, 2)),
        )
        raise_error(submit(store, CompleteMultipart("m", upload_id, parts))[1].wait())
        assert store.read("m").data == data[half:] + data[:7]

    @pytest.mark.parametrize("keys_count", [1, 3])
    def test_delete_answers_with_what_failed(self, store: Store, keys_count: int) -> None:
        """``Delete`` returns the keys that could not be deleted; missing keys are not among them."""
        self.seed(store, {"k0": b"x"})
        completion = submit(store, Delete(tuple(f"k{index}" for index in range(keys_count))))[1].wait()
        raise_error(completion)
        assert not completion.value
