"""Requests of the store inside on behalf of a ``Read``: for missing blocks, or for the whole ``Get`` as it was asked."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.buffers import small_buffer
from penstock.cache.entry import BLOCK, block_name, encode, header_bytes_of
from penstock.cache.folder import Entry
from penstock.cache.metadata import is_version
from penstock.errors import (
    CancelledOperationError,
    ObjectChangedError,
    ObjectMissingError,
    PenstockError,
    ShortReadError,
    StoreError,
    as_completion_error,
)
from penstock.types import ByteRange, Completion, Get, Head, Landing, ObjectInfo

if TYPE_CHECKING:
    from penstock.cache.cached import Cached
    from penstock.cache.claims import Claim
    from penstock.cache.reading import Read
    from penstock.types import Transfer


class Request(Protocol):
    """What a read has asked of the store inside. It keeps no transfer, which keeps it: a cycle would keep the memory too.

    Attributes:
        ended: Whether its ``done`` was heard.
    """

    ended: bool

    def submit(self) -> Transfer | None:
        """Send it; None where that failed at once, which the read was told then."""


class Fetch:
    """One request for neighbouring blocks that are this read's to fetch: its sink.

    Args:
        read: On whose behalf.
        claims: Block numbers in order, and the claim of each.
    """

    __slots__ = ("_claims", "_completion", "_in_place", "_read", "_span", "ended", "landing")

    def __init__(self, read: Read, claims: list[tuple[int, Claim]]) -> None:
        self._read = read
        self._claims = claims
        self._span = ByteRange(read.block(claims[0][0]).start, read.block(claims[-1][0]).end)
        self._completion: Completion | None = None
        self.landing: Landing | None
        self.landing, self._in_place = _landing_of(read, self._span)
        self.ended = False

    def submit(self) -> Transfer | None:
        """Send it; None where that failed at once, which the read was told then."""
        read, span = self._read, self._span
        info = read.info
        assert info is not None
        whole = span == (0, info.size_bytes)  # asked for without a range: only then does S3 send its checksum
        read.cache.counts.fetched_bytes += span.length_bytes
        read.cache.counts.miss_count += len(self._claims)
        try:
            return read.cache.inner.submit(Get(read.operation.key, None if whole else span, info.etag), self)
        except PenstockError as error:
            self._failed(as_completion_error(error))
            return None

    # ── Sink ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """The answer must be of the version whose blocks these are."""
        self._check_version(info)
        landing = self.landing
        assert landing is not None
        landing.position = landing.start
        return landing

    def done(self, completion: Completion) -> None:
        """On to a thread that may write to the disk."""
        self._completion = completion
        self._read.untrack(self)
        self._read.cache.step(self._arrived, self._failed)

    def _check_version(self, info: ObjectInfo | None) -> None:
        known = self._read.info
        assert known is not None
        if info is None:
            return
        if info.size_bytes != known.size_bytes or info.etag not in (known.etag, None):
            raise ObjectChangedError(
                f"the object is now {info.etag} of {info.size_bytes} bytes, not {known.etag} of {known.size_bytes}"
            )

    # ── on the pool ────────────────────────────────────────────────────────────────────────────────────────────────

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
        read.settle(len(self._claims))

    def _keep(self, body: memoryview) -> None:
        """Store the blocks, and give them to those who wait."""
        read, start = self._read, self._span.start
        assert read.info is not None
        spans = [read.block(index) for index, _ in self._claims]
        pieces = [body[block.start - start : block.end - start] for block in spans]
        blocks = [(index, data) for (index, _), data in zip(self._claims, pieces, strict=True)]
        store_blocks(read.cache, read.identity, read.digest, blocks, read.info.size_bytes)
        waiting = read.cache.claims.release([claim for _, claim in self._claims])
        for waiters, data in zip(waiting, pieces, strict=True):
            for other, index in waiters:
                other.give(index, data)

    def _failed(self, error: Exception) -> None:
        """Who waits hears the store's error too; where only this read gave up, they ask for themselves."""
        read = self._read
        read.untrack(self)
        alone = isinstance(error, CancelledOperationError)
        for waiters in read.cache.claims.release([claim for _, claim in self._claims]):
            for other, index in waiters:
                if alone or not isinstance(error, StoreError):
                    other.resume((index,), expired=False)
                else:
                    other.fail(error)
        read.fail(error, len(self._claims))


