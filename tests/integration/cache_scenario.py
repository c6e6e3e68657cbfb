"""What ``test_cache.py`` runs in processes of its own. ``argv``: scenario, data directory, cache directory.

Prints lines of JSON. Every process reads through a cache that they share, from local files that stand for the store.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any

from penstock.cache import CacheConfig, Cached
from penstock.fetch import PlanItem
from penstock.store.local import LocalStore
from penstock.store.traced import Traced

BLOCK_BYTES = 64 * 1024


def say(**record: Any) -> None:
    print(json.dumps(record), flush=True)


class Stuck(LocalStore):
    """Begins to answer a Get, and never ends."""

    def _get(self, operation: Any, job: Any) -> None:
        say(holds=operation.key)
        threading.Event().wait()


def cached(inner: LocalStore, folder: str, **options: Any) -> Cached:
    settings: dict[str, Any] = {"bytes_max": 10**9, "free_ratio_min": 0.0, "block_bytes": BLOCK_BYTES, **options}
    return Cached(Traced(inner), CacheConfig(folder, **settings))


def epoch(store: Cached) -> tuple[int, str]:
    """Bytes and digest of everything, streamed."""
    digest, size_bytes = hashlib.sha256(), 0
    items = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
    for chunk in store.read_parts(items, part_bytes=4 * BLOCK_BYTES):
        digest.update(chunk.data)
        size_bytes += len(chunk.data)
    return size_bytes, digest.hexdigest()


def main(scenario: str, data: str, folder: str) -> None:
    if scenario == "stuck":
        store = cached(Stuck(data), folder)
        epoch(store)
        return
    options: dict[str, Any] = {}
    if scenario == "forever":
        options["bytes_max"] = 24 * BLOCK_BYTES  # far less than the data: writing, evicting, writing again
    if scenario == "impatient":
        options["wait_s_max"] = 0.2
    with cached(LocalStore(data), folder, **options) as store:
        say(begun=True)
        while True:
            size_bytes, digest = epoch(store)
            statistics = store.statistics()
            say(
                size_bytes=size_bytes,
                digest=digest,
                received_bytes=statistics.inner.received_bytes,
                waited_count=statistics.waited_count,
                expired_count=statistics.wait_expired_count,
                corrupt_count=statistics.corrupt_count,
                troubles=dict(statistics.troubles),
            )
            if scenario != "forever":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
