"""Heads of a store's objects, and the bytes of objects that are read often, without a request to the store.

An event loop may use the heads in a store's cache immediately. The page cache has the bytes of small objects, but opening a
file, copying 100 KB out of it and closing it again take a third of the CPU time of a GET. So objects that are read repeatedly
stay in the memory of this process. Such an object is read from the cache's directory again once a minute, so that its entry
there counts as recently used.
"""

from __future__ import annotations

import mimetypes
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import Cached
from penstock.cache.metadata import kept_headers
from penstock.gateway.objects import ObjectHead
from penstock.store.records import CONTENT_HEADERS, DEFAULT_TYPE

if TYPE_CHECKING:
    from penstock.fetch.budget import Budget
    from penstock.store.base import Store
    from penstock.types import ByteRange, Key, ObjectInfo

NOWAIT_BYTES_MAX = 1 << 20
"""The most bytes that are read on the event loop's thread, from the page cache: 0.1 ms."""
_OBJECTS_COUNT_MAX = 4096
_BODY_BYTES_MAX = 256 << 10
"""The largest body that is kept; for larger ones, copying costs more than what surrounds it."""
_BUDGET_SHARE = 8
"""The bodies take at most this part of the budget."""
_KEPT_S_MAX = 60.0


class KnownObject:
    """One version of an object that the cache of its store holds and trusts.

    Args:
        cached: The cache.
        info: The version.
        bodies: Keeps the bytes of small objects; None keeps none.

    Attributes:
        info: The version.
        head: Description of the object.
    """

    __slots__ = ("_bodies", "_cached", "_was_read", "head", "info")

    def __init__(self, cached: Cached, info: ObjectInfo, bodies: BodyCache | None) -> None:
        self._cached = cached
        self._bodies = bodies if info.size_bytes <= _BODY_BYTES_MAX else None
        self._was_read = False
        self.info = info
        self.head = object_head(info)

    def read_nowait(self, span: ByteRange) -> memoryview | None:
        """Return bytes of the object: uint8[span], read-only; None if they are more than 1 MiB, or not in memory."""
        if span.length_bytes > NOWAIT_BYTES_MAX:
            return None
        whole = self._bodies.get(self) if self._bodies is not None else None
        if whole is not None:
            counts = self._cached.counts
            counts.hit_count += 1
            counts.hit_bytes += span.length_bytes
            return whole[span.start : span.end]
        body = self._cached.read_nowait(self.info, span)
        if body is None:
            return None
        body = body.toreadonly()
        if self._bodies is not None and span.length_bytes == self.info.size_bytes:
            if self._was_read:  # most objects of a training run are read once in each epoch
                self._bodies.keep(self, body)
            self._was_read = True
        return body


class KnownObjects:
    """The objects of one store that its cache holds and trusts. Their heads are made once, and not for each read.

    Args:
        store: The store; without a cache around it, nothing is known.
        bodies: Keeps the bytes of small objects; None keeps none.
    """

    def __init__(self, store: Store, bodies: BodyCache | None) -> None:
        self._cached = store if isinstance(store, Cached) else None
        self._bodies = bodies
        self._needs_headers = store.keeps_headers
        self._objects: dict[Key, KnownObject] = {}

    def get(self, key: Key) -> KnownObject | None:
        """Return an object; None if the cache does not know it with its headers, or no longer trusts it."""
        cached = self._cached
        info = cached.stat_nowait(key) if cached is not None else None
        if cached is None or info is None or (self._needs_headers and not info.headers):
            return None
        known = self._objects.get(key)
        if known is None or known.info is not info:  # the cache returns the same record until it learns a new one
            if len(self._objects) >= _OBJECTS_COUNT_MAX:
                self._objects.clear()
            known = self._objects[key] = KnownObject(cached, info, self._bodies)
        return known


class _KeptBody(NamedTuple):
    body: memoryview
    size_bytes: int  # of memory that it occupies
    until_s: float  # on the monotonic clock; then it must be read again


class BodyCache:
    """The bytes of small objects that are read often, of all stores of this process. Only the event loop's thread uses it.

    Args:
        budget: The budget that the bodies are charged to. If it lacks the bytes, nothing more is kept.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes_max = budget.bytes_max // _BUDGET_SHARE
        self._bodies: dict[KnownObject, _KeptBody] = {}  # the oldest first
        self.used_bytes = 0
        """Bytes of memory that the bodies occupy."""

    def get(self, known: KnownObject) -> memoryview | None:
        """Return the bytes of an object; None if they are not kept, or for too long."""
        found = self._bodies.get(known)
        return found.body if found is not None and time.monotonic() < found.until_s else None

    def keep(self, known: KnownObject, body: memoryview) -> None:
        """Keep the bytes of an object if there is room.

        Args:
            known: The object.
            body: All of its bytes, in memory that nobody will change.
        """
        self._drop(known)
        size_bytes = memoryview(body.obj).nbytes
        now_s = time.monotonic()
        if self.used_bytes + size_bytes > self._bytes_max:
            for other in [other for other, kept in self._bodies.items() if kept.until_s <= now_s]:
                self._drop(other)
        if self.used_bytes + size_bytes > self._bytes_max or not self._budget.reserve(size_bytes):
            return
        self.used_bytes += size_bytes
        self._bodies[known] = _KeptBody(body, size_bytes, now_s + _KEPT_S_MAX)

    def _drop(self, known: KnownObject) -> None:
        found = self._bodies.pop(known, None)
        if found is not None:
            self.used_bytes -= found.size_bytes
            self._budget.release(found.size_bytes)

    def close(self) -> None:
        """Drop everything; idempotent."""
        for known in list(self._bodies):
            self._drop(known)


def object_head(info: ObjectInfo) -> ObjectHead:
    """Return the head of an object of a store."""
    headers = {
        CONTENT_HEADERS.get(name := raw.decode("latin-1"), name): value.decode("utf-8", "surrogateescape")
        for raw, value in kept_headers(info.headers).items()
    }
    if "Content-Type" not in headers:
        headers["Content-Type"] = content_type_of(info.key)
    if info.tags:
        headers["x-amz-tagging-count"] = str(len(info.tags))
    return ObjectHead(
        key=info.key,
        size_bytes=info.size_bytes,
        etag=etag_of(info),
        last_modified_s=info.last_modified_s or 0.0,
        headers=headers,
    )


def etag_of(info: ObjectInfo) -> str:
    """Return the ETag of an object; if its store has none, one of size and time."""
    if info.etag is not None:
        return info.etag
    return f'"{info.size_bytes:x}-{int((info.last_modified_s or 0) * 1e6):x}"'


def content_type_of(key: str) -> str:
    """Return the type that the suffix of a key stands for."""
    _, dot, suffix = key.rpartition("/")[2].rpartition(".")
    return _type_of_suffix(suffix.lower()) if dot else DEFAULT_TYPE


@lru_cache(maxsize=1024)
def _type_of_suffix(suffix: str) -> str:
    return mimetypes.guess_type(f"x.{suffix}")[0] or DEFAULT_TYPE
