"""``read``, ``read_many`` and ``read_parts``: turn the bytes from ``fetch`` into blobs and parts, and compare checksums.

``read_into`` has the bodies of many ranges land directly in the caller's memory. A program that loads tensors already has
memory for them: a read that returned other memory would need a copy and, for a moment, twice the memory.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, overload

from penstock.checksums import algorithms as checksums
from penstock.config import FetchConfig, check_whole
from penstock.errors import (
    DEFECT_HINT,
    ChecksumError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    PenstockError,
    ProtocolError,
    SpanError,
    StoreError,
)
from penstock.fetch import Budget, ObjectRead, PartRequest, PlanItem, ReadAhead, Request, SingleRead
from penstock.fetch.plan import BufferTarget, as_item
from penstock.memory.buffers import writable_byte_view
from penstock.memory.file_landings import FileLanding
from penstock.system.tracebacks import boundary
from penstock.types import Blob, ByteRange, Chunk, Core, Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from penstock.checksums.algorithms import Hasher
    from penstock.fetch import FetchStatistics
    from penstock.fetch.plan import Cut
    from penstock.types import ObjectInfo


class Readable(Core, Protocol):
    """The part of a store that reading needs.

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
    """Refuse arguments that are not iterables of requests; raises ``ConfigError``."""
    if isinstance(requests, str | bytes) or not hasattr(requests, "__iter__"):
        raise ConfigError(
            f"{method} takes an iterable of keys, not one {type(requests).__name__}", hint="read() takes one key"
        )


@boundary
class _Iterator:
    """An iterator over a ``ReadAhead``; dropping it cancels the requests in flight."""

    _ahead: ReadAhead

    def __iter__(self) -> Self:
        return self

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):  # it is missing if the requests could not be iterated
            self._ahead.close()

    def statistics(self) -> FetchStatistics:
        """Statistics so far."""
        return self._ahead.statistics()


@boundary
class _Blobs(_Iterator):
    """Iterator of blobs."""

    def __init__(self, store: Readable, requests: Iterable[Request], *, ordered: bool, raises: bool) -> None:
        self._store = store
        self._ordered = ordered
        self._raises = raises
        self._ready: deque[Blob | StoreError] = deque()
        config = store.fetch_config or FetchConfig()
        self._ahead = ReadAhead(store, requests, config=config, budget=store.budget, whole=True)

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


# ── from a finished read to blobs ───────────────────────────────────────────────────────────────────────────────────


def _answers(
    store: Readable, finished: ObjectRead, reader: SingleRead | ReadAhead, *, again: bool
) -> list[Blob | StoreError]:
    """One answer for each request that a finished read stands for: its bytes or its error.

    Args:
        store: The store that was read.
        finished: The read.
        reader: The reader that it comes from, which releases the reserved bytes.
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
        part.completion = part.landing = part.buffer = None  # only the blob keeps its memory
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
class _Chunks(_Iterator):
    """Iterator of chunks."""

    def __init__(self, store: Readable, requests: Iterable[Request], config: FetchConfig) -> None:
        self._store = store
        self._hashed_item: ObjectRead | None = None
        self._hasher: tuple[str, Hasher] | None = None
        self._delivered: PartRequest | None = None
        self._ahead = ReadAhead(store, requests, config=config, budget=store.budget, whole=False)
        self._ahead.start()

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
        if hasattr(self, "_ahead"):
            self.close()

    def _chunk(self, read: ObjectRead, part: PartRequest | None) -> Chunk:
        if read.error is not None:
            raise self._error_of(read, read.error)
        info, completion = read.info, part.completion if part is not None else None
        assert part is not None and info is not None and completion is not None  # noqa: PT018 - no error: an answer
        self._delivered = part
        last = read.delivered_count == len(read.parts)
        data, in_file = completion.body, type(completion.landing) is FileLanding
        part.completion = part.landing = part.buffer = None  # only the chunk keeps its memory
        if len(read.parts) > 1 and read.item.span is None:
            self._hash(read, info, data, last=last)
        item = read.item
        return Chunk(item.request_index, item.key, part.start, data, last, info.etag, in_file, info)

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


# ── into the caller's memory ──────────────────────────────────────────────────────────────────────────────────────────────


IntoRequest: TypeAlias = tuple[Key, ByteRange | None, Any] | tuple[PlanItem, Any]
"""A key, a range or None for the whole object, and a writable buffer; or an item, which may name a version, and a buffer."""

_CLOSE_S_MAX = 60.0
"""Seconds that ``close`` waits for cancelled requests. They end as soon as the store's threads look at them; only a thread
that is stuck in the system, for example in a file system that no longer answers, takes longer."""
_FINALISER_S_MAX = 1.0
"""Seconds that a finaliser waits for cancelled requests: it may run inside code whose lock they need to end."""


def read_into(store: Readable, requests: Iterable[IntoRequest]) -> ReadInto:
    """Read objects or ranges into the caller's memory; see ``Store.read_into``."""
    check_iterable("read_into", requests)
    return ReadInto(store, requests)


