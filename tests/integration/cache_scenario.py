"""What ``test_cache.py`` runs in processes of its own. ``argv``: scenario, data directory, cache directory.

Prints lines of JSON. Every process reads through a cache that they share, from local files that stand for the store.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
from typing import Any

from penstock.cache import CacheConfig, Cached
from penstock.fetch import PlanItem
from penstock.store.local import LocalStore
from penstock.store.traced import Traced

BLOCK_BYTES = 64 * 1024
PROCESSES = 50


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


def crowd(data: str, folder: str) -> None:
    """Fifty processes, made at once, of one cold data set: bytes that all of them asked the store for."""
    ends = [os.pipe() for _ in range(PROCESSES)]
    for _, end in ends:
        if not os.fork():
            with cached(LocalStore(data), folder) as store:
                size_bytes, digest = epoch(store)
                statistics = store.statistics()
                row = [size_bytes, digest, statistics.inner.received_bytes, statistics.corrupt_count]
                os.write(end, json.dumps([*row, dict(statistics.troubles)]).encode())
            os._exit(0)
        os.close(end)
    rows = [json.loads(os.read(begin, 4096)) for begin, _ in ends]
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    wrong = [row for row in rows if row[3:] != [0, {}] or row[:2] != rows[0][:2]]
    say(size_bytes=rows[0][0], digest=rows[0][1], received_bytes=sum(row[2] for row in rows), wrong=wrong)


def main(scenario: str, data: str, folder: str) -> None:
    if scenario == "crowd":
        crowd(data, folder)
        return
    if scenario == "change":
        with cached(LocalStore(data), folder, metadata_ttl_s=math.inf) as store:
            store.write("00", b"new")
            store.write("missing", b"new")
            store.copy("00", "01")
            store.delete("02")
        return
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
                hit_count=statistics.hit_count,
                refused_count=statistics.refused_count,
                used_bytes=statistics.used_bytes,
                corrupt_count=statistics.corrupt_count,
                troubles=dict(statistics.troubles),
            )
            if scenario != "forever":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
