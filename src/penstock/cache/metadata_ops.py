"""Operations that read or change metadata: the cache may answer stats and listings, and writes invalidate its metadata."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.cache.entry import block_name
from penstock.cache.metadata import REMEMBERED_MISS
from penstock.errors import CancelledOperationError, ObjectMissingError, PenstockError, as_completion_error
from penstock.store.base import OperationRelay
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

    from penstock.cache.context import CacheContext
    from penstock.types import Key, Operation, Sink


class _PassedOperation(OperationRelay["CacheContext"], ABC):
    """An operation that is passed on to the store inside. It is the caller's transfer and the store's sink at once.

    Attributes:
        ended: Whether the operation has ended in the store inside.
        submitted_s: When the caller submitted it, as ``time.monotonic()`` tells.
        sent_s: When it was sent to the store inside.
    """

    __slots__ = ("ended", "sent_s", "submitted_s")

    def __init__(self, context: CacheContext, operation: Operation, sink: Sink) -> None:
        super().__init__(context, operation, sink)
        self.ended = False
        self.submitted_s = self.sent_s = time.monotonic()

    def unanswered_s(self) -> float:
        """Return 0, as hedging takes place inside the cache."""
        return 0.0

    def send(self) -> None:
        """Submit the operation to the store inside."""
        self.sent_s = time.monotonic()
        transfer = self.owner.inner.submit(self.operation, self)
        self.transfer = None if self.ended else transfer  # no reference cycle remains, which would keep a write's body
        if self.cancelled:
            transfer.cancel()

    def done(self, completion: Completion) -> None:
        self.ended = True
        self.transfer = None
        self.owner.run_on_pool(lambda: self._end(completion), lambda _: self.sink.done(completion))

    def _end(self, completion: Completion) -> None:
        self.learn(completion)
        self.sink.done(completion)

    @abstractmethod
    def learn(self, completion: Completion) -> None:
        """Take note of the result; called on a thread of the pool."""


class MetadataQuery(_PassedOperation):
    """A ``Head`` or ``ListPage``, which the cache answers if it can, and otherwise passes on and remembers."""

    __slots__ = ("_generation",)

    def __init__(self, context: CacheContext, operation: Head | ListPage, sink: Sink) -> None:
        super().__init__(context, operation, sink)
        self._generation = 0

    def may_be_known(self) -> bool:
        """Whether it is worth looking for the answer in the cache."""
        return self.owner.config.metadata_ttl_s > 0 or (
            isinstance(self.operation, Head) and self.operation.etag is not None
        )

    def run(self) -> None:
        """Answer from the cache, or pass the operation on."""
        operation = self.operation
        try:
            if self.cancelled:
                raise CancelledOperationError("cancelled")
            completion = self._known_answer()
            if completion is None:
                self._generation = self.owner.metadata.generation()
                self.send()
                return
            self.owner.counts.metadata_hit_count += 1
        except PenstockError as error:
            completion = Completion(operation, error=as_completion_error(error))
        self.sink.done(completion)

    def _known_answer(self) -> Completion | None:
        operation, metadata = self.operation, self.owner.metadata
        completion = Completion(operation)
        if isinstance(operation, ListPage):
            completion.value = metadata.page(operation)
            return completion if completion.value is not None else None
        assert isinstance(operation, Head)
        completion.info = self._pinned_info(operation)
        if completion.info is None:
            known = metadata.fresh_or_hint(operation.key, self.submitted_s)[0]
            if known is None or (operation.headers and known.info is not None and not known.info.headers):
                return None
            completion.info = known.info
            if known.info is None:
                url = self.owner.inner.describe(operation.key)
                completion.error = ObjectMissingError(REMEMBERED_MISS, status=404, operation="HEAD", url=url)
        return completion

    def _pinned_info(self, operation: Head) -> ObjectInfo | None:
        """Return the size of the version that the operation names, if its blocks are in the cache.

        Read-ahead names the version that it reads, and sends a HEAD for its checksum. It does not need it here: the blocks
        were compared with the store's checksum when they were fetched, and the size of a version never changes.
        """
        key, etag, size_bytes, _ = operation
        if etag is None or size_bytes is None:
            return None
        _, digest = self.owner.identities.of_version(key, etag)
        last = max(0, size_bytes - 1) // self.owner.config.block_bytes
        exist = all(self.owner.directory.exists(block_name(digest, index)) for index in (0, last))
        return ObjectInfo(key, size_bytes, etag) if exist else None

    def learn(self, completion: Completion) -> None:
        """Remember the answer."""
        operation, metadata = self.operation, self.owner.metadata
        if isinstance(operation, ListPage):
            if completion.error is None:
                metadata.keep_page(operation, completion.value, self.sent_s, self._generation)
            return
        assert isinstance(operation, Head)
        if type(completion.error) is ObjectMissingError:
            metadata.keep(operation.key, None, self.sent_s, self._generation)
        elif completion.error is None and completion.info is not None:
            info = completion.info._replace(key=operation.key)
            metadata.keep(operation.key, info, self.sent_s, self._generation)


class WriteThrough(_PassedOperation):
    """An operation that creates, replaces or removes objects, after which earlier metadata of them is not valid."""

    __slots__ = ()

    def start(self) -> None:
        """Forget the objects and pass the operation on."""
        for key in self._keys():
            self.owner.metadata.forget(key)
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
        """Invalidate the objects, even after a failure: the store may have written although its answer was lost."""
        for key in self._keys():
            self.owner.metadata.written(key)


WRITES = (Put, CompleteMultipart, Copy, Delete)