class Direct:
    """The ``Get`` as it was asked, of a version that is not known: one request, kept on the way.

    Args:
        read: On whose behalf.
        claim: Of the key, so that others who ask for it wait.
    """

    __slots__ = ("_claim", "_completion", "_read", "_sent_s", "ended", "landing")

    def __init__(self, read: Read, claim: Claim) -> None:
        self._read = read
        self._claim = claim
        self._completion: Completion | None = None
        self._sent_s = 0.0
        self.landing = read.sink.landing
        self.ended = False

    def submit(self) -> Transfer | None:
        """Send it; None where that failed at once, which the read was told then."""
        self._sent_s = time.monotonic()
        try:
            return self._read.cache.inner.submit(self._read.operation, self)
        except PenstockError as error:
            self._read.cache.free(self._claim)
            self._read.fail(error)
            return None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """As the read's own sink says."""
        return self._read.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        """On to a thread that may write to the disk."""
        self._completion = completion
        self._read.untrack(self)
        self._read.cache.step(self._arrived, lambda _: self._end())

    def _arrived(self) -> None:
        completion, read = self._completion, self._read
        assert completion is not None
        operation, cache = read.operation, read.cache
        if completion.error is None:
            self._keep(completion)
        elif type(completion.error) is ObjectMissingError:
            cache.metadata.keep(operation.key, None, self._sent_s)
        elif isinstance(completion.error, ObjectChangedError):
            cache.metadata.changed(operation.key)
        self._end()

    def _keep(self, completion: Completion) -> None:
        """Store the blocks that the body covers, and what it told of the object."""
        read, info, body = self._read, completion.info, completion.body
        cache, key = read.cache, read.operation.key
        cache.counts.miss_count += 1
        cache.counts.fetched_bytes += len(body)
        if info is None or info.etag is None or not is_version(info.etag):
            cache.counts.uncacheable_count += 1
            return
        cache.metadata.keep(key, info._replace(key=key), self._sent_s, as_hint=read.operation.if_match is None)
        identity, digest = cache.identity(key, info.etag)
        start = completion.span.start if completion.span is not None else 0
        block_bytes, end = cache.config.block_bytes, start + len(body)
        blocks: list[tuple[int, memoryview]] = []
        for index in range(-(-start // block_bytes), -(-end // block_bytes)):
            block_end = min((index + 1) * block_bytes, info.size_bytes)
            if block_end <= end and not cache.files.exists(block_name(digest, index)):
                blocks.append((index, body[index * block_bytes - start : block_end - start]))
        store_blocks(cache, identity, digest, blocks, info.size_bytes)

    def _end(self) -> None:
        completion, self._completion = self._completion, None
        assert completion is not None
        self._read.cache.free(self._claim)
        self._read.end(completion)


class Revalidation:
    """A HEAD on behalf of a read whose blocks may be here: which version is it now?

    Args:
        read: On whose behalf.
    """

    __slots__ = ("_read", "_sent_s", "ended", "landing")

    def __init__(self, read: Read) -> None:
        self._read = read
        self._sent_s = time.monotonic()
        self.landing: Landing | None = None
        self.ended = False

    def submit(self) -> Transfer | None:
        """Send it."""
        return self._read.cache.inner.submit(Head(self._read.operation.key), self)

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """A HEAD has no body."""
        return None

    def done(self, completion: Completion) -> None:
        """Go on, on the pool."""
        self._read.untrack(self)
        self._read.cache.step(lambda: self._answered(completion), self._read.fail)

    def _answered(self, completion: Completion) -> None:
        read, metadata = self._read, self._read.cache.metadata
        key, info = read.operation.key, completion.info
        try:
            read.add_attempts(completion.attempts)
            if type(completion.error) is ObjectMissingError:
                metadata.keep(key, None, self._sent_s)
            if completion.error is not None:
                raise completion.error
            assert info is not None
            metadata.keep(key, info._replace(key=key), self._sent_s, as_hint=True)
            if is_version(info.etag):
                read.plan(info)
            else:
                read.run()  # it is no version any more: as if nothing were known
        except Exception as error:
            read.fail(error)


def store_blocks(
    cache: Cached, identity: bytes, digest: str, blocks: list[tuple[int, memoryview]], object_bytes: int
) -> None:
    """Write blocks of one object, each with its number."""
    entries = []
    for index, data in blocks:
        header = partial(
            encode,
            BLOCK,
            identity,
            data,
            block_index=index,
            object_bytes=object_bytes,
            block_bytes=cache.config.block_bytes,
        )
        entries.append(Entry(block_name(digest, index), data, header_bytes_of(identity, len(data)) + len(data), header))
    if entries:
        cache.files.write(entries)


def _landing_of(read: Read, span: ByteRange) -> tuple[Landing, bool]:
    """Where a request for `span` lands, and whether that is the read's own place: then nothing is copied."""
    wanted, outer = read.wanted, read.landing
    assert outer is not None
    if wanted.start <= span.start and span.end <= wanted.end:
        offset = outer.position + span.start - wanted.start
        alone = span == wanted
        direct: Any = outer.direct if alone else None  # its file position is one: not for two requests at a time
        return Landing(outer.buffer, offset, offset + span.length_bytes, direct=direct), True
    return Landing(small_buffer(span.length_bytes), 0, span.length_bytes), False
