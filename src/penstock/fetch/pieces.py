"""Pieces of an object: the bytes of one request, on their way or here, and the reads that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.errors import PenstockError
    from penstock.fetch.budget import PartBuffer
    from penstock.fetch.runs import ReadRun
    from penstock.types import Completion, Landing, ObjectInfo, Transfer


class PieceOwner(Protocol):
    """Whoever requested a piece. Both methods run on an engine thread.

    Attributes:
        info: The version of the object that the piece is part of.
    """

    info: ObjectInfo

    def on_head(self, piece: Piece, info: ObjectInfo) -> None:
        """The answer for `piece` has begun; raises ``StoreError`` to refuse it."""

    def on_done(self, piece: Piece, completion: Completion) -> None:
        """The request for `piece` has ended."""


class Piece:
    """Consecutive bytes of one version of an object: a request, the sink of its answer, and then what arrived.

    Attributes:
        owner: Whoever requested it.
        start: Offset of its first byte in the object.
        end: Offset after its last byte.
        run: The run that it was requested ahead for; None if a read asked for it, or when the run is over.
        landing: Where the body goes; None once the request has ended.
        buffer: The buffer that the body lands in; None if it is small.
        reserved_bytes: Bytes reserved in the budget for it. A ``PartBuffer`` is charged separately and not counted here.
        transfer: The request under way; None before and afterwards.
        data: uint8[end - start]; None until they are here.
        given_bytes: How many of its bytes reads were given.
        waiting: The reads that wait for it.
        is_ahead: Whether it was requested before a read asked for it.
        is_dropped: Whether its bytes are not wanted any more.
        has_ended: Whether its request has ended.
        leaves_body_alone: True: nobody changes the bytes after they have arrived.
    """

    __slots__ = (
        "buffer",
        "data",
        "end",
        "given_bytes",
        "has_ended",
        "is_ahead",
        "is_dropped",
        "landing",
        "owner",
        "reserved_bytes",
        "run",
        "start",
        "transfer",
        "waiting",
    )

    leaves_body_alone = True

    def __init__(self, owner: PieceOwner, start: int, end: int, *, run: ReadRun | None = None, is_ahead: bool) -> None:
        self.owner = owner
        self.start = start
        self.end = end
        self.run = run
        self.landing: Landing | None = None
        self.buffer: PartBuffer | None = None
        self.reserved_bytes = 0
        self.transfer: Transfer | None = None
        self.data: memoryview | None = None
        self.given_bytes = 0
        self.waiting: list[WaitingRead] = []
        self.is_ahead = is_ahead
        self.is_dropped = False
        self.has_ended = False

    @property
    def length_bytes(self) -> int:
        """Number of its bytes."""
        return self.end - self.start

    def operation(self) -> Get:
        """Return the request; for a whole object without a range, because only then does S3 send its checksum."""
        info = self.owner.info
        whole = self.start == 0 and self.end == info.size_bytes
        return Get(info.key, None if whole else ByteRange(self.start, self.end), info.etag)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        self.owner.on_head(self, info)
        landing = self.landing
        if landing is not None:
            landing.position = landing.start
        return landing

    def done(self, completion: Completion) -> None:
        """Take the end of the request; see ``types.Sink.done``."""
        self.owner.on_done(self, completion)


class WaitingRead:
    """A read that waits until all of its pieces are here.

    Attributes:
        start: Offset of its first byte in the object.
        end: Offset after its last byte.
        pieces: The pieces that hold its bytes, in their order; it keeps them alive.
        missing_count: Number of the pieces that have not arrived.
        run: The run that it belongs to; None if there is none.
        then: Receives the bytes, or the error.
        reader: Whoever asked; the read is cancelled when that is closed.
        has_ended: Whether `then` was called, or is about to be.
    """

    __slots__ = ("end", "has_ended", "missing_count", "pieces", "reader", "run", "start", "then")

    def __init__(
        self, start: int, end: int, then: Callable[[Sequence[memoryview] | PenstockError], None], reader: object
    ) -> None:
        self.start = start
        self.end = end
        self.then = then
        self.reader = reader
        self.pieces: list[Piece] = []
        self.missing_count = 0
        self.run: ReadRun | None = None
        self.has_ended = False
