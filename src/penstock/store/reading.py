"""``read``, ``read_many`` and ``read_parts``: what ``fetch`` delivers becomes blobs and chunks, checked against checksums."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, overload

from penstock.checksums import algorithms as checksums
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
from penstock.fetch import Budget, ObjectRead, PartRequest, PlanItem, ReadAhead, Request, SingleRead
from penstock.fetch.plan import as_item
from penstock.memory.file_landings import FileLanding
from penstock.system.tracebacks import boundary
from penstock.types import Blob, ByteRange, Chunk, Core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from penstock.checksums.algorithms import Hasher
    from penstock.fetch import FetchStatistics
    from penstock.fetch.plan import Cut
    from penstock.types import Key, ObjectInfo


class Readable(Core, Protocol):
    """What reading needs of a store.

    Attributes:
        fetch_config: Sizes of parts and bounds of requests; None means ``FetchConfig()``.
    """

    fetch_config: FetchConfig | None

    @property
    def budget(self) -> Budget:
        """The byte budget that reading is charged to."""


def read(store: Readable, key: Key, span: ByteRange | None) -> Blob:
    """Read one object or range; see ``Store.read``."""
    return _read_one(store, as_item((key, span) if span is not None else key, 0))


def _read_one(store: Readable, item: PlanItem, *, again: bool = True) -> Blob:
    config, budget = store.fetch_config or FetchConfig(), store.budget
    reader: SingleRead | ReadAhead
    if SingleRead.fits(item, config=config, budget=budget):
        reader = SingleRead(store, item, config=config, budget=budget)
    else:
        reader = ReadAhead(store, [item], config=config, budget=budget, whole=True)
    try:
        finished = reader.wait_read()
        assert finished is not None
        (answer,) = _answers(store, finished, reader, again=again)
    finally:
        reader.close()
    if isinstance(answer, StoreError):
        raise answer
    return answer


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
    """Read many objects or ranges; see ``Store.read_many`` and ``Store.try_read_many``."""
    check_iterable("read_many", requests)
    return _Blobs(store, requests, ordered=ordered, raises=errors == "raise")


def read_parts(
    store: Readable, requests: Iterable[Request], *, part_bytes: int | None = None, requests_max: int | None = None
) -> Iterator[Chunk]:
    """Stream objects or ranges of any size; see ``Store.read_parts``."""
    check_iterable("read_parts", requests)
    config = store.fetch_config or FetchConfig()
    if part_bytes is not None:
        config = dataclasses.replace(config, part_bytes=part_bytes)
    if requests_max is not None:
        check_whole("requests_max", requests_max, 1)
        config = dataclasses.replace(
            config, requests_max=requests_max, requests_min=min(config.requests_min, requests_max)
        )
    return _Chunks(store, requests, config)


def check_iterable(method: str, requests: object) -> None:
    """Refuse what is not an iterable of requests; raises ``ConfigError``."""
    if isinstance(requests, str | bytes) or not hasattr(requests, "__iter__"):
        raise ConfigError(
            f"{method} takes an iterable of keys, not one {type(requests).__name__}", hint="read() takes one key"
        )


@boundary
class _Blobs:
    """Iterator of blobs over a ``ReadAhead``; dropping it cancels what is in flight."""

    def __init__(self, store: Readable, requests: Iterable[Request], *, ordered: bool, raises: bool) -> None:
        self._store = store
        self._ordered = ordered
        self._raises = raises
        self._ready: deque[Blob | StoreError] = deque()
        config = store.fetch_config or FetchConfig()
        self._ahead = ReadAhead(store, requests, config=config, budget=store.budget, whole=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Blob | StoreError:
        if not self._ready:
            try:
                finished = self._ahead.wait_read(ordered=self._ordered)
                if finished is None:
                    raise StopIteration
                self._ready.extend(_answers(self._store, finished, self._ahead, again=True))
            except BaseException:
                self.close()
                raise
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
        if hasattr(self, "_ahead"):  # it is missing if the requests could not be iterated
            self._ahead.close()

    def statistics(self) -> FetchStatistics:
        """What was read so far."""
        return self._ahead.statistics()


# ── from a finished read to blobs ───────────────────────────────────────────────────────────────────────────────────


def _answers(
    store: Readable, finished: ObjectRead, reader: SingleRead | ReadAhead, *, again: bool
) -> list[Blob | StoreError]:
    """One answer for each request that a finished read stands for: its bytes or its error.

    Args:
        store: The store that was read.
        finished: The read.
        reader: The reader that it comes from, which releases what was reserved.
        again: Whether an object that does not have its checksum is read once more.

    Raises:
        ClosedError: The store was closed, which ends all of the reading.
        PenstockError: Any error that is not a ``StoreError``.
    """
    item = finished.item
    try:
        if finished.error is not None:
            raise finished.error
        info = finished.info
        assert info is not None
        data, verified = bytes_of_read(store, finished, info, reader, again=again)
    except ClosedError:
        raise
    except StoreError as error:
        merged = [item._replace(request_index=cut.request_index, span=cut.span) for cut in item.cuts]
        return [error_of(error, store, request) for request in merged or [item]]
    if item.cuts:
        return [_cut(store, item, info, data, cut) for cut in item.cuts]
    blob = Blob(data, key=item.key, span=item.span, etag=info.etag, request_index=item.request_index, verified=verified)
    return [blob]


def bytes_of_read(
    store: Readable, finished: ObjectRead, info: ObjectInfo, reader: SingleRead | ReadAhead, *, again: bool
) -> tuple[memoryview, str]:
    """The bytes of a read, which the caller owns from now on, and the checksum that they were checked against."""
    completion, own_buffer = finished.parts[0].completion, finished.parts[0].buffer
    received_bytes = 0
    for part in finished.parts:
        received_bytes += len(part.completion.body) if part.completion is not None else 0
        reader.release(part)
        part.completion = part.landing = part.buffer = None  # the blob alone keeps its memory
    finished.parts = []  # no cycle is left for the collector
    if finished.buffer is None:
        assert completion is not None
        if own_buffer is not None:
            reader.budget.disown(own_buffer)
        return completion.body, completion.verified
    buffer, finished.buffer = finished.buffer, None
    reader.budget.disown(buffer)
    span = finished.span()
    assert span is not None
    if received_bytes != span.length_bytes:
        raise ProtocolError(f"the parts have {received_bytes} of {span.length_bytes} bytes")
    data = buffer.view[: span.length_bytes]
    if span.length_bytes != info.size_bytes:
        return data, "length"
    try:
        return data, checksums.verify(info.checksums, data)
    except ChecksumError:
        if not again:
            raise
    del data, buffer  # which part is damaged is unknown, so all of them are read again, into the same memory
    wanted = finished.item._replace(etag=info.etag, size_bytes=info.size_bytes)
    blob = _read_one(store, wanted, again=False)
    return blob.data, blob.verified


def _cut(store: Readable, plan: PlanItem, info: ObjectInfo, data: memoryview, cut: Cut) -> Blob | StoreError:
    """The answer to one of several requests that were merged into one read."""
    index, span, _ = cut
    assert plan.span is not None
    try:
        span.within(info.size_bytes)
    except SpanError as error:
        return error_of(error, store, plan._replace(request_index=index, span=span))
    piece = data[span.start - plan.span.start : span.end - plan.span.start]
    return Blob(piece, key=plan.key, span=span, etag=info.etag, request_index=index, verified="length")


@boundary
class _Chunks:
    """Iterator of chunks over a ``ReadAhead``; dropping it cancels what is in flight."""

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
            found = self._ahead.wait_part()
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
        if hasattr(self, "_ahead"):  # it is missing if the requests could not be iterated
            self.close()

    def statistics(self) -> FetchStatistics:
        """What was read so far."""
        return self._ahead.statistics()

    def _chunk(self, read: ObjectRead, part: PartRequest | None) -> Chunk:
        if read.error is not None:
            raise self._error_of(read, read.error)
        info, completion = read.info, part.completion if part is not None else None
        assert part is not None and info is not None and completion is not None  # noqa: PT018 - no error: an answer
        self._delivered = part
        last = read.delivered_count == len(read.parts)
        data, in_file = completion.body, type(completion.landing) is FileLanding
        part.completion = part.landing = part.buffer = None  # the chunk alone keeps its memory
        if len(read.parts) > 1 and read.item.span is None:
            self._hash(read, info, data, last=last)
        item = read.item
        return Chunk(item.request_index, item.key, part.start, data, last, info.etag, in_file)

    def _hash(self, read: ObjectRead, info: ObjectInfo, data: memoryview, *, last: bool) -> None:
        if self._hashed_item is not read:
            self._hashed_item = read
            self._hasher = checksums.choose(info.checksums)
        if self._hasher is None:
            return
        name, hasher = self._hasher
        hasher.update(data)
        if last:
            try:
                checksums.check(name, hasher, info.checksums[name])
            except StoreError as error:
                raise self._error_of(read, error) from None

    def _error_of(self, read: ObjectRead, error: PenstockError) -> PenstockError:
        return error_of(error, self._store, read.item) if isinstance(error, StoreError) else error


def error_of(error: StoreError, store: Readable, request: PlanItem) -> StoreError:
    """Return a copy of `error` as the answer to one request; requests that were merged fail together, each with its own."""
    own = copy.copy(error)
    own.errno, own.__cause__ = error.errno, error.__cause__  # pickling leaves them out, and so does copying
    own.request_index = request.request_index
    own.url, own.operation = own.url or store.describe(request.key), own.operation or "GET"
    if request.span is not None:
        own.span = (request.span.start, request.span.end)
    return own
