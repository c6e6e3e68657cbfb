"""Reads of a plan in flight, and the requests that each read is cut into."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError, ObjectChangedError, PenstockError, ProtocolError, SpanError
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.system import forks
from penstock.types import UNKNOWN_BYTES, ByteRange, Completion, Get, Landing, ObjectInfo, Transfer, same_version

if TYPE_CHECKING:
    from penstock.fetch.budget import PartBuffer
    from penstock.fetch.plan import PlanItem
    from penstock.types import Core


class Requester(Protocol):
    """The sender of a request, which hears of its progress. All methods run on an engine thread."""

    def on_head(self, part: PartRequest, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """The answer to `part` has begun; see ``types.Sink.head``."""

    def on_done(self, part: PartRequest, completion: Completion) -> None:
        """`part` has ended; see ``types.Sink.done``."""

    def on_metadata(self, read: ObjectRead, completion: Completion) -> None:
        """The HEAD of the object that `read` is about has ended."""


class Route(enum.IntEnum):
    """The way in which a whole object is requested; a read goes on to the next route if one of them fails."""

    AS_PLANNED = 0
    """By the size that is known, in parts if there are several."""
    IN_ONE = 1
    """By one request without a range: a size was wrong, or the store sends no ranges."""
    IN_PARTS = 2
    """By ranges whose answers tell the size: the body is too long to be collected whole."""
    AS_HEAD_TELLS = 3
    """By one request without a range, after a HEAD: the answer and the plan contradict each other about one version."""


@dataclass(slots=True, eq=False, repr=False)
class ObjectRead:
    """One item of the plan on its way.

    Attributes:
        item: The item.
        sequence: Position in the plan, from 0.
        parts: Requests of the read, in order of their bytes.
        sent_count: Number of parts that were sent.
        delivered_count: Number of parts that the consumer has taken; stays 0 for items that are delivered whole.
        pending_count: Number of parts that have not ended.
        info: The version that is being read, from the first answer; every later answer must agree with it.
        error: Why the read failed; None unless it did.
        buffer: Buffer of the whole item, if it is delivered whole and has several parts.
        awaits_metadata: Whether a HEAD for the object's size and checksum is under way.
        claim: ETag and size of the object by the plan or an earlier answer; None if nothing told both. Stores that transform
            objects may send another size of this version, but not state it before the body.
        is_contradicted: Whether an answer states another size than `claim`.
        is_misled: Whether an answer told another size of the same version than the plan or an earlier answer did. Stores
            that transform objects while they are read may list the sizes of the stored objects.
        route: The way in which a whole object is requested.
        refusal: Why the object was not collected whole, if its route is then ``IN_PARTS``; None otherwise.
        successor: The read that starts again in place of this one, in the same memory, once the last request of this one has
            ended, which may still write there; None if there is none.
        rest: For a range in an object of unknown size, the bytes after the first part. It is requested, as far as the object
            goes, when the first answer has told the size; None before and afterwards.
    """

    item: PlanItem
    sequence: int
    route: Route = Route.AS_PLANNED
    parts: list[PartRequest] = field(default_factory=list)
    sent_count: int = 0
    delivered_count: int = 0
    pending_count: int = 0
    info: ObjectInfo | None = None
    error: PenstockError | None = None
    buffer: PartBuffer | None = None
    awaits_metadata: bool = False
    claim: tuple[str | None, int | None] | None = None
    is_contradicted: bool = False
    is_misled: bool = False
    refusal: PenstockError | None = None
    successor: ObjectRead | None = None
    rest: ByteRange | None = None

    def __post_init__(self) -> None:
        item = self.item
        if item.etag is not None and item.size_bytes is not None and self.route is not Route.AS_HEAD_TELLS:
            self.claim = item.etag, item.size_bytes

    @property
    def finished(self) -> bool:
        """Whether all of it has arrived, or it has failed."""
        return self.error is not None or (self.pending_count == 0 and not self.awaits_metadata)

    @property
    def etag(self) -> str | None:
        """ETag of the version to request; None while no version is known."""
        return self.item.etag or (self.info.etag if self.info is not None else None)

    @property
    def size_bytes(self) -> int | None:
        """Size of the object in bytes; None while it is unknown."""
        return self.info.size_bytes if self.info is not None else self.item.size_bytes

    def span(self) -> ByteRange | None:
        """The bytes that are wanted, cut at the object's end; None for a whole object of unknown size.

        Raises:
            SpanError: The range starts past the object's end.
        """
        wanted, size_bytes = self.item.span, self.size_bytes
        if size_bytes is None:
            return wanted
        if wanted is None:
            return ByteRange(0, size_bytes)
        return wanted.within(size_bytes)

    def release_target(self) -> None:
        """Refer to the item's target no longer. Requests in flight still do; a read and its parts refer to each other."""
        if self.item.target is not None:
            self.item = self.item._replace(target=None)

    def pin(self, info: ObjectInfo) -> None:
        """Check an answer against the version that is being read; the first answer sets it.

        Raises:
            ObjectChangedError: The answer describes another version.
            SpanError: The object is too short for the caller's memory.
        """
        known, item = self.info, self.item
        if item.target is not None and item.span is not None and item.span.end > info.size_bytes:
            raise SpanError(f"the range ends at byte {item.span.end}, but the object has {info.size_bytes} bytes")
        if known is None:
            self.info = info
            if item.etag is not None and info.etag is not None and info.etag != item.etag:
                raise ObjectChangedError(f"the object is now {info.etag}, not {item.etag}")
            if item.size_bytes is not None and info.size_bytes != item.size_bytes:
                self.is_misled = item.etag is not None  # and the answer has the same one, or none
                wanted = (
                    f"not {item.size_bytes} as before" if item.target is None else f"but {item.size_bytes} are wanted"
                )
                raise ObjectChangedError(f"the object has {info.size_bytes} bytes, {wanted}")
            # Stores that transform objects while they send them may list, and tell a HEAD, the size and the ETag of the stored
            # object. Then they send chunks, so that the answer states no length before its body.
            states_length = b"transfer-encoding" not in info.headers
            if states_length and (contradiction := contradiction_of(info, self.claim)) is not None:
                self.is_contradicted = True
                raise contradiction
            if info.etag is None and item.last_modified_s not in (None, info.last_modified_s):
                raise ObjectChangedError("the object was modified since it was first read")
            return
        if not same_version(info, known):
            self.is_misled = info.etag is not None and info.etag == known.etag
            self.claim = (known.etag, known.size_bytes)
            raise ObjectChangedError(
                f"the object changed between two parts, from {known.etag} ({known.size_bytes} bytes) "
                f"to {info.etag} ({info.size_bytes} bytes)"
            )
        if info.checksums and not known.checksums:
            self.info = info


