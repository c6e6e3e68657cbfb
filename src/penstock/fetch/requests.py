"""What is in flight: items of the plan, and the requests that each was cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ObjectChangedError, PenstockError
from penstock.types import ByteRange, Completion, Get, Landing, ObjectInfo, Transfer, same_version

if TYPE_CHECKING:
    from penstock.fetch.budget import PartBuffer
    from penstock.fetch.plan import PlanItem
    from penstock.fetch.scheduler import RequestScheduler


class ObjectRead:
    """One item of the plan on its way.

    Attributes:
        plan: What was asked.
        sequence: Position in the plan.
        sent_count: Slots that were sent.
        slots: Its requests, in order of their bytes.
        delivered_count: Slots that the consumer has had (parts only).
        info: Of the version being read: from the first answer, every later one must agree.
        error: Why it failed, once it did.
        buffer: Where all parts of a whole delivery go, when there are several.
        pending_count: Slots that have not ended.
        asking: A HEAD for its size and checksum has not ended.
        rest: Of a range in an object of unknown size: what follows its first part. It is asked for, as far as the
            object goes, once the first answer has told the size; None afterwards.
    """

    __slots__ = (
        "asking",
        "buffer",
        "delivered_count",
        "error",
        "info",
        "pending_count",
        "plan",
        "rest",
        "sent_count",
        "sequence",
        "slots",
    )

    def __init__(self, plan: PlanItem, sequence: int) -> None:
        self.plan = plan
        self.sequence = sequence
        self.sent_count = 0
        self.slots: list[PartRequest] = []
        self.delivered_count = 0
        self.info: ObjectInfo | None = None
        self.error: PenstockError | None = None
        self.buffer: PartBuffer | None = None
        self.pending_count = 0
        self.asking = False
        self.rest: ByteRange | None = None

    @property
    def finished(self) -> bool:
        """Whether all of it is here, or it failed."""
        return self.error is not None or (self.pending_count == 0 and not self.asking)

    @property
    def etag(self) -> str | None:
        """The version to ask for, as far as it is known."""
        return self.plan.etag or (self.info.etag if self.info is not None else None)

    @property
    def size_bytes(self) -> int | None:
        """Of the object, as far as it is known."""
        return self.info.size_bytes if self.info is not None else self.plan.size_bytes

    def span(self) -> ByteRange | None:
        """The bytes wanted, cut at the object's end; None while that is not known.

        Raises:
            SpanError: they start past the end.
        """
        asked, size_bytes = self.plan.span, self.size_bytes
        if size_bytes is None:
            return asked
        if asked is None:
            return ByteRange(0, size_bytes)
        return asked.within(size_bytes)

    def pin(self, info: ObjectInfo) -> None:
        """An answer began: the first sets the version, others must be of it.

        Raises:
            ObjectChangedError: they are not.
        """
        known, plan = self.info, self.plan
        if known is None:
            self.info = info
            if plan.etag is not None and info.etag is not None and info.etag != plan.etag:
                raise ObjectChangedError(f"the object is now {info.etag}, not {plan.etag}")
            if plan.size_bytes is not None and info.size_bytes != plan.size_bytes:
                raise ObjectChangedError(f"the object has {info.size_bytes} bytes, not {plan.size_bytes} as before")
            if info.etag is None and plan.last_modified_s not in (None, info.last_modified_s):
                raise ObjectChangedError("the object was modified since it was first read")
            return
        if not same_version(info, known):
            raise ObjectChangedError(
                f"parts of two versions: {known.etag} of {known.size_bytes} and {info.etag} of {info.size_bytes} bytes"
            )
        if info.checksums and not known.checksums:
            self.info = info


class PartRequest:
    """One request of an item: its sink.

    Attributes:
        start: First byte, in the object.
        length_bytes: Bytes asked for; None for a whole object of unknown size.
        reserved_bytes: Taken out of the budget for it, to be put back when it is delivered; a ``PartBuffer`` is
            charged by itself.
        grown_bytes: For a body of unknown length that the budget had no more bytes for: what it needs to be sent again.
        completion: How it ended, once it did.
    """

    __slots__ = (
        "buffer",
        "completion",
        "flight",
        "grown_bytes",
        "item",
        "landing",
        "length_bytes",
        "reserved_bytes",
        "start",
        "transfer",
    )

    def __init__(self, flight: RequestScheduler, item: ObjectRead, start: int, length_bytes: int | None) -> None:
        self.flight = flight
        self.item = item
        self.start = start
        self.length_bytes = length_bytes
        self.reserved_bytes = 0
        self.grown_bytes = 0
        self.landing: Landing | None = None
        self.buffer: PartBuffer | None = None
        self.completion: Completion | None = None
        self.transfer: Transfer | None = None

    def operation(self) -> Get:
        """The request that this slot is."""
        span = ByteRange(self.start, self.start + self.length_bytes) if self.length_bytes is not None else None
        whole = span is not None and self.start == 0 and self.length_bytes == self.item.size_bytes
        # a small whole object is asked for without a range: only then does S3 send its checksum
        return Get(self.item.plan.key, None if whole else span, self.item.etag)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """See ``types.Sink``."""
        return self.flight.on_head(self, info, span)

    def done(self, completion: Completion) -> None:
        """See ``types.Sink``."""
        self.flight.on_done(self, completion)


class HeadRequest:
    """Hears the HEAD that asks for a large object's size, and for the checksum of the whole."""

    __slots__ = ("flight", "item", "landing")

    def __init__(self, flight: RequestScheduler, item: ObjectRead) -> None:
        self.flight = flight
        self.item = item
        self.landing: Landing | None = None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """See ``types.Sink``."""
        return None

    def done(self, completion: Completion) -> None:
        """See ``types.Sink``."""
        self.flight.on_asked(self.item, completion)
