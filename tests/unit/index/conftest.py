"""Shards in memory stores, and their listings."""

from __future__ import annotations

import io
import random
import tarfile
import uuid
from collections.abc import Callable

import pytest

from indexing import Shard
from penstock.formats import TarWriter
from penstock.index import ShardLike
from penstock.store import Store
from penstock.store.memory import MemoryStore


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(name=f"index-{uuid.uuid4().hex}")


@pytest.fixture
def listed() -> Callable[..., list[ShardLike]]:
    """Return the objects of a store as listed shards, without the index."""

    def find(store: Store, prefix: str = "") -> list[ShardLike]:
        return [
            Shard(store, info.key, store.describe(info.key), info.etag, info.size_bytes)
            for info in store.list(prefix)
            if not info.key.endswith((".idx", ".index", ".json"))
        ]

    return find


@pytest.fixture
def tar() -> Callable[..., bytes]:
    """Return a tar shard by our own writer; another seed gives other content."""

    def make(count: int, *, seed: int = 0, size_max: int = 3000) -> bytes:
        source = random.Random(seed)
        out = io.BytesIO()
        writer = TarWriter(out.write)
        for number in range(count):
            data = source.randbytes(source.randrange(size_max))
            writer.add({"__key__": f"{seed}/{number:05d}", "bin": data, "cls": str(number)})
        writer.finish()
        return out.getvalue()

    return make


@pytest.fixture
def odd_tar() -> bytes:
    """Return a tar as ``tar`` and Python make it: directories, PAX headers, long names, metadata between samples."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as file:
        for number in range(40):
            if number % 3 == 0:
                folder = tarfile.TarInfo(f"d{number}")
                folder.type = tarfile.DIRTYPE
                file.addfile(folder)
            if number % 7 == 0:
                meta = tarfile.TarInfo(f"__meta__/{number}")
                meta.size = 100 * number
                file.addfile(meta, io.BytesIO(bytes(meta.size)))
            for field in ("jpg", "json"):
                name = "x" * (200 if number % 5 == 0 else 3)
                member = tarfile.TarInfo(f"d{number}/{name}{number}.{field}")
                data = random.Random(number).randbytes(137 * number)
                member.size, member.mtime = len(data), 0.5 if number % 2 else 0
                file.addfile(member, io.BytesIO(data))
    return out.getvalue()
