"""A shard as a listing gives it, for the tests of the index."""

from __future__ import annotations

from typing import NamedTuple

from penstock.store import Store


class Shard(NamedTuple):
    """What ``penstock.index.ShardLike`` asks for."""

    store: Store
    key: str
    url: str
    etag: str | None
    size_bytes: int | None
