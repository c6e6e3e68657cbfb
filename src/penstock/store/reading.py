"""``read``, ``read_many``, ``read_parts``: what ``fetch`` brings, made into blobs and chunks, and held against checksums."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, overload

from penstock.config import FetchConfig, check_whole
from penstock.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    PenstockError,
    ProtocolError,
    SpanError,
    StoreError,
)
from penstock.fetch import Budget, Chunk, ObjectRead, PartRequest, PlanItem, ReadAhead, Request
from penstock.store import checksums
from penstock.tracebacks import boundary
from penstock.types import Blob, ByteRange, Core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from penstock.fetch.plan import Cut
    from penstock.store.checksums import Hasher
    from penstock.types import Key, ObjectInfo


class Readable(Core, Protocol):
    """What reading needs of a store.

    Attributes:
        fetch_config: How it reads; None means ``FetchConfig()``.
    """

    fetch_config: FetchConfig | None

    @property
    def budget(self) -> Budget:
        """The byte budget that reading is charged to."""


def read(store: Readable, key: Key, span: ByteRange | None) -> Blob:
    """See ``Store.read``."""
    blobs = _Blobs(store, [(key, span)] if span is not None else [key], ordered=True, raises=True)
    try:
        blob = next(blobs)
        assert isinstance(blob, Blob)
        return blob
    finally:
        blobs.close()


@overload
def read_many(
    store: Readable, requests: Iterable[Request], *, ordered: bool, errors: Literal["raise"]
) -> Iterator[Blob]: ...
@overload
def read_many(
    store: Readable, requests: Iterable[Request], *, ordered: bool, errors: Literal["return"]
) -> Iterator[Blob | StoreError]: ...
def read_many(
    store: Readable, requests: Iterable[Request], *, ordered: bool, errors: Literal["raise", "return"]
) -> Iterator[Blob] | Iterator[Blob | StoreError]:
    """See ``Store.read_many`` and ``Store.try_read_many``."""
    _check_iterable("read_many", requests)
    return _Blobs(store, requests, ordered=ordered, raises=errors == "raise")


def read_parts(
    store: Readable, requests: Iterable[Request], *, part_bytes: int | None, requests_max: int | None
) -> Iterator[Chunk]:
    """See ``Store.read_parts``."""
    _check_iterable("read_parts", requests)
    config = store.fetch_config or FetchConfig()
    if part_bytes is not None:
        config = dataclasses.replace(config, part_bytes=part_bytes)
    if requests_max is not None:
        check_whole("requests_max", requests_max, 1)
        config = dataclasses.replace(
            config, requests_max=requests_max, requests_min=min(config.requests_min, requests_max)
        )
    return _Chunks(store, requests, config)


def _check_iterable(method: str, requests: object) -> None:
    if isinstance(requests, str | bytes) or not hasattr(requests, "__iter__"):
        raise ConfigError(
            f"{method} takes an iterable of keys, not one {type(requests).__name__}", hint="read() takes one key"
        )


@boundary
class _Blobs:
    """Iterator of blobs over a ``ReadAhead``; dropping it cancels what is in flight."""

    def __init__(
        self, store: Readable, requests: Iterable[Request], *, ordered: bool, raises: bool, again: bool = True
    ) -> None:
        self._store = store
        self._again = again  # what does not have its checksum is read once more
        self._budget = store.budget
        self._ordered = ordered
        self._raises = raises
        self._ready: deque[Blob | StoreError] = deque()
        config = store.fetch_config or FetchConfig()
        self._ahead = ReadAhead(store, requests, config=config, budget=self._budget, whole=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Blob | StoreError:
        if self._ready:
            result = self._ready.popleft()
        else:
            try:
                item = self._ahead.wait_item(ordered=self._ordered)
            except BaseException:
                self.close()
                raise
            if item is None:
                self.close()
                raise StopIteration
            self._ready.extend(self._answers(item))
            result = self._ready.popleft()
        if isinstance(result, StoreError) and self._raises:
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Cancel the rest; idempotent."""
        self._ready.clear()
        self._ahead.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):  # not so where the requests could not be iterated
            self._ahead.close()

    def statistics(self) -> object:
        """``FetchStatistics`` of this reading."""
        return self._ahead.statistics()

    def _answers(self, item: ObjectRead) -> list[Blob | StoreError]:
        """One answer for each request that the item stands for: its bytes, or its error."""
        plan = item.plan
        try:
            if item.error is not None:
                raise item.error
            info = item.info
            assert info is not None
            data, verified = self._bytes_of(item, info)
        except ClosedError:
            self.close()
            raise
        except StoreError as error:
            merged = [plan._replace(request_index=cut.request_index, span=cut.span) for cut in plan.cuts]
            return [_error_of(error, self._store, request) for request in merged or [plan]]
        except PenstockError:
            self.close()
            raise
        if plan.cuts:
            return [self._cut(plan, info, data, cut) for cut in plan.cuts]
        blob = Blob(
            data, key=plan.key, span=plan.span, etag=info.etag, request_index=plan.request_index, verified=verified
        )
        return [blob]

    def _bytes_of(self, item: ObjectRead, info: ObjectInfo) -> tuple[memoryview, str]:
        """The item's bytes, now the caller's, and what they were held against."""
        completion, part = item.slots[0].completion, item.slots[0].buffer
        received_bytes = 0
        for slot in item.slots:
            received_bytes += len(slot.completion.body) if slot.completion is not None else 0
            self._ahead.release(slot)
            slot.completion = slot.landing = slot.buffer = None  # the blob alone keeps its memory
        item.slots = []  # nor is a cycle left for the collector
        if item.buffer is None:
            assert completion is not None
            if part is not None:
                self._budget.disown(part)
            return completion.body, completion.verified
        buffer, item.buffer = item.buffer, None
        self._budget.disown(buffer)
        span = item.span()
        assert span is not None
        if received_bytes != span.length_bytes:
            raise ProtocolError(f"the parts have {received_bytes} of {span.length_bytes} bytes")
        data = buffer.view[: span.length_bytes]
        if span.length_bytes != info.size_bytes:
            return data, "length"
        try:
            return data, checksums.verify(info.checksums, data)
        except ChecksumError:
            if not self._again:
                raise
        del data, buffer  # nobody can tell which of the parts is damaged: all of them, into memory used again
        return self._read_again(item, info)

    def _read_again(self, item: ObjectRead, info: ObjectInfo) -> tuple[memoryview, str]:
        wanted = item.plan._replace(etag=info.etag, size_bytes=info.size_bytes)
        blobs = _Blobs(self._store, [wanted], ordered=True, raises=True, again=False)
        try:
            blob = next(blobs)
            assert isinstance(blob, Blob)
            return blob.data, blob.verified
        finally:
            blobs.close()

    def _cut(self, plan: PlanItem, info: ObjectInfo, data: memoryview, cut: Cut) -> Blob | StoreError:
        index, span = cut
        assert plan.span is not None
        try:
            span.within(info.size_bytes)
        except SpanError as error:
            return _error_of(error, self._store, plan._replace(request_index=index, span=span))
        piece = data[span.start - plan.span.start : span.end - plan.span.start]
        return Blob(piece, key=plan.key, span=span, etag=info.etag, request_index=index, verified="length")


