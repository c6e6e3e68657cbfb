"""Operations that change the objects of an upstream: a part of ``UpstreamBucket`` that read-only buckets lack."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from penstock.cache import Cached
from penstock.gateway.buckets.forwarding import ForwardedWrites
from penstock.gateway.buckets.store_writes import StoreWrites
from penstock.store.base import innermost
from penstock.store.s3 import S3Store

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.gateway.objects import Answer, GatewayRequest, RequestBody
    from penstock.store.base import Store


class Writes(Protocol):
    """Performs the operations that change objects, and those that belong to them, such as ``ListParts``."""

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform an operation.

        Raises:
            S3Error: It failed, or cannot be done with this upstream.
            PenstockError: The upstream failed.
        """

    async def close(self) -> None:
        """Release what it holds; idempotent."""


def writes_for(name: str, store: Store) -> Writes:
    """Return what writes to a store: requests are passed on to S3, and become operations of every other store.

    Args:
        name: Name of the bucket, by which clients know it.
        store: The store, with all its wrappers.
    """

    async def note_written(keys: Collection[str]) -> None:
        cached = _cached(store)
        if cached is not None:
            await asyncio.to_thread(cached.note_written, keys)

    core = innermost(store)
    if isinstance(core, S3Store):
        return ForwardedWrites(name, core, note_written=note_written)
    return StoreWrites(name, store)


def _cached(store: Store) -> Cached | None:
    while not isinstance(store, Cached):
        inner = getattr(store, "inner", None)
        if inner is None:
            return None
        store = inner
    return store
