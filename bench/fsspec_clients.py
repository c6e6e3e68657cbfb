"""How fast are fsspec's file systems: one large file, ranges, a listing, and small files, with penstock and with s3fs?

Both do the same calls of fsspec's interface (``peers/_files.py``), in turns, behind 30 ms and 90 MB/s per connection, and
without delay. ``cat`` returns the large file as bytes, ``stream`` reads it in steps of 8 MiB; ``small`` returns the small files
as a dict, ``get`` writes them to files in memory.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from clients import BUCKET, Client
from harness import arguments, objects

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

CASES = {"paced": {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}, "plain": {}}
WORKS = ("cat", "stream", "ranges", "small", "get", "find")
LARGE_BYTES, RANGE_BYTES, SMALL_BYTES = 512 << 20, 4096, 20_000
METRICS = {
    "seconds": lambda answer: answer["seconds"],
    "per s": lambda answer: 1 / answer["seconds"],
    "CPU s": lambda answer: answer["cpu_s"],
}


class FilesClient(Client):
    """A driver of a file system."""

    script = "files"


def measure(options: Any, case: str, what: str) -> None:
    scale = 10 if options.quick else 1
    large_bytes, range_count, small_count, key_count = (
        LARGE_BYTES // scale, 10_000 // scale, 5000 // scale, 100_000 // scale,
    )  # fmt: skip
    sizes = {"large": (1, large_bytes)} if what in ("cat", "stream", "ranges") else {}
    if what in ("small", "get"):
        sizes = {"small": (small_count, SMALL_BYTES)}
    listed = [f"{number:08}.jpg" for number in range(key_count)] if what == "find" else None
    with objects(sizes) as root:
        settings: dict[str, Any] = dict(CASES[case])
        if listed is not None:
            settings["listed"] = {BUCKET: listed}
        with Origin(root, **settings) as origin:
            run_work(options, case, what, root, origin, listed, (large_bytes, range_count))


def run_work(
    options: Any, case: str, what: str, root: Path, origin: Origin, listed: list[str] | None, counts: tuple[int, int]
) -> None:
    large_bytes, range_count = counts
    clients = [FilesClient("penstock", "penstock"), FilesClient("s3fs", "s3fs")]
    if what in ("cat", "ranges", "small", "get"):
        clients.append(FilesClient("s3fs tuned", "s3fs", max_concurrency=32, batch=512))
    command: dict[str, Any] = {"do": "work", "what": what}
    if what in ("cat", "stream", "ranges"):
        command["key"] = "large/000000"
    if what == "ranges":
        chosen = random.Random(1)
        command |= {
            "starts": [chosen.randrange(large_bytes - RANGE_BYTES) for _ in range(range_count)],
            "length": RANGE_BYTES,
        }
    if what in ("small", "get"):
        command |= {
            "prefix": "small",
            "folder": str(root.parent),
            "keys": [f"small/{path.name}" for path in small(root)],
        }
    expected = wanted(root, command, listed)
    run = Run(f"{what}, {case}", origin, options.select(clients), METRICS, options.turns(5, 1))

    def turn(client: Client) -> dict[str, Any]:
        answer = client.ask(command)
        if answer["check"] != expected:
            raise BenchError(f"{client.name} delivered something else than is stored")
        return answer

    with run:
        run.turns(turn, warm=turn)
    best = run.best("per s", "s3fs", "s3fs tuned")
    run.report([Row(f"{what}, {case} : s3fs", run.ratios("per s", "penstock", best), 2, 4)], case=case, what=what)


def small(root: Path) -> list[Path]:
    return sorted((root / BUCKET / "small").iterdir())


def wanted(root: Path, command: dict[str, Any], listed: list[str] | None) -> str:
    """Return what a correct client answers."""
    check = hashlib.md5()
    what = command["what"]
    if what == "find":
        for key in listed or ():
            check.update(key.encode())
    elif what in ("small", "get"):
        for path in small(root):
            check.update(path.read_bytes())
    else:
        data = memoryview((root / BUCKET / command["key"]).read_bytes())
        if what == "stream":
            data = data[-64:]
        for start in command.get("starts", [None]):
            check.update(data if start is None else data[start : start + command["length"]])
    return check.hexdigest()


if __name__ == "__main__":
    asked = arguments(
        __doc__ or "",
        case={"choices": [*CASES, "all"], "default": "all"},
        what={"choices": [*WORKS, "all"], "default": "all"},
    )
    for one_case in CASES:
        for one_work in WORKS:
            if asked.case in (one_case, "all") and asked.what in (one_work, "all"):
                measure(asked, one_case, one_work)
