"""What the benchmarks of objects share: the options of the command line, the objects, and what a correct client answers."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from clients import BUCKET
from peers._driver import fingerprint

from penstock.bench.origin.server import shared_memory_folder
from penstock.bench.process import BenchError

MIB = 1 << 20


class Options(argparse.Namespace):
    """The options of the command line."""

    quick: bool
    repetitions: int | None
    only: str | None

    def turns(self, usual: int, quick: int) -> int:
        return self.repetitions or (quick if self.quick else usual)

    def select(self, clients: list[Any]) -> list[Any]:
        wanted = self.only.split(",") if self.only else []
        return [c for c in clients if not wanted or any(c.name.startswith(word) for word in wanted)]


def arguments(question: str, **extra: dict[str, Any]) -> Options:
    """Parse --quick, --repetitions, --only and the options that a benchmark adds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up, as after Ctrl-C
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works: not for quoting")
    parser.add_argument("--repetitions", type=int, help="turns of each client")
    parser.add_argument("--only", help="comma-separated beginnings of clients' names; the rest sit out")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args(namespace=Options())


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Create a folder in /dev/shm that is removed at the end."""
    folder = shared_memory_folder("penstock-bench")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def objects(sizes: dict[str, tuple[int, int]]) -> Iterator[Path]:
    """Create a root folder in memory with one bucket of random objects, {prefix: (count, bytes each)}; removed at the end."""
    with memory_folder() as root:
        random = Random(0)
        for prefix, (count, size_bytes) in sizes.items():
            folder = root / BUCKET / prefix
            folder.mkdir(parents=True)
            block = random.randbytes(min(size_bytes, 4 * MIB))
            for index in range(count):
                with (folder / f"{index:06d}").open("wb") as file:
                    file.write(random.randbytes(64))  # makes the object differ from its neighbours at little cost
                    for start in range(64, size_bytes, len(block)):
                        file.write(block[: min(len(block), size_bytes - start)])
        yield root


def keys_of(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{index:06d}" for index in range(count)]


def expected(root: Path, keys: list[str]) -> dict[str, int]:
    """Return what a correct client answers for these keys."""
    found: dict[str, list[Any]] = {}
    check = total = 0
    for index, key in enumerate(keys):
        if key not in found:
            with (root / BUCKET / key).open("rb") as file:
                first, size_bytes = file.read(1), file.seek(0, os.SEEK_END)
                file.seek(size_bytes - 1)
                found[key] = [_Ends(first + file.read(1), size_bytes)]
        check += fingerprint(index, found[key])
        total += len(found[key][0])
    return {"objects": len(keys), "bytes": total, "check": check & 0xFFFFFFFFFFFFFFFF}


def verified(client: Any, answer: dict[str, Any], root: Path, keys: list[str]) -> dict[str, Any]:
    """Return `answer`. Raises ``BenchError`` if the client did not deliver exactly these objects."""
    wanted = expected(root, keys)
    if wrong := {name: answer[name] for name, value in wanted.items() if answer[name] != value}:
        raise BenchError(f"{client.name} delivered {wrong}, not {wanted}")
    return answer


class _Ends:
    """Represents a large object in ``fingerprint`` by its length, first byte and last byte."""

    def __init__(self, ends: bytes, size_bytes: int) -> None:
        self.ends, self.size_bytes = ends, size_bytes

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, index: int) -> int:
        return self.ends[index]
