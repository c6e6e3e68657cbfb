"""What is not a ``Get`` through the cache: stats and listings, which it may answer, and writes, which end what it knew."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.cache.entry import block_name
from penstock.errors import CancelledOperationError, ObjectMissingError, PenstockError, as_completion_error
from penstock.fetch.requests import HeadRequest
from penstock.types import (
    CompleteMultipart,
    Completion,
    Copy,
    Delete,
    Head,
    ListPage,
    ObjectInfo,
    Put,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.cached import Cached
    from penstock.types import ByteRange, Key, Landing, Operation, Sink, Transfer


class _Passing(ABC):
    """An operation that goes to the store inside, and whose end is taken in on the pool: transfer and sink at once."""

    __slots__ = ("cache", "cancelled", "ended", "landing", "operation", "sent_s", "sink", "submitted_s", "transfer")

    def __init__(self, cache: Cached, operation: Operation, sink: Sink) -> None:
        self.cache = cache
        self.operation = operation
        self.sink = sink
        self.landing = sink.landing
        self.transfer: Transfer | None = None
        self.cancelled = self.ended = False
        self.submitted_s = self.sent_s = time.monotonic()

    def cancel(self) -> None:
        self.cancelled = True
        if self.transfer is not None:
            self.transfer.cancel()

    def unanswered_s(self) -> float:
        return 0.0

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        return self.sink.head(info, span)

    def send(self) -> None:
        """Ask the store inside."""
        self.sent_s = time.monotonic()
        transfer = self.cache.inner.submit(self.operation, self)
        self.transfer = None if self.ended else transfer  # no cycle is left behind: it would keep a write's body
        if self.cancelled:
            transfer.cancel()

    def done(self, completion: Completion) -> None:
        self.ended = True
        self.transfer = None
        self.cache.step(lambda: self._end(completion), lambda _: self.sink.done(completion))

    def _end(self, completion: Completion) -> None:
        self.learn(completion)
        self.sink.done(completion)

    @abstractmethod
    def learn(self, completion: Completion) -> None:
        """Take in how it ended."""


class Question(_Passing):
    """A ``Head`` or ``ListPage``: answered from what is known, or asked and kept."""

    __slots__ = ("_generation",)

    def __init__(self, cache: Cached, operation: Head | ListPage, sink: Sink) -> None:
        super().__init__(cache, operation, sink)
        self._generation = 0

    def may_be_answered(self) -> bool:
        """Whether a look at what is known can be worth it."""
        return self.cache.config.metadata_ttl_s > 0 or isinstance(self.sink, HeadRequest)

    def run(self) -> None:
        """Look at what is known, else ask."""
        operation = self.operation
        try:
            if self.cancelled:
                raise CancelledOperationError("cancelled")
            completion = self._answer()
            if completion is None:
                self._generation = self.cache.metadata.generation()
                self.send()
                return
            self.cache.counts.metadata_hit_count += 1
        except PenstockError as error:
            completion = Completion(operation, error=as_completion_error(error))
        self.sink.done(completion)

    def _answer(self) -> Completion | None:
        operation, metadata = self.operation, self.cache.metadata
        completion = Completion(operation)
        if isinstance(operation, ListPage):
            completion.value = metadata.page(operation)
            return completion if completion.value is not None else None
        assert isinstance(operation, Head)
        completion.info = self._of_pinned(operation.key)
        if completion.info is None:
            known = metadata.fresh(operation.key, self.submitted_s)
            if known is None:
                return None
            completion.info = known.info
            if known.info is None:
                url = self.cache.describe(operation.key)
                text = "no such object, as was found before"
                completion.error = ObjectMissingError(text, status=404, operation="HEAD", url=url)
        return completion

    def _of_pinned(self, key: Key) -> ObjectInfo | None:
        """For reading ahead, which asks for the checksum of a version that it pinned: needless where the blocks are here.

        What is kept was held against the store's word when it was fetched; a version's size never changes.
        """
        item = self.sink.item if isinstance(self.sink, HeadRequest) else None
        etag, size_bytes = (item.etag, item.size_bytes) if item is not None else (None, None)
        if etag is None or size_bytes is None:
            return None
        _, digest = self.cache.identity(key, etag)
        last = max(0, size_bytes - 1) // self.cache.config.block_bytes
        there = all(self.cache.files.exists(block_name(digest, index)) for index in (0, last))
        return ObjectInfo(key, size_bytes, etag) if there else None

    def learn(self, completion: Completion) -> None:
        """Keep the answer."""
        operation, metadata = self.operation, self.cache.metadata
        if isinstance(operation, ListPage):
            if completion.error is None:
                metadata.keep_page(operation, completion.value, self.sent_s, self._generation)
            return
        assert isinstance(operation, Head)
        if type(completion.error) is ObjectMissingError:
            metadata.keep(operation.key, None, self.sent_s)
        elif completion.error is None and completion.info is not None:
            metadata.keep(operation.key, completion.info._replace(key=operation.key), self.sent_s)


class Writing(_Passing):
    """An operation that makes, replaces or removes objects: what was known of them holds no longer."""

    __slots__ = ()

    def start(self) -> None:
        """Send it."""
        for key in self._keys():
            self.cache.metadata.forget(key)
        self.send()

    def _keys(self) -> Sequence[Key]:
        operation = self.operation
        if isinstance(operation, Delete):
            return operation.keys
        if isinstance(operation, Copy):
            return (operation.target,)
        assert isinstance(operation, (Put, CompleteMultipart))
        return (operation.key,)

    def learn(self, completion: Completion) -> None:
        """Also where it failed: an answer that was lost may have written."""
        for key in self._keys():
            self.cache.metadata.written(key)


WRITES = (Put, CompleteMultipart, Copy, Delete)