@boundary
class ReadInto(_Iterator):
    """Iterator over the indexes of requests whose bytes have arrived; ``Store.read_into`` returns it. For one thread.

    Use it as a context manager, or call ``close()``, if it might not be exhausted.
    """

    def __init__(self, store: Readable, requests: Iterable[IntoRequest], *, again: bool = True) -> None:
        self._store = store
        self._again = again  # whether an object that does not have its checksum is read once more
        self._ready: deque[int] = deque()
        self._consumer = threading.get_ident()
        config = store.fetch_config or FetchConfig()
        self._ahead = ReadAhead(store, _items(requests), config=config, budget=store.budget, whole=True)

    def __next__(self) -> int:
        if not self._ready:
            try:
                self._consumer = threading.get_ident()
                finished = self._ahead.wait_read(ordered=False)
                if finished is None:
                    raise StopIteration
                self._ready.extend(self._landed(finished))
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the rest, and wait until nothing writes to any buffer any more. Idempotent.

        Raises:
            StoreError: A cancelled request did not end.
        """
        self._ready.clear()
        self._ahead.close()
        if not self._ahead.join(_CLOSE_S_MAX):
            raise StoreError(
                f"cancelled requests have not ended within {_CLOSE_S_MAX:.0f} s, and may still write to their buffers",
                hint=DEFECT_HINT,
                retryable=False,
            )

    def __del__(self) -> None:
        super().__del__()
        if hasattr(self, "_ahead") and threading.get_ident() == self._consumer:
            self._ahead.join(_FINALISER_S_MAX)  # not on an engine's thread, which must not wait for itself

    def _landed(self, finished: ObjectRead) -> list[int]:
        """The indexes of the requests for which a finished read stands, once their bytes are where they belong."""
        item = finished.item
        try:
            if finished.error is not None:
                raise finished.error
            info = finished.info
            assert info is not None
            if item.cuts:
                return self._copied(finished, info)
            assert isinstance(item.target, BufferTarget)
            self._check(finished, info, item.target.view)
        except ClosedError:
            raise
        except StoreError as error:
            if isinstance(error, SpanError) and item.span is None:  # the answer about a later part came first
                error = ObjectChangedError(f"the object has fewer bytes than the {item.size_bytes} that are wanted")
            if item.cuts:
                item = item._replace(request_index=item.cuts[0].request_index, span=item.cuts[0].span)
            raise error_of(error, self._store, item) from None
        return [item.request_index]

    def _copied(self, finished: ObjectRead, info: ObjectInfo) -> list[int]:
        """Copy the ranges of a merged read to where the caller wants them."""
        item = finished.item
        data, _ = bytes_of_read(self._store, finished, info, self._ahead, again=self._again)
        assert item.span is not None
        for cut in item.cuts:
            assert isinstance(cut.target, BufferTarget)
            if cut.span.end > info.size_bytes:
                raise SpanError(f"the range ends at byte {cut.span.end}, but the object has {info.size_bytes} bytes")
            cut.target.view[:] = data[cut.span.start - item.span.start : cut.span.end - item.span.start]
        return [cut.request_index for cut in item.cuts]

    def _check(self, finished: ObjectRead, info: ObjectInfo, view: memoryview) -> None:
        """Compare the landed bytes with the request: their length, and the checksum of a whole object."""
        item = finished.item
        received_bytes = 0
        for part in finished.parts:
            received_bytes += part.completion.received_bytes if part.completion is not None else 0
            self._ahead.release(part)
            part.completion = part.landing = part.buffer = None
        finished.parts = []  # no cycle is left that would keep the caller's memory
        if item.span is None and info.size_bytes != len(view):
            raise ObjectChangedError(f"the object has {info.size_bytes} bytes, but {len(view)} are wanted")
        if received_bytes != len(view):
            raise ProtocolError(f"the parts have {received_bytes} of {len(view)} bytes")
        if item.span is not None and len(view) != info.size_bytes:
            return
        try:
            checksums.verify(info.checksums, view)
        except ChecksumError:
            if not self._again:
                raise
            # Which part is damaged is unknown, so all of them are read again, into the same memory.
            wanted = item._replace(span=None, etag=info.etag, size_bytes=info.size_bytes, target=None)
            for _ in ReadInto(self._store, [(wanted, view)], again=False):
                pass


def _items(requests: Iterable[IntoRequest]) -> Iterator[PlanItem]:
    for request in requests:
        yield _as_item(request)


def _as_item(request: IntoRequest) -> PlanItem:
    """Turn a request, in either of its spellings, into an item.

    Raises:
        ConfigError: `request` is of another kind, its buffer cannot be written to, or it has another length than the range.
    """
    if isinstance(request, tuple) and len(request) == 2 and isinstance(request[0], PlanItem):
        item, buffer = request
    elif isinstance(request, tuple) and len(request) == 3 and isinstance(request[0], str):
        key, span, buffer = request
        item = as_item((key, span), 0)
    else:
        raise ConfigError(f"{request!r} is neither (key, ByteRange or None, buffer) nor (PlanItem, buffer)")
    view = writable_byte_view(buffer)
    wanted_bytes = item.span.length_bytes if item.span is not None else item.size_bytes
    if wanted_bytes not in (None, len(view)):
        raise ConfigError(f"{item.key!r}: the buffer has {len(view)} bytes, and {wanted_bytes} bytes are wanted")
    if item.span is None:
        return item._replace(size_bytes=len(view), cuts=(), target=BufferTarget(view, 0))
    return item._replace(cuts=(), target=BufferTarget(view, item.span.start))