def contradiction_of(info: ObjectInfo, claim: tuple[str | None, int | None] | None) -> ProtocolError | None:
    """Return the error for an answer that has another size of a version than a listing, a HEAD or another answer stated.

    Args:
        info: Describes the answer.
        claim: ETag and size in bytes that a listing, a HEAD or an earlier answer stated; None if nothing did.

    Returns:
        The error, or None if nothing contradicts the answer.
    """
    etag, size_bytes = claim or (None, None)
    if etag is None or etag != info.etag or size_bytes == info.size_bytes:
        return None
    return ProtocolError(
        f"version {etag} has {info.size_bytes} bytes by this answer, and {size_bytes} by an earlier one or the listing",
        hint="the store, or a proxy in front of it, cuts answers or gives one ETag to two versions",
    )


@dataclass(slots=True, eq=False, repr=False)
class PartRequest:
    """One request of a read: the sink of its answer.

    Attributes:
        requester: The object that sent it, and hears of its head and its end.
        read: The read that it is a part of.
        start: Offset of its first byte in the object.
        length_bytes: Number of bytes requested; None for a whole object of unknown size.
        reserved_bytes: Bytes reserved in the budget for it, to be released when it is delivered. A ``PartBuffer`` is
            charged separately and not counted here.
        grown_bytes: For a body of unknown length that was dropped because the budget had no more bytes: how many bytes
            to reserve before it is requested again.
        landing: Memory for its body; None while that is unknown.
        buffer: The request's own buffer; None if it has none.
        completion: Says how the request ended; None until then.
        transfer: The transfer under way; None before and afterwards.
    """

    requester: Requester
    read: ObjectRead
    start: int
    length_bytes: int | None
    reserved_bytes: int = 0
    grown_bytes: int = 0
    landing: Landing | None = None
    buffer: PartBuffer | None = None
    completion: Completion | None = None
    transfer: Transfer | None = None

    def operation(self) -> Get:
        """The operation that fetches this part."""
        span = ByteRange(self.start, self.start + self.length_bytes) if self.length_bytes is not None else None
        whole = span is not None and self.start == 0 and self.length_bytes == self.read.size_bytes
        # A small whole object is requested without a range, because only then does S3 send its checksum.
        return Get(self.read.item.key, None if whole else span, self.read.etag)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        return self.requester.on_head(self, info, span)

    def done(self, completion: Completion) -> None:
        """Take the end of the operation; see ``types.Sink.done``."""
        self.requester.on_done(self, completion)


