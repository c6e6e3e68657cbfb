"""The loop that every driver shares: a line of JSON in is a command, one out is its answer. Standard library only.

Commands:
  {"do": "open", "url": ..., "bucket": ..., "ca": path or null, "options": {...}}   -> {"versions": {...}}
  {"do": "read", "keys": [...], "size_bytes": n, "in_order": bool, "skip_s": s}     -> {"seconds", "cpu_s", ...}
  {"do": "list"}                                                                    -> the same; bytes is 0
  {"do": "work", ...}                                 -> the same, of the driver's own method ``work``, which takes the command
Any failure answers {"error": text}. ``cpu_s`` is user plus system time of the client process, all its threads.
``check`` depends on length, first byte, last byte and position of each object: nobody skips or swaps one unnoticed.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import resource
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

ACCESS_KEY, SECRET_KEY, REGION = "AKBENCHBENCHBENCH000", "bench/secret/bench/secret/bench/secret00", "us-east-1"

Body: TypeAlias = Any
"""A buffer, or a list of buffers that make one object."""


Take: TypeAlias = Callable[[int, Body], None]
"""Receives (index into the keys, bytes) of each object, from any thread; keeps nothing."""


class Client(Protocol):
    """What a driver file defines; `options` of its ``__init__`` are its own."""

    packages: Sequence[str]

    def read(self, keys: list[str], size_bytes: int, in_order: bool, take: Take) -> None:
        """Gives every object to `take`; in the order of `keys` if `in_order`."""

    def list(self) -> list[str]:
        """Every key of the bucket, in key order."""


def fingerprint(index: int, body: Body) -> int:
    """An integer that depends on where the object was asked for, its length and its ends."""
    pieces = body if isinstance(body, list) else (body,)
    length = sum(map(len, pieces))
    return (index + 1) * (length * 65537 + pieces[0][0] * 256 + pieces[-1][-1]) if length else 0


def in_threads(fetch: Callable[[str], Body], keys: list[str], threads_count: int, take: Take) -> None:
    """Fetches in any order, each thread taking the next key: the cheapest way to use a blocking client."""
    counter, failures = itertools.count(), []

    def work() -> None:
        try:
            while not failures and (index := next(counter)) < len(keys):
                take(index, fetch(keys[index]))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def in_order(fetch: Callable[[Any], Body], keys: Sequence[Any], threads_count: int, take: Take) -> None:
    """Fetches `threads_count` at a time and gives them on in the order of `keys`."""
    with ThreadPoolExecutor(threads_count) as pool:
        upcoming = iter(keys)
        flying = deque(pool.submit(fetch, key) for key in itertools.islice(upcoming, threads_count))
        for index in range(len(keys)):
            body = flying.popleft().result()
            flying.extend(pool.submit(fetch, key) for key in itertools.islice(upcoming, 1))
            take(index, body)
            del body


def parts(keys: list[str], size_bytes: int, part_bytes: int) -> list[tuple[str, int, int]]:
    """(key, start, end) of every part of every object, in order."""
    starts = range(0, size_bytes, part_bytes)
    return [(key, start, min(start + part_bytes, size_bytes)) for key in keys for start in starts]


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _read(client: Client, command: dict[str, Any]) -> dict[str, Any]:
    """Reads everything, keeps nothing; ``steady_bytes_per_s`` is the rate from ``skip_s`` seconds on."""
    found: list[tuple[float, int, int, int]] = []  # appending is atomic, so every thread may
    clock = time.perf_counter

    def take(index: int, body: Body) -> None:
        length = sum(map(len, body)) if isinstance(body, list) else len(body)
        found.append((clock(), length, fingerprint(index, body), index))

    cpu_s, start_s = _cpu_s(), clock()
    client.read(command["keys"], command["size_bytes"], command["in_order"], take)
    seconds, cpu_s = clock() - start_s, _cpu_s() - cpu_s
    if command["in_order"] and any(item[3] != place for place, item in enumerate(found)):
        raise AssertionError("objects came out of order")
    check = sum(item[2] for item in found) & 0xFFFFFFFFFFFFFFFF
    total = sum(item[1] for item in found)
    answer = {"seconds": seconds, "cpu_s": cpu_s, "bytes": total, "objects": len(found), "check": check}
    late = [item for item in found if item[0] - start_s >= command.get("skip_s", 0.0)]
    if len(late) > 1:
        answer["steady_bytes_per_s"] = sum(item[1] for item in late[1:]) / (late[-1][0] - late[0][0])
    return answer


def _list(client: Client) -> dict[str, Any]:
    cpu_s, start_s = _cpu_s(), time.perf_counter()
    keys = client.list()
    seconds, cpu_s = time.perf_counter() - start_s, _cpu_s() - cpu_s
    check = zlib.crc32("\n".join(keys).encode())
    return {"seconds": seconds, "cpu_s": cpu_s, "bytes": 0, "objects": len(keys), "check": check}


def _work(client: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Runs the driver's own work, whose answer says what it did."""
    cpu_s, start_s = _cpu_s(), time.perf_counter()
    finished = client.work(command)
    seconds, cpu_s = time.perf_counter() - start_s, _cpu_s() - cpu_s
    return {"seconds": seconds, "cpu_s": cpu_s, **finished()}


def serve(make: Callable[..., Client]) -> None:
    """Answers commands until standard input ends. What the client prints goes to standard error."""
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_REGION=REGION)
    os.environ.update(AWS_DEFAULT_REGION=REGION, AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/dev/null")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    client: Client | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "open":
                client = make(url=command["url"], bucket=command["bucket"], ca=command["ca"], **command["options"])
                answer = {"versions": {name: importlib.metadata.version(name) for name in client.packages}}
            else:
                kinds = {"read": _read, "list": lambda client, _: _list(client), "work": _work}
                answer = kinds[command["do"]](client, command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a client's own threads must not hold the process
