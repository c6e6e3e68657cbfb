"""``read_into``: bodies land in the caller's memory, with nothing in between, and many ranges are on their way at a time.

Whoever loads tensors has their memory already. A read that returned memory of its own would need a copy and, for a moment,
twice the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.checksums import algorithms as checksums
from penstock.config import FetchConfig
from penstock.errors import (
    DEFECT_HINT,
    ChecksumError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ProtocolError,
    SpanError,
    StoreError,
)
from penstock.fetch import PlanItem, ReadAhead
from penstock.fetch.plan import BufferTarget, as_item
from penstock.memory.buffers import writable_byte_view
from penstock.store.reading import bytes_of_read, check_iterable, error_of
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange, Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from penstock.fetch import FetchStatistics, ObjectRead
    from penstock.store.reading import Readable
    from penstock.types import ObjectInfo

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
class ReadInto:
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

    def __iter__(self) -> Self:
        return self

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
        if hasattr(self, "_ahead"):  # it is missing if the requests could not be iterated
            self._ahead.close()
            if threading.get_ident() == self._consumer:  # not an engine's thread, which must not wait for itself
                self._ahead.join(_FINALISER_S_MAX)

    def statistics(self) -> FetchStatistics:
        """What was read so far."""
        return self._ahead.statistics()

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
        """Compare what has landed with what was wanted: its length, and the checksum of a whole object."""
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