@dataclass(slots=True, eq=False, repr=False)
class HeadRequest:
    """The sink of a HEAD that asks for a large object's size and for the checksum of the whole object.

    Attributes:
        read: The read on whose behalf it is sent.
    """

    requester: Requester
    read: ObjectRead
    landing: Landing | None = None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        return None

    def done(self, completion: Completion) -> None:
        """Take the end of the operation; see ``types.Sink.done``."""
        self.requester.on_metadata(self.read, completion)


OBJECT_BYTES_MAX = 1 << 46
"""The largest object of S3 has 50 TB. A listing that states more would be cut into more parts than memory can hold."""


class LandingAllocator:
    """Gives requests the memory that their bodies go to. All methods but ``release`` run under the caller's lock.

    Args:
        core: The store; it names objects in messages.
        budget: The budget that the memory is charged to.
        whole: True delivers each item as one piece of memory, False part by part.
    """

    def __init__(self, core: Core, budget: Budget, *, whole: bool) -> None:
        self._core = core
        self._budget = budget
        self._whole = whole
        self._generation = forks.generation()

    def prepare(self, part: PartRequest, estimate_bytes: int, *, force: bool) -> bool:
        """Reserve the part's bytes, and say where they land if that is already known.

        Args:
            part: The request that is about to be sent.
            estimate_bytes: Bytes to reserve for a body of unknown length.
            force: Whether to reserve them even if that exceeds the budget.

        Returns:
            False if the budget lacks the bytes and `force` is false.
        """
        length, target = part.length_bytes, part.read.item.target
        if target is not None and target.takes_whole == self._whole and (self._whole or length is not None):
            part.landing = target.landing(part.start, length)
            return True
        # One piece of memory for the object, even if this part is small.
        if self._whole and part is not part.read.parts[0]:
            return self._prepare_shared(part, force=force)
        if length is None or length < POOLED_BYTES_MIN:
            size_bytes = length if length is not None else estimate_bytes
            if not self._budget.reserve(size_bytes, force=force):
                return False
            part.reserved_bytes = size_bytes
            return True
        return self.take_buffer(part, length, force=force)

    def take_buffer(self, part: PartRequest, size_bytes: int, *, force: bool) -> bool:
        """Give the part a buffer of its own; False if the budget lacks the bytes and `force` is false."""
        buffer = self._budget.acquire(size_bytes, force=force)
        if buffer is None:
            return False
        part.buffer = buffer
        if part.read.rest is None:
            self.land(part)
        # Otherwise the head of the answer is needed first, and a store may skip it if the landing is known beforehand.
        return True

    @staticmethod
    def land(part: PartRequest) -> None:
        """Let the part's body go to its own buffer."""
        buffer, length = part.buffer, part.length_bytes
        assert buffer is not None and length is not None  # noqa: PT018 - a buffer is made for a length
        part.landing = Landing(buffer.view, 0, length, direct=buffer.owner)

    def _prepare_shared(self, part: PartRequest, *, force: bool) -> bool:
        """Give a part of an object that is delivered whole its place in the object's one buffer."""
        read = part.read
        span = read.span()
        assert span is not None
        assert part.length_bytes is not None
        if read.buffer is None:
            read.buffer = self._budget.acquire(span.length_bytes, force=force)
            if read.buffer is None:
                return False
            self.join_first(read)
        offset = part.start - span.start
        part.landing = Landing(read.buffer.view, offset, offset + part.length_bytes)
        return True

    def join_first(self, read: ObjectRead) -> None:
        """Copy the first part, which landed in its own buffer, to the start of its object's buffer, if both exist."""
        first = read.parts[0]
        completion = first.completion
        if read.buffer is None or completion is None:
            return
        if first.landing is not None and first.landing.buffer is read.buffer.view:
            return  # it was copied before
        body = completion.body
        first.landing = Landing(read.buffer.view, 0, len(body))
        first.landing.offset = len(body)
        read.buffer.view[: len(body)] = body
        completion.landing = first.landing
        first.buffer = None

    def held_bytes(self, read: ObjectRead, span: ByteRange | None) -> int:
        """Bytes that `read` has to hold together to deliver `span`; 0 if they go to the caller's memory, or part by part."""
        return span.length_bytes if self._whole and span is not None and read.item.target is None else 0

    def refuse_oversize(self, read: ObjectRead, span: ByteRange | None) -> None:
        """Refuse a read that could fill more than half of the budget on its own, or of an object larger than any.

        Raises:
            ConfigError: `span` is too long to be delivered whole, or the object is too large.
        """
        if span is not None and OBJECT_BYTES_MAX < span.end < UNKNOWN_BYTES:
            raise ConfigError(
                f"{self._core.describe(read.item.key)}: an object of {span.end} bytes or more is larger than any store has: "
                f"the limit is {OBJECT_BYTES_MAX} bytes"
            )
        held_bytes = self.held_bytes(read, span)
        if held_bytes > self._budget.bytes_max // 2:
            raise ConfigError(
                f"{self._core.describe(read.item.key)}: a read of {held_bytes} bytes is more than half of the budget of "
                f"{self._budget.bytes_max} bytes",
                hint="stream it with read_parts() or open(), or raise FetchConfig(budget_bytes_max=...)",
            )

    def reserve_growth(self, part: PartRequest, length_bytes: int, *, force: bool) -> bool:
        """Reserve bytes for a body of unknown length that is about to have `length_bytes`.

        Returns:
            False if the budget lacks the bytes and `force` is false; ``part.grown_bytes`` then says how many it needs.

        Raises:
            ConfigError: The body has more than half of the budget. It is collected whole, so it can become no longer.
        """
        half_bytes = self._budget.bytes_max // 2
        if length_bytes > half_bytes:
            raise ConfigError(
                f"{self._core.describe(part.read.item.key)}: a body of unknown length has {length_bytes} bytes or more, "
                f"which is more than half of the budget of {self._budget.bytes_max} bytes",
                hint="stream it with read_parts(), if the store has ranges, or raise FetchConfig(budget_bytes_max=...)",
            )
        wanted_bytes = min(2 * length_bytes, half_bytes)
        if not self._budget.reserve(wanted_bytes - part.reserved_bytes, force=force):
            part.grown_bytes = wanted_bytes
            return False
        part.reserved_bytes = wanted_bytes
        return True

    def release(self, part: PartRequest) -> None:
        """Release the bytes reserved for a part; a ``PartBuffer`` returns itself. Nothing happens in a forked child."""
        if part.reserved_bytes and self._generation == forks.generation():
            self._budget.release(part.reserved_bytes)
            part.reserved_bytes = 0
