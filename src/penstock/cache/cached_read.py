"""One ``Get`` through the cache: find the version, read the blocks that are on disk, and fetch the others.

A ``CachedRead`` runs on threads of the pool. It reads blocks that are on disk directly into the sink's buffer. It claims
missing blocks (``claims``), and requests those that no other reader is fetching from the inner store. Neighbouring blocks
become one request (``BlockFetch``), pinned to the version; its body lands in the sink's buffer if the request lies completely
inside the requested range. When the bytes have arrived, their blocks are stored, other reads that waited for them get a
copy, and the operation ends. Blocks are stored *before* the reader is notified, since the reader may then change the memory.
Only a small body for a sink that does not change it is stored afterwards (``storing``).

If the version is not known, the ``Get`` goes to the store unchanged (``UnpinnedGet``), in one request as without a cache, and
the blocks that the answer covers are stored. If blocks of the version seen last are on disk, a HEAD first asks
whether that version is still current (``Revalidation``).

Not split because a read and its requests share their state; in two files, each would need most of the other's attributes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.cache.claims import WHOLE_GET, Claim
from penstock.cache.directory import BlockRead, NewEntry, block_read, new_entry
from penstock.cache.entry import BLOCK, block_name
from penstock.cache.metadata import REMEMBERED_MISS, is_version
from penstock.cache.storing import LateEntries
from penstock.errors import (
    CancelledOperationError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    ShortReadError,
    StoreError,
    as_completion_error,
)
from penstock.memory.buffers import small_buffer
from penstock.store.threaded import span_within
from penstock.types import Attempt, ByteRange, Completion, Get, Head, Landing, ObjectInfo, lasting_etag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.context import CacheContext
    from penstock.types import Sink, Transfer

_NO_CHECKSUMS: dict[str, str] = {}
_TOGETHER_COUNT = 8
"""Number of blocks that one read has open at the same time."""


class CachedRead:
    """One ``Get``: the ``Transfer`` that ``submit`` returned. Its steps run on threads of the pool.

    Args:
        context: The parts of the cache.
        operation: The requested bytes.
        sink: Receives the answer.

    Attributes:
        info: The version that is read, once it is known.
        identity: Identity of that version.
        digest: Digest of the identity, which the names of its blocks begin with.
        wanted: Range of the object that the landing takes.
        view: uint8[wanted], writable: the part of the landing's buffer that is to be filled.
        verified: Checksum that the bytes were compared with.
        cancelled: Whether the caller cancelled the transfer.
    """

    __slots__ = (
        "_attempts",
        "_began_s",
        "_error",
        "_lock",
        "_pending",
        "_respects_leases",
        "_transfers",
        "cancelled",
        "completion",
        "context",
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

    def __init__(self, context: CacheContext, operation: Get, sink: Sink) -> None:
        self.context = context
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
        self._pending = 1  # counts the blocks that are missing, and the planning itself
        self._error: StoreError | None = None
        self._respects_leases = True  # until waiting for another process has taken too long
        self._transfers: dict[InnerRequest, Transfer] = {}
        self._attempts: list[Attempt] = []

    # ── Transfer ───────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self) -> None:
        """Cancel the requests under way, and begin no other."""
        self.cancelled = True
        for transfer in list(self._transfers.values()):
            transfer.cancel()

    def unanswered_s(self) -> float:
        """Return 0, as hedging takes place inside the cache."""
        return 0.0

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Find out which version to read; this is the first step."""
        try:
            self._began_s = self._began_s or time.monotonic()
            self._check()
            info = self._version()
            if info is not None:
                self.plan(info)
        except Exception as error:
            self.fail(error)

    def _version(self) -> ObjectInfo | None:
        """Return the version to read; None if a request for it, or for the whole ``Get``, has been sent."""
        operation, metadata = self.operation, self.context.metadata
        if operation.if_match is not None:
            known = metadata.get(operation.key)
            if known is None and (size_bytes := self._size_on_disk(operation.if_match)) is not None:
                return ObjectInfo(operation.key, size_bytes, operation.if_match)
            if known is not None and known.info is not None:
                if known.info.etag == operation.if_match:
                    return known.info
                if lasting_etag(known.info.etag) == operation.if_match:  # data sets pin local files by it
                    return known.info._replace(etag=operation.if_match)
            self._get_unpinned()  # the version is not the one seen last, or none was seen: the store decides
            return None
        known, hint = metadata.fresh_or_hint(operation.key, self.submitted_s)
        if known is not None:
            self.context.counts.metadata_hit_count += 1
            if known.info is None:
                raise ObjectMissingError(REMEMBERED_MISS, status=404)
            return known.info
        if hint is not None and hint.etag is not None and (operation.span is not None or self._is_on_disk(hint.etag)):
            self.track(Revalidation(self))
        else:
            self._get_unpinned(is_first=hint is None)
        return None

    def _first_index(self) -> int:
        return self.operation.span.start // self.context.config.block_bytes if self.operation.span is not None else 0

    def _size_on_disk(self, etag: str) -> int | None:
        identity, digest = self.context.identities.of_version(self.operation.key, etag)
        header = self.context.directory.read_header(block_name(digest, self._first_index()), identity)
        return header.object_bytes if header is not None else None

    def _is_on_disk(self, etag: str) -> bool:
        _, digest = self.context.identities.of_version(self.operation.key, etag)
        return self.context.directory.exists(block_name(digest, self._first_index()))

    def _get_unpinned(self, *, is_first: bool = False) -> None:
        digest = self.context.identities.of_get(self.operation)
        [claim] = self.context.claims.take(digest, (WHOLE_GET,), self, respects_leases=self._respects_leases)
        if isinstance(claim, Claim):
            self.track(UnpinnedGet(self, claim, is_first=is_first))
        elif not claim:
            self.context.claims.watch(digest, (WHOLE_GET,), self)

    def plan(self, info: ObjectInfo) -> None:
        """Read the blocks of a version that are on disk, and fetch the others."""
        operation, completion = self.operation, self.completion
        assert info.etag is not None
        # without the store's checksums: blocks have their own, and are verified once; see docs/concepts/cache.md
        self.info = completion.info = info._replace(key=operation.key, checksums=_NO_CHECKSUMS)
        self.identity, self.digest = self.context.identities.of_version(operation.key, info.etag)
        span = span_within(operation, info.size_bytes)
        if span is not None:
            landing = self.sink.head(self.info, span)
            if landing is None:
                landing = Landing(small_buffer(span.length_bytes), 0, span.length_bytes)
            self.landing = landing
            end = min(landing.end, landing.offset + span.length_bytes)
            self.view = memoryview(landing.buffer)[landing.offset : end]
            self.wanted = ByteRange(span.start, span.start + len(self.view))
            completion.span, completion.landing = span, landing
            if self.view:
                block_bytes = self.context.config.block_bytes
                self._get(range(span.start // block_bytes, (self.wanted.end - 1) // block_bytes + 1))
        self.end_pieces()

    def _get(self, indices: Sequence[int]) -> None:
        missing: list[int] = []
        for begin in range(0, len(indices), _TOGETHER_COUNT):
            self._check()
            missing += self._read_from_disk(indices[begin : begin + _TOGETHER_COUNT])
        if missing:
            self._fetch(missing)

    def _read_from_disk(self, indices: Sequence[int]) -> list[int]:
        """Fill the view from blocks on disk, and return the numbers of those that are missing."""
        found = self.context.directory.read_blocks(self.identity, [self._block_read(index) for index in indices])
        return [index for index, hit in zip(indices, found, strict=True) if not hit]

    def _block_read(self, index: int) -> BlockRead:
        assert self.info is not None
        return block_read(
            self.digest,
            index,
            self.wanted,
            self.view,
            size_bytes=self.info.size_bytes,
            block_bytes=self.context.config.block_bytes,
        )

    def block(self, index: int) -> ByteRange:
        """Return the range of the object that a block holds."""
        assert self.info is not None
        block_bytes = self.context.config.block_bytes
        return ByteRange(index * block_bytes, min((index + 1) * block_bytes, self.info.size_bytes))

    def _fetch(self, missing: list[int]) -> None:
        """Claim missing blocks, and request those that no other reader is fetching, neighbours together."""
        claimed: list[tuple[int, Claim]] = []
        leased_elsewhere: list[int] = []
        with self._lock:
            self._pending += len(missing)
        claims = self.context.claims.take(self.digest, missing, self, respects_leases=self._respects_leases)
        for index, claim in zip(missing, claims, strict=True):
            if claim is False:
                leased_elsewhere.append(index)
            elif claim is True:
                continue
            # another process may have stored it after we looked on the disk and before we got its lease
            elif (
                claim.leased
                and self.context.directory.exists(block_name(self.digest, index))
                and not self._read_from_disk([index])
            ):
                self.context.claims.free(claim)
                self.end_pieces()
            else:
                claimed.append((index, claim))
        if leased_elsewhere:
            self.context.claims.watch(self.digest, tuple(leased_elsewhere), self)
        run: list[tuple[int, Claim]] = []
        for index, claim in claimed:
            if run and index != run[-1][0] + 1:
                self.track(BlockFetch(self, run))
                run = []
            run.append((index, claim))
        if run:
            self.track(BlockFetch(self, run))

    def track(self, request: InnerRequest) -> None:
        """Send a request to the store inside, and remember its transfer until it ends."""
        transfer = request.submit()
        if transfer is None:
            return
        with self._lock:
            if not request.ended:
                self._transfers[request] = transfer
        if self.cancelled:
            transfer.cancel()

    def untrack(self, request: InnerRequest) -> None:
        """Forget the transfer of a request that has ended."""
        with self._lock:
            request.ended = True
            self._transfers.pop(request, None)

    # ── what claims call; nothing here blocks ──────────────────────────────────────────────────────────────────────────

    def resume(self, indices: tuple[int, ...], *, expired: bool) -> None:
        """Look for blocks again: they have arrived, or are no longer being fetched.

        Args:
            indices: Numbers of the blocks.
            expired: Whether waiting ended because it took longer than ``CacheConfig.wait_s_max``.
        """
        if expired:
            self._respects_leases = False
        if indices == (WHOLE_GET,):
            self.context.run_on_pool(self.run, self.fail)
        else:
            self.context.run_on_pool(lambda: self._get_again(indices), lambda error: self.fail(error, len(indices)))

    def _get_again(self, indices: tuple[int, ...]) -> None:
        self._get(indices)
        self.end_pieces(len(indices))

    def give(self, index: int, data: memoryview) -> None:
        """Copy a block that another read of this process has fetched; `data` is uint8[n], from the block's start."""
        block = self._block_read(index)
        part = data[block.start : block.start + len(block.view)]
        if len(part) != len(block.view):  # the store states two sizes for one version
            self.fail(
                ObjectChangedError(f"block {index} of the object has {len(data)} bytes, fewer than its size says")
            )
            return
        if not self.cancelled:
            block.view[:] = part
        self.end_pieces()

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_attempts(self, attempts: tuple[Attempt, ...]) -> None:
        """Remember the attempts of a request. Their bytes count as 0, since the read's own attempt counts them."""
        with self._lock:
            self._attempts += [attempt._replace(received_bytes=0) for attempt in attempts]

    def fail(self, error: Exception, count: int = 1) -> None:
        """Note that pending pieces failed, and cancel the other requests. The read ends with the first error.

        Args:
            error: Why they failed.
            count: Number of pieces.
        """
        known = error if isinstance(error, PenstockError) else StoreError(f"{type(error).__name__}: {error}")
        mapped = as_completion_error(known)
        if mapped is not error:
            mapped.__cause__ = error
        if isinstance(mapped, ObjectChangedError):
            self.context.metadata.changed(self.operation.key)
        with self._lock:
            self._error = self._error or mapped
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.cancel()
        self.end_pieces(count)

    def end_pieces(self, count: int = 1) -> None:
        """Note that pending pieces have ended, and notify the sink after the last one.

        Args:
            count: Number of pieces.
        """
        with self._lock:
            self._pending -= count
            if self._pending:
                return
        completion, landing = self.completion, self.landing
        completion.error = self._located_error()
        landed_bytes = 0
        if completion.error is None and landing is not None:
            landed_bytes = len(self.view)
            landing.offset += landed_bytes
            completion.verified = self.verified
        completion.attempts = (*self._attempts, self._own_attempt(landed_bytes))
        self.end(completion)

    def end(self, completion: Completion) -> None:
        """Notify the sink, and release the memory."""
        self.landing = None
        self.view = memoryview(b"")
        self.sink.done(completion)

    def _located_error(self) -> StoreError | None:
        error = self._error
        if error is not None:
            error.operation = error.operation or "GET"
            error.url = error.url or self.context.inner.describe(self.operation.key)
        return error

    def _own_attempt(self, landed_bytes: int) -> Attempt:
        error, began_s = self._error, self._began_s or self.submitted_s
        return Attempt(
            start_s=began_s,
            status=200 if error is None else (error.status or 0),
            offset_bytes=0,
            received_bytes=landed_bytes,
            queued_s=began_s - self.submitted_s,
            total_s=time.monotonic() - began_s,
        )

    def _check(self) -> None:
        if self.cancelled:
            raise CancelledOperationError("cancelled")

    def deliver(self, body: memoryview, start: int) -> None:
        """Copy the wanted bytes of a body that did not land in the view.

        Args:
            body: uint8[n].
            start: Position of its first byte in the object.
        """
        begin, end = max(start, self.wanted.start), min(start + len(body), self.wanted.end)
        if begin < end:
            target = self.view[begin - self.wanted.start : end - self.wanted.start]
            target[:] = body[begin - start : end - start]


class InnerRequest(ABC):
    """A request that a read has sent to the store inside; it is the sink of that request.

    It keeps no reference to its transfer, which refers to it: a cycle would keep the memory of the body.

    Attributes:
        landing: Memory for the body; None until its head has arrived.
        ended: Whether its ``done`` was called.
    """

    __slots__ = ("_read", "ended", "landing")

    def __init__(self, read: CachedRead, landing: Landing | None = None) -> None:
        self._read = read
        self.landing = landing
        self.ended = False

    @abstractmethod
    def submit(self) -> Transfer | None:
        """Send the request; None if that failed at once, and the read with it."""


class BlockFetch(InnerRequest):
    """A request for neighbouring blocks that a read has claimed.

    Args:
        read: The read.
        claims: Numbers of the blocks in ascending order, and their claims.
    """

    __slots__ = ("_claims", "_completion", "_in_place", "_span")

    def __init__(self, read: CachedRead, claims: list[tuple[int, Claim]]) -> None:
        self._claims = claims
        self._span = ByteRange(read.block(claims[0][0]).start, read.block(claims[-1][0]).end)
        self._completion: Completion | None = None
        landing, self._in_place = _landing_of(read, self._span)
        super().__init__(read, landing)

    def submit(self) -> Transfer | None:
        """Send the request; None if that failed at once, and the read with it."""
        read, span = self._read, self._span
        info = read.info
        assert info is not None
        whole = span == (0, info.size_bytes)  # requested without a range: only then does S3 send its checksum
        read.context.counts.fetched_bytes += span.length_bytes
        read.context.counts.miss_count += len(self._claims)
        try:
            return read.context.inner.submit(Get(read.operation.key, None if whole else span, info.etag), self)
        except PenstockError as error:
            self._failed(as_completion_error(error))
            return None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Check that the answer is of the read's version, and return the landing."""
        self._check_version(info)
        landing = self.landing
        assert landing is not None
        landing.offset = landing.start
        return landing

    def done(self, completion: Completion) -> None:
        """Continue on a thread that may write to the disk."""
        self._completion = completion
        self._read.untrack(self)
        self._read.context.run_on_pool(self._arrived, self._failed)

    def _check_version(self, info: ObjectInfo | None) -> None:
        known = self._read.info
        assert known is not None
        if info is None:
            return
        if info.size_bytes != known.size_bytes or info.etag not in (known.etag, None):
            raise ObjectChangedError(
                f"the object is now {info.etag} of {info.size_bytes} bytes, not {known.etag} of {known.size_bytes}"
            )

    def _arrived(self) -> None:
        completion, read = self._completion, self._read
        assert completion is not None
        self._completion = None
        read.add_attempts(completion.attempts)
        body = completion.body
        try:
            if completion.error is not None:
                raise completion.error
            self._check_version(completion.info)
            if len(body) != self._span.length_bytes:
                raise ShortReadError(f"{len(body)} of {self._span.length_bytes} bytes arrived")
        except StoreError as error:
            self._failed(error)
            return
        self._keep(body)
        if not self._in_place:
            read.deliver(body, self._span.start)
        if self._span == read.wanted:
            read.verified = completion.verified
        read.end_pieces(len(self._claims))

    def _keep(self, body: memoryview) -> None:
        """Store the blocks, and give them to the reads that wait for them."""
        read, start = self._read, self._span.start
        assert read.info is not None
        spans = [read.block(index) for index, _ in self._claims]
        pieces = [body[block.start - start : block.end - start] for block in spans]
        blocks = [(index, data) for (index, _), data in zip(self._claims, pieces, strict=True)]
        read.context.directory.write(
            _entries_of(read.context, read.identity, read.digest, blocks, read.info.size_bytes)
        )
        waiting = read.context.claims.release([claim for _, claim in self._claims])
        for waiters, data in zip(waiting, pieces, strict=True):
            for other, index in waiters:
                other.give(index, data)

    def _failed(self, error: Exception) -> None:
        """Fail the read, and the reads that wait for its blocks if the store failed; else they fetch the blocks themselves."""
        read = self._read
        read.untrack(self)
        is_cancelled = isinstance(error, CancelledOperationError)
        for waiters in read.context.claims.release([claim for _, claim in self._claims]):
            for other, index in waiters:
                if is_cancelled or not isinstance(error, StoreError):
                    other.resume((index,), expired=False)
                else:
                    other.fail(error)
        read.fail(error, len(self._claims))


class UnpinnedGet(InnerRequest):
    """The ``Get`` of a version that is not known, passed on as one request, whose answer is stored.

    Args:
        read: The read.
        claim: A claim of the ``Get``, so that other reads of the same bytes wait.
        is_first: Whether the disk had no entry about the key.
    """

    __slots__ = ("_claim", "_completion", "_generation", "_is_first", "_sent_s")

    def __init__(self, read: CachedRead, claim: Claim, *, is_first: bool) -> None:
        super().__init__(read, read.sink.landing)
        self._claim = claim
        self._is_first = is_first
        self._completion: Completion | None = None
        self._generation = 0
        self._sent_s = 0.0

    def submit(self) -> Transfer | None:
        """Send the request; None if that failed at once, and the read with it."""
        self._generation = self._read.context.metadata.generation()
        self._sent_s = time.monotonic()
        try:
            return self._read.context.inner.submit(self._read.operation, self)
        except PenstockError as error:
            self._read.context.claims.free(self._claim)
            self._read.fail(error)
            return None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return the landing that the read's own sink chooses."""
        return self._read.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        """Continue on a thread that may write to the disk, after notifying a reader that does not change the body."""
        read = self._read
        read.untrack(self)
        if completion.error is None and getattr(read.sink, "leaves_body_alone", False) and self._keep_later(completion):
            read.end(completion)
            return
        self._completion = completion
        read.context.run_on_pool(self._arrived, lambda _: self._end())

    def _keep_later(self, completion: Completion) -> bool:
        """Have the body stored after the reader was notified, and let others wait for its blocks; False if that cannot be."""
        info, context, key = completion.info, self._read.context, self._read.operation.key
        if info is None or info.etag is None or not is_version(info.etag):
            return False
        body = completion.body
        _, digest = context.identities.of_version(key, info.etag)
        blocks = self._blocks(completion, body)
        held = context.claims.hold(digest, [index for index, _ in blocks])
        # Only now: others then find these claims.
        context.metadata.put(key, info._replace(key=key), self._sent_s, self._generation)

        def ended() -> None:
            data_of = dict(blocks)
            for waiters in context.claims.release(held):
                for other, index in waiters:
                    other.give(index, data_of[index])
            context.claims.free(self._claim)

        if not context.storing.put(LateEntries(len(body), lambda: self._entries(completion, body), ended)):
            for claim in held:
                context.claims.free(claim)
            return False
        return True

    def _arrived(self) -> None:
        completion, read = self._completion, self._read
        assert completion is not None
        operation, context = read.operation, read.context
        if completion.error is None:
            entries = self._entries(completion, completion.body)
            if entries:
                context.directory.write(entries)
        elif type(completion.error) is ObjectMissingError:
            context.metadata.keep(operation.key, None, self._sent_s, self._generation)
        elif isinstance(completion.error, ObjectChangedError):
            context.metadata.changed(operation.key)
        self._end()

    def _entries(self, completion: Completion, body: memoryview) -> list[NewEntry]:
        """Remember the version of the object, and return what is to be stored: the version, and the blocks of the body."""
        read, info = self._read, completion.info
        context, key = read.context, read.operation.key
        context.counts.miss_count += 1
        context.counts.fetched_bytes += len(body)
        if info is None or info.etag is None or not is_version(info.etag):
            context.counts.uncacheable_count += 1
            return []
        as_hint = read.operation.if_match is None
        entries = context.metadata.entries_of(
            key, info._replace(key=key), self._sent_s, self._generation, as_hint=as_hint, is_first=self._is_first
        )
        identity, digest = context.identities.of_version(key, info.etag)
        blocks = [
            (index, data)
            for index, data in self._blocks(completion, body)
            if not context.directory.exists(block_name(digest, index))
        ]
        return entries + _entries_of(context, identity, digest, blocks, info.size_bytes)

    def _blocks(self, completion: Completion, body: memoryview) -> list[tuple[int, memoryview]]:
        """Return the blocks that the body covers completely, as their numbers and their data."""
        assert completion.info is not None
        start = completion.span.start if completion.span is not None else 0
        block_bytes, end = self._read.context.config.block_bytes, start + len(body)
        blocks: list[tuple[int, memoryview]] = []
        for index in range(-(-start // block_bytes), -(-end // block_bytes)):
            block_end = min((index + 1) * block_bytes, completion.info.size_bytes)
            if block_end <= end:
                blocks.append((index, body[index * block_bytes - start : block_end - start]))
        return blocks

    def _end(self) -> None:
        completion, self._completion = self._completion, None
        assert completion is not None
        self._read.context.claims.free(self._claim)
        self._read.end(completion)


class Revalidation(InnerRequest):
    """A HEAD that asks which version an object has now, for a read whose blocks may be on disk.

    Args:
        read: The read.
    """

    __slots__ = ("_generation", "_sent_s")

    def __init__(self, read: CachedRead) -> None:
        super().__init__(read)
        self._generation = read.context.metadata.generation()
        self._sent_s = time.monotonic()

    def submit(self) -> Transfer | None:
        """Send the request."""
        operation = self._read.operation
        return self._read.context.inner.submit(Head(operation.key, operation.if_match), self)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return None, as the answer has no body."""
        return None

    def done(self, completion: Completion) -> None:
        """Continue on a thread of the pool."""
        self._read.untrack(self)
        self._read.context.run_on_pool(lambda: self._answered(completion), self._read.fail)

    def _answered(self, completion: Completion) -> None:
        read, metadata = self._read, self._read.context.metadata
        key, info = read.operation.key, completion.info
        try:
            read.add_attempts(completion.attempts)
            if type(completion.error) is ObjectMissingError:
                metadata.keep(key, None, self._sent_s, self._generation)
            if completion.error is not None:
                raise completion.error
            assert info is not None
            metadata.keep(key, info._replace(key=key), self._sent_s, self._generation, as_hint=True)
            if is_version(info.etag):
                read.plan(info)
            else:
                read.run()  # its ETag identifies no version any more: start again as if nothing were known
        except Exception as error:
            read.fail(error)


def _entries_of(
    context: CacheContext, identity: bytes, digest: str, blocks: list[tuple[int, memoryview]], object_bytes: int
) -> list[NewEntry]:
    """Return blocks of one object, given as their numbers and their data, as entries to store."""
    sizes = {"object_bytes": object_bytes, "block_bytes": context.config.block_bytes}
    return [
        new_entry(BLOCK, block_name(digest, index), identity, data, block_index=index, **sizes)
        for index, data in blocks
    ]


def _landing_of(read: CachedRead, span: ByteRange) -> tuple[Landing, bool]:
    """Return the landing of a request for `span`, and whether it is the read's own buffer, so that nothing is copied."""
    wanted, outer = read.wanted, read.landing
    assert outer is not None
    if wanted.start <= span.start and span.end <= wanted.end:
        offset = outer.offset + span.start - wanted.start
        direct: Any = (
            outer.direct if span == wanted else None
        )  # its file has one position, so it serves only one request
        return Landing(outer.buffer, offset, offset + span.length_bytes, direct=direct), True
    return Landing(small_buffer(span.length_bytes), 0, span.length_bytes), False
