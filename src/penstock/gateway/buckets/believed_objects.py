"""``BelievedObjects``: what the cache of a store knows so well that an event loop may use it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache import Cached
from penstock.gateway.buckets.hot_bodies import BODY_BYTES_MAX
from penstock.gateway.buckets.store_heads import object_head

if TYPE_CHECKING:
    from penstock.gateway.buckets.hot_bodies import HotBodies
    from penstock.store.base import Store
    from penstock.types import ByteRange, Key, ObjectInfo

AT_ONCE_BYTES_MAX = 1 << 20
"""The most bytes that are read on the event loop's thread, from the page cache: 0.1 ms."""
_OBJECTS_COUNT_MAX = 4096


class BelievedObject:
    """One version of an object that the cache believes in. Implements ``ObjectAtHand``.

    Args:
        cached: The cache.
        info: The version of the object that is believed.
        hot: Keeps the bytes of small objects; None keeps none.

    Attributes:
        info: The version of the object that the cache holds.
        head: Description of the object.
    """

    __slots__ = ("_cached", "_hot", "_was_read", "head", "info")

    def __init__(self, cached: Cached, info: ObjectInfo, hot: HotBodies | None) -> None:
        self._cached = cached
        self._hot = hot if info.size_bytes <= BODY_BYTES_MAX else None
        self._was_read = False
        self.info = info
        self.head = object_head(info)

    def read_nowait(self, span: ByteRange) -> memoryview | None:
        """Return bytes of the object: uint8[span], read-only; None if they are more than 1 MiB, or not in memory."""
        if span.length_bytes > AT_ONCE_BYTES_MAX:
            return None
        hot = self._hot
        if hot is None:
            return self._read(span)
        whole = hot.get(self)
        if whole is not None:
            counts = self._cached.counts
            counts.hit_count += 1
            counts.hit_bytes += span.length_bytes
            return whole[span.start : span.end]
        body = self._read(span)
        if body is not None and span.length_bytes == self.info.size_bytes:
            if self._was_read:  # most objects of a training run are read once in each epoch
                hot.keep(self, body)
            self._was_read = True
        return body

    def _read(self, span: ByteRange) -> memoryview | None:
        body = self._cached.read_nowait(self.info, span)
        return None if body is None else body.toreadonly()


class BelievedObjects:
    """The objects of one store that its cache believes in. Their heads are made once, and not for each read.

    Args:
        store: The store; without a cache around it, nothing is known.
        hot: Keeps the bytes of small objects; None keeps none.
    """

    def __init__(self, store: Store, hot: HotBodies | None) -> None:
        self._cached = store if isinstance(store, Cached) else None
        self._hot = hot
        self._needs_headers = store.keeps_headers
        self._objects: dict[Key, BelievedObject] = {}

    def get(self, key: Key) -> BelievedObject | None:
        """Return an object; None if the cache does not know it with its headers, or no longer believes what it knows."""
        cached = self._cached
        info = cached.stat_nowait(key) if cached is not None else None
        if cached is None or info is None or (self._needs_headers and not info.headers):
            return None
        known = self._objects.get(key)
        if known is None or known.info is not info:  # the cache returns the same record until it learns a new one
            if len(self._objects) >= _OBJECTS_COUNT_MAX:
                self._objects.clear()
            known = self._objects[key] = BelievedObject(cached, info, self._hot)
        return known
