"""Reads at any offset of objects whose version is known, for callers that must not wait: the answer is a callback.

``PositionedReads`` belongs to a store; a ``PositionedObject`` is one version of one object. A read requests exactly its range,
unless the range lies in a piece that has arrived or is on its way; several reads of one piece share the request. Reads in
sequence are recognised (``ReadStream``) and read ahead, in parts that grow with the distance. Other reads of the object do not
disturb them.

The envelope of sequential reading: behind 30 ms and 90 MB/s per connection, a part of 2 MiB takes 53 ms, so 32 of them make
1.26 GB/s, and hold 64 MiB. Each costs about 0.1 ms of CPU in the store's stack, and each read of 1 MiB about 10 µs here.
A small object costs one request, and about 20 µs here.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING

from penstock.config import KIB, MIB
from penstock.errors import (
    CancelledOperationError,
    ClosedError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    ShortReadError,
    SpanError,
)
from penstock.fetch.budget import POOLED_BYTES_MIN
from penstock.fetch.positioned_reads import (
    EXPECTED_BYTES,
    REORDERED_BYTES_MAX,
    Piece,
    ReadStream,
    ReadStreams,
    WaitingRead,
)
from penstock.types import UNKNOWN_BYTES, ByteRange, Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.fetch.positioned_reads import PositionedReads
    from penstock.types import ObjectInfo

log = logging.getLogger("penstock.fetch")

WHOLE_BYTES_MAX = 1 * MIB
"""An object of at most this size is read whole, by one request whose checksum the store verifies: at 90 MB/s the last byte
comes 12 ms after the first one, less than the round trip that a second request would take."""
FIRST_BYTES = 512 * KIB
"""What a read of the beginning of a longer object brings at least: the second read of most programs follows it."""
SMALL_BYTES = 64 * KIB
"""What any other read brings at least: at 90 MB/s 0.7 ms, while a second read nearby would take a round trip."""


class PositionedObject:
    """One version of an object, which any number of readers may share.

    Args:
        reads: The objects of the store.
        info: Key, size and version of the object. Reading fails with ``ObjectChangedError`` if the store has another version.

    Attributes:
        info: The version that is read. The first answer adds an ETag that was not listed.
        is_outdated: Whether the object was replaced after the first answer had said which version is read. Then nothing more
            can be read, although bytes may be held, because outer caches know the file by its listing.
    """

    __slots__ = (
        "_closed",
        "_first",
        "_last",
        "_pieces",
        "_reads",
        "_starts",
        "_streams",
        "_waiting",
        "info",
        "is_outdated",
    )

    def __init__(self, reads: PositionedReads, info: ObjectInfo) -> None:
        self._reads = reads
        self.info = info
        self.is_outdated = False
        self._first: ObjectInfo | None = None  # the first answer, if it has no ETag or the listing had none
        self._starts: list[int] = []  # of the pieces, in their order
        self._pieces: list[Piece] = []  # they do not overlap
        self._last: Piece | None = None  # the one that was given completely last: a short step back costs nothing
        self._streams = ReadStreams()
        self._waiting: set[WaitingRead] = set()
        self._closed = False

    # ── for readers ────────────────────────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        offset: int,
        length_bytes: int,
        then: Callable[[Sequence[memoryview] | PenstockError], None],
        *,
        reader: object = None,
    ) -> None:
        """Read bytes; `then` is called once with pieces of them, in this call or on an engine thread.

        Args:
            offset: Offset of the first byte in the object.
            length_bytes: Number of bytes; fewer are read at the end of the object, and none past it.
            then: Receives the bytes or the error. The pieces stay as they are until nothing refers to them. It must not raise.
            reader: The open file that reads, for ``abandon``.
        """
        end = min(offset + length_bytes, self.info.size_bytes)
        if end <= offset:
            then(())
            return
        if self.is_outdated:
            then(self._changed("the object was replaced since it was first read"))
            return
        reads = self._reads
        if reads.at_hand is not None and not self._has(offset, end):
            view = reads.at_hand(self.info, ByteRange(offset, end))
            if view is not None:
                then((view,))
                return
        sends: list[Piece] = []
        views: list[memoryview] | None = None
        with reads.lock:
            closed = self._closed
            if not closed:
                views = self._read(WaitingRead(offset, end, then, reader), sends)
        if closed:
            then(ClosedError("the file was closed"))
            return
        if views is not None:
            then(views)
        if sends:
            reads.send(sends)

    @property
    def is_waiting(self) -> bool:
        """Whether a read waits for bytes."""
        return bool(self._waiting)

    def request_beginning(self) -> bool:
        """Request the beginning before anybody reads it, or all of a small object; False if there is no memory for it."""
        size_bytes = self.info.size_bytes
        with self._reads.lock:
            if self._closed or self._pieces or not size_bytes:
                return False
            piece = Piece(self, 0, size_bytes if size_bytes <= WHOLE_BYTES_MAX else FIRST_BYTES, is_ahead=False)
            if not self._reads.try_admit(piece):
                return False
            self._insert(piece)
        self._reads.send([piece])
        return True

    def abandon(self, reader: object) -> None:
        """End the reads of one reader that still wait, with ``CancelledOperationError``."""
        with self._reads.lock:
            waiting = [read for read in self._waiting if read.reader is reader]
            self._end(waiting)
        self._cancelled(waiting)

    def close(self) -> None:
        """Cancel the requests in flight, drop all pieces; waiting reads end with ``CancelledOperationError``. Idempotent."""
        with self._reads.lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            for read in waiting:
                read.has_ended = True
            transfers = [piece.transfer for piece in self._pieces if piece.transfer is not None]
            for piece in self._pieces:
                self._reads.release(piece)
                piece.is_dropped = True
            self._starts.clear()
            self._pieces.clear()
            self._last = None
            for stream in self._streams:
                self._reads.forget(stream)
                if stream.start == 0 and stream.goal_bytes and not stream.is_whole:
                    self._reads.note_whole(is_whole=False)
        self._cancelled(waiting)
        for transfer in transfers:
            transfer.cancel()

    @staticmethod
    def _cancelled(waiting: Sequence[WaitingRead]) -> None:
        for read in waiting:
            _call(read, CancelledOperationError("the file was closed while it was read"))

    # ── engine threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_head(self, piece: Piece, info: ObjectInfo) -> None:
        """Refuse an answer of another version before its body arrives; in an engine thread."""
        self._check_version(info)

    def on_done(self, piece: Piece, completion: Completion) -> None:
        """Give the bytes to the reads that wait for them; in an engine thread."""
        reads = self._reads
        error = self._error_of(piece, completion)
        ready: list[tuple[WaitingRead, list[memoryview]]] = []
        sends: list[Piece] = []
        with reads.lock:
            waiting = [read for read in piece.waiting if not read.has_ended]
            piece.waiting = []
            reads.end(piece, completion)
            if error is not None:
                if piece.stream is not None:
                    self.pause(piece.stream)  # its next reads are requested again, and show whether the store recovers
                if not piece.is_dropped:
                    self.drop(piece)
                self._end(waiting)
            elif not piece.is_dropped:
                piece.data = completion.body
                self._arrive(piece, waiting, ready)
            reads.read_ahead_of_waiting(sends)
        for read, views in ready:
            _call(read, views)
        if error is not None:
            for read in waiting:
                _call(read, error)
        if sends:
            reads.send(sends)

    def _error_of(self, piece: Piece, completion: Completion) -> PenstockError | None:
        error: PenstockError | None = None
        if completion.error is not None:
            error = self._explained(completion.error)
        elif len(completion.body) != piece.length_bytes:
            # of an object that has become shorter, the info tells
            what = f"{len(completion.body)} of {piece.length_bytes} bytes arrived"
            error = ShortReadError(what, operation="GET", url=self._reads.core.describe(self.info.key))
        try:
            if completion.info is not None and completion.error is None:
                self._check_version(completion.info)
        except ObjectChangedError as changed:
            error = changed
        if self._first is not None and isinstance(error, ObjectChangedError):
            self.is_outdated = True
        return error

    def _explained(self, error: PenstockError) -> PenstockError:
        """Return the error for an object that was listed."""
        if type(error) is ObjectMissingError:
            what = "the object was deleted since it was listed"
        elif isinstance(error, SpanError):
            what = f"the object has become shorter than the {self.info.size_bytes} bytes that were listed"
        else:
            return error
        changed = self._changed(what)
        changed.__cause__ = error
        return changed

    def _changed(self, what: str) -> ObjectChangedError:
        return ObjectChangedError(what, operation="GET", url=self._reads.core.describe(self.info.key))

    def _check_version(self, info: ObjectInfo) -> None:
        """Compare an answer with the version that is read. The first one says of it what was not listed.

        Raises:
            ObjectChangedError: The answer is of another version.
        """
        known = self.info
        if info.size_bytes not in (known.size_bytes, UNKNOWN_BYTES):
            what = f"the object has {info.size_bytes} bytes, not {known.size_bytes} as when it was listed"
        elif known.etag is not None and info.etag is not None:
            if known.etag == info.etag:
                return
            what = f"the object is now {info.etag}, not {known.etag} as when it was listed"
        elif self._agrees_with_first(info):
            return
        else:
            what = "the object was modified since it was listed"
        raise self._changed(what)

    def _agrees_with_first(self, info: ObjectInfo) -> bool:
        with self._reads.lock:
            first = self._first
            if first is None and _is_same_time(self.info.last_modified_s, info.last_modified_s):
                self._first = first = info
                self.info = self.info._replace(etag=self.info.etag or info.etag)
            return first is not None and (first.etag, first.last_modified_s) == (info.etag, info.last_modified_s)

    # ── under the lock ─────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, read: WaitingRead, sends: list[Piece]) -> list[memoryview] | None:
        """Return the bytes of a read if they are here; otherwise let it wait for them."""
        start, end = read.start, read.end
        pieces, gaps = self._cover(start, end)
        stream = self._streams.of(start, end, has_gap=bool(gaps))
        if gaps:
            if stream is None:
                stream = self._begin_stream(start, end)  # which may drop what another stream left
                pieces, gaps = self._cover(start, end)
            self._reads.hold(pieces)  # new requests must not take their memory
            for gap_start, gap_end in gaps:
                sends.append(self._request(gap_start, gap_end, stream))
            pieces, gaps = self._cover(start, end)
            assert not gaps
        missing = [piece for piece in pieces if piece.data is None]
        read.stream = stream
        views = None
        if missing:
            read.pieces = pieces
            read.missing_count = len(missing)
            for piece in missing:
                piece.waiting.append(read)
            self._waiting.add(read)
        if stream is not None:
            self._follow(stream, waits=bool(missing))
        if not missing:
            views = self._give(read, pieces)
        if stream is not None and stream.goal_bytes:
            self.read_ahead(stream, sends)
        return views

    def _follow(self, stream: ReadStream, *, waits: bool) -> None:
        """Note that a stream was read, and choose how far to read ahead of it."""
        size_bytes = self.info.size_bytes
        if stream.start == 0 and not stream.is_whole and size_bytes > WHOLE_BYTES_MAX:
            if stream.frontier >= size_bytes:
                stream.is_whole = True
                self._reads.note_whole(is_whole=True)
            elif not stream.taken_bytes and self._reads.expects_whole:
                stream.goal_bytes = max(stream.goal_bytes, EXPECTED_BYTES)
        self._reads.follow(self, stream, waits=waits)

    def _has(self, start: int, end: int) -> bool:
        with self._reads.lock:
            return bool(self._pieces) and not self._cover(start, end)[1]

    def _cover(self, start: int, end: int) -> tuple[list[Piece], list[tuple[int, int]]]:
        """Return the pieces that hold a range, in order, and the parts of the range that no piece holds."""
        pieces = self._pieces
        index = bisect_right(self._starts, start) - 1
        if index < 0 or pieces[index].end <= start:
            index += 1
        found: list[Piece] = []
        gaps: list[tuple[int, int]] = []
        while start < end:
            if index == len(pieces) or pieces[index].start >= end:
                gaps.append((start, end))
                break
            piece = pieces[index]
            if piece.start > start:
                gaps.append((start, piece.start))
            found.append(piece)
            start = piece.end
            index += 1
        return found, gaps

    def _request(self, start: int, end: int, stream: ReadStream) -> Piece:
        """Return a piece for bytes that a read waits for, and which nobody has requested."""
        size_bytes = self.info.size_bytes
        if size_bytes <= WHOLE_BYTES_MAX and not self._pieces:
            start, end = 0, size_bytes
        else:
            least_bytes = FIRST_BYTES if start == 0 else SMALL_BYTES
            if stream.goal_bytes:
                least_bytes = POOLED_BYTES_MIN
            index = bisect_right(self._starts, start)
            next_start = self._starts[index] if index < len(self._starts) else size_bytes
            end = max(end, min(start + least_bytes, next_start))
        piece = Piece(self, start, end, is_ahead=False)
        self._reads.admit(piece)
        self._insert(piece)
        stream.ahead_end = max(stream.ahead_end, end)
        return piece

    def _insert(self, piece: Piece) -> None:
        index = bisect_right(self._starts, piece.start)
        self._starts.insert(index, piece.start)
        self._pieces.insert(index, piece)

    def _begin_stream(self, start: int, end: int) -> ReadStream:
        stream, old = self._streams.begin(start, end)
        if old is not None:
            self._reads.forget(old)
            for piece in [piece for piece in self._pieces if piece.stream is old]:
                self._reads.detach(piece)
                if piece.data is not None:
                    self._reads.keep(piece)
        return stream

    def read_ahead(self, stream: ReadStream, sends: list[Piece], *, count_max: int = 64) -> None:
        """Request pieces ahead of a stream, as far as it may go.

        Args:
            stream: The stream.
            sends: List to append the pieces to, which are to be sent.
            count_max: The most pieces to request.
        """
        reads, size_bytes = self._reads, self.info.size_bytes
        part_bytes = reads.part_bytes(stream.goal_bytes)
        ahead_max = stream.frontier + stream.goal_bytes
        while (start := max(stream.ahead_end, stream.frontier)) < size_bytes:
            index = bisect_right(self._starts, start)
            if index and self._pieces[index - 1].end > start:  # of another stream, or read before
                stream.ahead_end = self._pieces[index - 1].end
                continue
            end = min((start // part_bytes + 1) * part_bytes, size_bytes)
            if end > ahead_max and start > stream.frontier:
                return
            if index < len(self._starts):
                end = min(end, self._starts[index])
            piece = Piece(self, start, end, stream=stream, is_ahead=True)
            if not count_max or not reads.admit_ahead(piece):
                reads.wait_for_room(self, stream)
                return
            count_max -= 1
            self._insert(piece)
            stream.ahead_end = end
            sends.append(piece)

    def pause(self, stream: ReadStream) -> None:
        """Read ahead of a stream no more, and drop its pieces, because others need the memory or requests fail."""
        self._reads.forget(stream)
        stream.goal_bytes = 0
        stream.ahead_end = stream.frontier
        for piece in [piece for piece in self._pieces if piece.stream is stream]:
            if piece.data is not None:
                self.drop(piece)
            else:
                self._reads.detach(piece)

    def drop(self, piece: Piece) -> None:
        """Forget a piece that nobody waits for."""
        index = bisect_right(self._starts, piece.start) - 1
        if index >= 0 and self._pieces[index] is piece:
            del self._starts[index], self._pieces[index]
        if self._last is piece:
            self._last = None
        piece.is_dropped = True
        self._reads.release(piece)

    def _arrive(
        self, piece: Piece, waiting: list[WaitingRead], ready: list[tuple[WaitingRead, list[memoryview]]]
    ) -> None:
        for read in waiting:
            read.missing_count -= 1
            if not read.missing_count:
                read.has_ended = True
                self._waiting.discard(read)
                ready.append((read, self._give(read, read.pieces)))
        stream = piece.stream
        if stream is not None and piece.end <= stream.frontier - REORDERED_BYTES_MAX and not piece.given_bytes:
            self._reads.detach(piece)  # the program has skipped it
        if piece.stream is None and not piece.is_dropped:
            self._reads.keep(piece)

    def _end(self, waiting: Sequence[WaitingRead]) -> None:
        """End reads without giving them bytes."""
        self._waiting.difference_update(waiting)
        for read in waiting:
            read.has_ended = True
            for piece in read.pieces:
                if piece.data is not None and piece.stream is None and not piece.is_dropped:
                    self._reads.keep(piece)

    def _give(self, read: WaitingRead, pieces: Sequence[Piece]) -> list[memoryview]:
        """Return the bytes of a read, and drop the pieces that were given completely."""
        start, end = read.start, read.end
        views: list[memoryview] = []
        for piece in pieces:
            data = piece.data
            assert data is not None
            view = data[max(start - piece.start, 0) : end - piece.start]
            views.append(view)
            piece.given_bytes += len(view)
            if piece.is_dropped:
                continue
            if piece.given_bytes >= piece.length_bytes and piece is not self._last:
                last, self._last = self._last, piece
                self._reads.detach(piece)
                if last is not None:
                    self.drop(last)
            if piece.stream is None:
                self._reads.keep(piece)
        if read.stream is not None:
            read.stream.taken_bytes += end - start
        return views


def _is_same_time(one_s: float | None, other_s: float | None) -> bool:
    """Whether two answers may tell the same time: an HTTP header has whole seconds, a listing may have fractions of them."""
    return one_s is None or other_s is None or abs(one_s - other_s) < 1


def _call(read: WaitingRead, result: Sequence[memoryview] | PenstockError) -> None:
    """Call the reader back. A defect of one must not leave the others waiting."""
    try:
        read.then(result)
    except Exception:
        log.exception("A reader's callback failed.")
