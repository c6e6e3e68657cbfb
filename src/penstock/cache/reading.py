"""One ``Get`` through the cache: which version, which blocks are there, and one fetch for those that are not.

A ``Read`` begins on a thread of the pool. Blocks that are on disk are read straight into the place where the sink wants them.
What is missing is claimed (``claims``): neighbouring blocks that are ours to fetch become one request of the store inside,
pinned to the version, whose body lands in the sink's buffer where it lies wholly inside what was asked for. When it has
arrived, its blocks are stored, other reads that waited for them get them from memory, and the operation ends. Bytes
are stored *before* their reader is told: afterwards the memory is the reader's to change.

Where the version is not known, the ``Get`` goes to the store as it is (``Direct``), one request as without a cache, and the
blocks that its answer covers are stored on the way.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from penstock.buffers import small_buffer
from penstock.cache.claims import Claim
from penstock.cache.entry import block_name
from penstock.cache.fetching import Direct, Fetch, Revalidation
from penstock.cache.files import Block
from penstock.errors import (
    CancelledOperationError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    StoreError,
    as_completion_error,
)
from penstock.store.threaded import span_within
from penstock.types import Attempt, ByteRange, Completion, Landing, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.cached import Cached
    from penstock.cache.fetching import Request
    from penstock.types import Get, Sink, Transfer

DIRECT_INDEX = -1
"""In the place of a block's number: what is waited for is a ``Direct``."""

_TOGETHER_COUNT = 8
"""Blocks that are open at the same time for one read."""


