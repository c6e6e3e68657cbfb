"""What ``test_fork.py`` runs in a process of its own: fork in every way over TLS, with transfers in flight.

Prints one JSON line of what the parent and its children saw. ``argv``: scenario, endpoint, CA bundle.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import penstock as ps
from penstock.config import KIB, FetchConfig
from penstock.errors import ClosedError
from penstock.transport import engine


def connect(endpoint_url: str, ca_bundle: str) -> ps.Store:
    return ps.connect(
        "s3://bucket",
        endpoint_url=endpoint_url,
        credentials=ps.Credentials(access_key="AKID", secret_key="secret"),
        transport=ps.TransportConfig(ca_bundle=ca_bundle),
        fetch=FetchConfig(part_bytes=256 * KIB),
    )


def digest(parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.data)
    return found.hexdigest()


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ClosedError:
        return True
    return False


def in_child(leave: Callable[[int], object], work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """A forked child that does `work`, writes what it saw to a pipe and leaves by `leave`: its pid, and the pipe."""
    source, target = os.pipe()
    child = os.fork()
    if child:
        os.close(target)
        return child, source
    os.close(source)
    try:
        seen = work()
    except BaseException as error:
        seen = {"error": f"{type(error).__name__}: {error}"}
    os.write(target, json.dumps(seen).encode())
    os.close(target)
    leave(7)
    raise SystemExit(8)


def report(child: int, source: int) -> dict[str, Any]:
    """What a child saw, and how it left."""
    with os.fdopen(source, "rb") as pipe:
        seen: dict[str, Any] = json.loads(pipe.read() or b'{"error": "silent"}')
    seen["status"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return seen


def leaving(store: ps.Store, leave: Callable[[int], object]) -> dict[str, Any]:
    """Fork in the middle of a stream; the child uses the store, refuses what it inherited, and leaves."""
    keys = [f"big/{number}" for number in range(8)]
    parts = store.read_parts(keys)
    first = [next(parts) for _ in range(3)]
    blobs = store.read_many(["small"] * 500)
    next(blobs)
    writer = store.writer("written")
    writer.write(bytes(9_000_000))

    def work() -> dict[str, Any]:
        return {
            "small": hashlib.sha256(store.read("small").data).hexdigest(),
            "big": digest(store.read_parts(keys[:2])),
            "many": len(list(store.read_many(["small"] * 100))),
            "refused": [
                refused(lambda: next(parts)),
                refused(lambda: next(blobs)),
                refused(lambda: writer.write(b"x")),
            ],
        }

    children = [in_child(leave, work) for _ in range(2)]
    rest = digest([*first, *parts])
    blobs_count = 1 + len(list(blobs))
    writer.write(b"end")
    writer.close()
    seen = [report(*child) for child in children]
    return {
        "children": seen,
        "parent_big": rest,
        "parent_blobs": blobs_count,
        "parent_written": store.stat("written").size_bytes,
        "parent_again": digest(store.read_parts(keys)),
    }


def loaders(store: ps.Store) -> dict[str, Any]:
    """Two children read at once while the parent does, as a DataLoader's workers do; then they are forked again."""
    store.read("small")
    keys = [f"big/{number}" for number in range(8)]
    children = [in_child(os._exit, lambda: {"big": digest(store.read_parts(keys))}) for _ in range(2)]
    mine = digest(store.read_parts(keys))

    def nested() -> dict[str, Any]:
        store.read("small")
        return report(*in_child(os._exit, lambda: {"big": digest(store.read_parts(keys))}))

    return {
        "children": [report(*child) for child in children],
        "parent": mine,
        "nested": report(*in_child(sys.exit, nested)),
    }


def long_lived(store: ps.Store) -> dict[str, Any]:
    """A child that lives on must not keep the parent's loop spinning on connections that went away."""
    list(store.read_many(["small"] * 50))
    source, target = os.pipe()
    child = os.fork()
    if not child:
        os.close(target)
        os.read(source, 1)  # until the parent closes its end
        os._exit(0)
    os.close(source)
    list(store.read_many(["closing"] * 50))  # the server closes these connections
    store.read("small")
    before_s = time.process_time()
    time.sleep(1.0)
    spent_s = time.process_time() - before_s
    os.close(target)
    os.waitpid(child, 0)
    return {"spent_s": spent_s}


def main() -> None:
    scenario, endpoint_url, ca_bundle = sys.argv[1:]
    store = connect(endpoint_url, ca_bundle)
    if scenario == "loaders":
        found = loaders(store)
    elif scenario == "long_lived":
        found = long_lived(store)
    else:
        found = leaving(store, sys.exit if scenario == "sys.exit" else os._exit)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