@boundary
class _Chunks:
    """Iterator of chunks over a ``ReadAhead``."""

    def __init__(self, store: Readable, requests: Iterable[Request], config: FetchConfig) -> None:
        self._store = store
        self._hashed_item: ObjectRead | None = None
        self._hasher: tuple[str, Hasher] | None = None
        self._delivered: PartRequest | None = None
        self._ahead = ReadAhead(store, requests, config=config, budget=store.budget, whole=False)
        self._ahead.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            if self._delivered is not None:
                self._ahead.release(self._delivered)
                self._delivered = None
            found = self._ahead.wait_slot()
            if found is None:
                raise StopIteration
            return self._chunk(*found)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the rest; idempotent."""
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            self._ahead.release(delivered)
        self._ahead.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):  # not so where the requests could not be iterated
            self.close()

    def statistics(self) -> object:
        """``FetchStatistics`` of this reading."""
        return self._ahead.statistics()

    def _chunk(self, item: ObjectRead, slot: PartRequest | None) -> Chunk:
        if item.error is not None:
            raise self._error_of(item, item.error)
        info, completion = item.info, slot.completion if slot is not None else None
        assert slot is not None and info is not None and completion is not None  # noqa: PT018 - no error: an answer
        self._delivered = slot
        last = item.delivered_count == len(item.slots)
        data = completion.body
        slot.completion = slot.landing = slot.buffer = None  # the chunk alone keeps its memory
        if len(item.slots) > 1 and item.plan.span is None:
            self._hash(item, info, data, last=last)
        plan = item.plan
        return Chunk(plan.request_index, plan.key, slot.start, data, last, info.etag)

    def _hash(self, item: ObjectRead, info: ObjectInfo, data: memoryview, *, last: bool) -> None:
        if self._hashed_item is not item:
            self._hashed_item = item
            self._hasher = checksums.choose(info.checksums)
        if self._hasher is None:
            return
        name, hasher = self._hasher
        hasher.update(data)
        if last:
            try:
                checksums.check(name, hasher, info.checksums[name])
            except StoreError as error:
                raise self._error_of(item, error) from None

    def _error_of(self, item: ObjectRead, error: PenstockError) -> PenstockError:
        return _error_of(error, self._store, item.plan) if isinstance(error, StoreError) else error


def _error_of(error: StoreError, store: Readable, request: PlanItem) -> StoreError:
    """`error` as the answer to one request: a copy of its own, for requests that were merged fail together."""
    own = copy.copy(error)
    own.errno, own.__cause__ = error.errno, error.__cause__  # which pickling, and so copying, leaves out
    own.request_index = request.request_index
    own.url, own.operation = own.url or store.describe(request.key), own.operation or "GET"
    if request.span is not None:
        own.span = (request.span.start, request.span.end)
    return own