class Read:
    """One ``Get``: the ``Transfer`` that ``submit`` returned. Its steps run on the pool's threads.

    Attributes:
        cache: The store.
        operation: What was asked.
        sink: Who asked.
        info: The version that is read, once that is known.
        digest: Of that version's blocks.
        wanted: Bytes of the object that the landing takes.
        view: uint8[wanted], writable.
        cancelled: Whether it was given up.
    """

    __slots__ = (
        "_attempts",
        "_began_s",
        "_blocks_count",
        "_error",
        "_hits_count",
        "_lock",
        "_patient",
        "_pending",
        "_transfers",
        "cache",
        "cancelled",
        "completion",
        "digest",
        "identity",
        "info",
        "landing",
        "operation",
        "sink",
        "submitted_s",
        "verified",
        "view",
        "wanted",
    )

    def __init__(self, cache: Cached, operation: Get, sink: Sink) -> None:
        self.cache = cache
        self.operation = operation
        self.sink = sink
        self.submitted_s = time.monotonic()
        self.cancelled = False
        self.completion = Completion(operation)
        self.info: ObjectInfo | None = None
        self.identity = b""
        self.digest = ""
        self.landing: Landing | None = None
        self.wanted = ByteRange(0, 0)
        self.view = memoryview(b"")
        self.verified = "crc32c"
        self._began_s = 0.0
        self._lock = threading.Lock()
        self._pending = 1  # the planning itself
        self._error: StoreError | None = None
        self._patient = True
        self._transfers: dict[Request, Transfer] = {}
        self._attempts: list[Attempt] = []
        self._hits_count = 0
        self._blocks_count = 0

    # ── Transfer ───────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        """See ``Transfer``: what is not begun is not begun, requests are given up."""
        self.cancelled = True
        for transfer in list(self._transfers.values()):
            transfer.cancel()

    def unanswered_s(self) -> float:
        """See ``Transfer``; hedging is inside."""
        return 0.0

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """The first step: find out which version to read."""
        try:
            self._began_s = self._began_s or time.monotonic()
            self._check()
            info = self._version()
            if info is not None:
                self.plan(info)
        except Exception as error:
            self.fail(error)

    def _version(self) -> ObjectInfo | None:
        """The version to read; None where that is being asked for, or the whole ``Get`` is."""
        operation, metadata = self.operation, self.cache.metadata
        if operation.if_match is not None:
            known = metadata.get(operation.key)
            if known is None and (size_bytes := self._size_on_disk(operation.if_match)) is not None:
                return ObjectInfo(operation.key, size_bytes, operation.if_match)
            if known is not None and known.info is not None and known.info.etag == operation.if_match:
                return known.info
            self._go_direct()  # another version than the last that was seen, or none: the store decides
            return None
        known = metadata.fresh(operation.key, self.submitted_s)
        if known is not None:
            self.cache.counts.metadata_hit_count += 1
            if known.info is None:
                raise ObjectMissingError("no such object, as was found before", status=404)
            return known.info
        hint = metadata.hint(operation.key)
        if hint is not None and hint.etag is not None and (operation.span is not None or self._on_disk(hint.etag)):
            self.track(Revalidation(self))
        else:
            self._go_direct()
        return None

    def _first_index(self) -> int:
        return self.operation.span.start // self.cache.config.block_bytes if self.operation.span is not None else 0

    def _size_on_disk(self, etag: str) -> int | None:
        identity, digest = self.cache.identity(self.operation.key, etag)
        header = self.cache.files.read_header(block_name(digest, self._first_index()), identity)
        return header.object_bytes if header is not None else None

    def _on_disk(self, etag: str) -> bool:
        _, digest = self.cache.identity(self.operation.key, etag)
        return self.cache.files.exists(block_name(digest, self._first_index()))

    def _go_direct(self) -> None:
        claim = self.cache.claim_direct(self, patient=self._patient)
        if isinstance(claim, Claim):
            self.track(Direct(self, claim))
        elif not claim:
            self.cache.claims.watch(self.cache.lease_number(self, DIRECT_INDEX), self, (DIRECT_INDEX,))

    def plan(self, info: ObjectInfo) -> None:
        """The version is known: find its blocks, and fetch what is missing."""
        operation, completion = self.operation, self.completion
        assert info.etag is not None
        # without its checksums: blocks have their own, and are held against them once; see docs/concepts/cache.md
        self.info = completion.info = ObjectInfo(operation.key, info.size_bytes, info.etag, info.last_modified_s)
        self.identity, self.digest = self.cache.identity(operation.key, info.etag)
        span = span_within(operation, info.size_bytes)
        if span is not None:
            landing = self.sink.head(self.info, span)
            if landing is None:
                landing = Landing(small_buffer(span.length_bytes), 0, span.length_bytes)
            self.landing = landing
            end = min(landing.end, landing.position + span.length_bytes)
            self.view = memoryview(landing.buffer)[landing.position : end]
            self.wanted = ByteRange(span.start, span.start + len(self.view))
            completion.span, completion.landing = span, landing
            if self.view:
                block_bytes = self.cache.config.block_bytes
                self._get(range(span.start // block_bytes, (self.wanted.end - 1) // block_bytes + 1))
        self.settle()

    def _get(self, indices: Sequence[int]) -> None:
        missing: list[int] = []
        for begin in range(0, len(indices), _TOGETHER_COUNT):
            self._check()
            missing += self._missing(indices[begin : begin + _TOGETHER_COUNT])
        if missing:
            self._fetch(missing)

    def _missing(self, indices: Sequence[int]) -> list[int]:
        """Fill blocks' parts of the view from the disk; those that are not there."""
        found = self.cache.files.read_blocks(self.identity, [self._wanted_of(index) for index in indices])
        self._hits_count += sum(found)
        return [index for index, hit in zip(indices, found, strict=True) if not hit]

    def _wanted_of(self, index: int) -> Block:
        start, view = self.part(index)
        return Block(block_name(self.digest, index), index, self.block(index).length_bytes, start, view)

    def block(self, index: int) -> ByteRange:
        """Bytes of the object that a block holds."""
        assert self.info is not None
        block_bytes = self.cache.config.block_bytes
        return ByteRange(index * block_bytes, min((index + 1) * block_bytes, self.info.size_bytes))

    def part(self, index: int) -> tuple[int, memoryview]:
        """Of a block: the first byte that is wanted, in the block, and where the wanted bytes go."""
        block, wanted = self.block(index), self.wanted
        begin, end = max(block.start, wanted.start), min(block.end, wanted.end)
        return begin - block.start, self.view[begin - wanted.start : end - wanted.start]

    def _fetch(self, missing: list[int]) -> None:
        """Claim blocks, and ask for those that are ours, neighbours together."""
        mine: list[tuple[int, Claim]] = []
        elsewhere: list[int] = []
        with self._lock:
            self._pending += len(missing)
        for index, claim in zip(missing, self.cache.claim_blocks(self, missing, patient=self._patient), strict=True):
            if claim is False:
                elsewhere.append(index)
            elif claim is True:
                continue
            # between the look at the disk and the lease, its last holder may have stored it
            elif (
                claim.leased and self.cache.files.exists(block_name(self.digest, index)) and not self._missing([index])
            ):
                self.cache.free(claim)
                self.settle()
            else:
                mine.append((index, claim))
        if elsewhere:  # one look for all of them: who fetches several neighbours releases the last of them last
            self.cache.claims.watch(self.cache.lease_number(self, elsewhere[-1]), self, tuple(elsewhere))
        run: list[tuple[int, Claim]] = []
        for index, claim in mine:
            if run and index != run[-1][0] + 1:
                self._ask(run)
                run = []
            run.append((index, claim))
        if run:
            self._ask(run)

    def _ask(self, run: list[tuple[int, Claim]]) -> None:
        self.track(Fetch(self, run))

    def track(self, request: Request) -> None:
        """Send a request of the store inside, and remember it as long as it is under way."""
        transfer = request.submit()
        if transfer is None:
            return
        with self._lock:
            if not request.ended:
                self._transfers[request] = transfer
        if self.cancelled:
            transfer.cancel()

    def untrack(self, request: Request) -> None:
        """A request ended."""
        with self._lock:
            request.ended = True
            self._transfers.pop(request, None)

    # ── Waiter ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def resume(self, indices: tuple[int, ...], *, expired: bool) -> None:
        """See ``claims.Waiter``."""
        if expired:
            self._patient = False
        if indices == (DIRECT_INDEX,):
            self.cache.step(self.run, self.fail)
        else:
            self.cache.step(lambda: self._again(indices), lambda error: self.fail(error, len(indices)))

    def _again(self, indices: tuple[int, ...]) -> None:
        self._get(indices)
        self.settle(len(indices))

    def give(self, index: int, data: memoryview) -> None:
        """Another read of this process fetched a block that this one waits for: uint8[n] of it, from the block's start."""
        start, view = self.part(index)
        if not self.cancelled:
            view[:] = data[start : start + len(view)]
        self._hits_count += 1
        self.settle()

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_attempts(self, attempts: tuple[Attempt, ...]) -> None:
        """What a request of the store inside went through; its bytes are told by the read's own attempt."""
        with self._lock:
            self._attempts += [attempt._replace(received_bytes=0) for attempt in attempts]

    def fail(self, error: Exception, count: int = 1) -> None:
        """So many of the pieces that were waited for failed; the first error is the read's."""
        known = error if isinstance(error, PenstockError) else StoreError(f"{type(error).__name__}: {error}")
        mapped = as_completion_error(known)
        if mapped is not error:
            mapped.__cause__ = error
        if isinstance(mapped, ObjectChangedError):
            self.cache.metadata.changed(self.operation.key)
        with self._lock:
            self._error = self._error or mapped
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.cancel()
        self.settle(count)

    def settle(self, count: int = 1) -> None:
        """So many of the pieces that were waited for are there; after the last the sink is told."""
        with self._lock:
            self._pending -= count
            if self._pending:
                return
        completion, landing = self.completion, self.landing
        completion.error = self._located()
        landed_bytes = 0
        if completion.error is None and landing is not None:
            landed_bytes = len(self.view)
            landing.position += landed_bytes
            completion.verified = self.verified
        completion.attempts = (*self._attempts, self._attempt(landed_bytes))
        self.end(completion)

    def end(self, completion: Completion) -> None:
        """Tell the sink, and keep nothing alive."""
        self.landing = None
        self.view = memoryview(b"")
        self.sink.done(completion)

    def _located(self) -> StoreError | None:
        error = self._error
        if error is not None:
            error.operation = error.operation or "GET"
            error.url = error.url or self.cache.describe(self.operation.key)
        return error

    def _attempt(self, landed_bytes: int) -> Attempt:
        error, began_s = self._error, self._began_s or self.submitted_s
        elapsed_s = time.monotonic() - began_s
        return Attempt(
            start_s=began_s,
            status=200 if error is None else (error.status or 0),
            offset_bytes=0,
            received_bytes=landed_bytes,
            queued_s=began_s - self.submitted_s,
            connect_s=0.0,
            first_byte_s=0.0,
            total_s=elapsed_s,
            throttled=False,
            request_id=None,
        )

    def _check(self) -> None:
        if self.cancelled:
            raise CancelledOperationError("cancelled")

    def deliver(self, body: memoryview, start: int) -> None:
        """Copy what is wanted of a body that begins at byte `start` of the object and did not land in the view."""
        begin, end = max(start, self.wanted.start), min(start + len(body), self.wanted.end)
        if begin < end:
            target = self.view[begin - self.wanted.start : end - self.wanted.start]
            target[:] = body[begin - start : end - start]
