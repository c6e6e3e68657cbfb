"""Is what ``penstock advise`` chooses near the best that an exhaustive measurement finds?

Stores and data sets, each with a knob that advice speaks about: requests in flight, threads or processes, size of shards,
workers of a library that reads one object at a time, the gap of random access, a cache. Every value of a small grid is
measured, in turns with the advised value. A row passes if the advised value delivers at least 85% of the best.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients import BUCKET
from epochs import Samples, bucket
from harness import arguments

import penstock as ps
from penstock.bench.origin.server import Origin
from penstock.bench.samples import photographs
from penstock.bench.turns import Row, print_report, surroundings

NEAR, TARGET = 0.85, 0.95
URL = f"s3://{BUCKET}"


@dataclass(frozen=True)
class Case:
    """A store, the data in it, and the knob that is turned.

    Attributes:
        name: What it is.
        store: Delay and bandwidth of the origin.
        folder: Folder of the data.
        knob: What is turned.
        grid: The values that are measured.
        advised: Function that takes the advised value from a report.
        measure: Function that returns samples per second with a value.
        pipeline: The pipeline that is advised on; None for the one that advise makes up.
        epochs: Number of epochs that are advised for.
    """

    name: str
    store: dict[str, Any]
    folder: str
    knob: str
    grid: list[Any]
    advised: Callable[[Any], Any]
    measure: Callable[[Any], float]
    pipeline: Any = None
    epochs: int = 1


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


def loader_rate(pipeline: Any, seconds: float, **options: Any) -> float:
    """Samples per second of a loader after its first batch."""
    with ps.Loader(pipeline, index="stream", rank=0, world_size=1, **options) as loader:
        samples, start_s = 0, 0.0
        while not start_s or time.perf_counter() < start_s + seconds:
            for batch in loader:
                samples += len(batch["__key__"]) if start_s else 0
                start_s = start_s or time.perf_counter()
                if time.perf_counter() > start_s + seconds:
                    break
        return samples / (time.perf_counter() - start_s)


def blocking_rate(folder: str, workers: int, seconds: float) -> float:
    """Samples per second of threads that each read one whole object at a time, as workers of a blocking library do."""
    one_connection = ps.FetchConfig(requests_min=1, requests_max=1, part_bytes=128 << 20)
    store = ps.connect(f"{URL}/{folder}/", hedge=ps.HedgeConfig(ratio_max=0), fetch=one_connection)
    infos = list(store.list())
    samples_of = {info.key: SAMPLES_IN.get(folder, 1) for info in infos}
    random.Random(0).shuffle(infos)
    end_s = time.perf_counter() + seconds

    def work(number: int) -> tuple[int, float]:
        count, index = 0, number
        while time.perf_counter() < end_s:
            key = infos[index % len(infos)].key
            store.read(key)
            count, index = count + samples_of[key], index + workers
        return count, time.perf_counter()

    start_s = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(work, range(workers)))
    store.close()
    return sum(count / (ended_s - start_s) for count, ended_s in done)


def ranges_rate(gap_bytes_max: int, requests_max: int) -> float:
    """Ranges of 64 KiB, 512 KiB apart, that are read per second with a gap."""
    fetch = ps.FetchConfig(gap_bytes_max=gap_bytes_max, requests_min=requests_max, requests_max=requests_max)
    store = ps.connect(f"{URL}/tar64/", fetch=fetch)
    keys = [info.key for info in store.list()]
    spans = [ps.ByteRange(start, start + (64 << 10)) for start in range(0, 32 << 20, 576 << 10)]
    requests = [(key, span) for key in keys[:2] for span in spans]
    start_s = time.perf_counter()
    count = sum(1 for _ in store.read_many(requests, ordered=False))
    store.close()
    return count / (time.perf_counter() - start_s)


def cache_rate(is_cached: bool, epochs: int) -> float:
    """Samples per second over all epochs, with or without a cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        samples, start_s = 0, time.perf_counter()
        with ps.Loader(
            raw("tar4"), index="stream", rank=0, world_size=1, cache=f"{folder}:1GB" if is_cached else None
        ) as loader:
            for _ in loader.epochs(epochs):
                samples += sum(len(batch["__key__"]) for batch in loader)
        return samples / (time.perf_counter() - start_s)


def python_work(sample: dict[str, Any]) -> dict[str, Any]:
    """Hold the interpreter for about two milliseconds."""
    total = 0
    for value in range(20_000):
        total += value
    return {"total": total}


def raw(folder: str) -> Any:
    make = ps.objects if folder == "jpg" else ps.shards
    return make(f"{URL}/{folder}/").batch(64)


def decoded(folder: str) -> Any:
    make = ps.objects if folder == "jpg" else ps.shards
    return make(f"{URL}/{folder}/").decode(ps.Image("jpg", height=224, width=224)).batch(64)


def crews(pipeline: Any, seconds: float) -> Callable[[tuple[int, int]], float]:
    def rate(value: tuple[int, int]) -> float:
        threads, processes = value
        lanes = {"lanes": processes} if processes else {}
        return loader_rate(pipeline, seconds, threads=threads, processes=processes, **lanes)

    return rate


# ── the cases ────────────────────────────────────────────────────────────────────────────────────────────────────────

SAMPLES_IN = {"jpg": 1, "tar1": 9, "tar4": 36, "tar16": 145, "tar64": 580}
"""Samples in an object of a folder, by its name, with JPEGs of about 107 KB."""


def cases(seconds: float) -> list[Case]:
    far, farther, capped = {"ttfb_ms": 30}, {"ttfb_ms": 100}, {"ttfb_ms": 30, "total_bytes_per_s": 40_000_000}
    usual = {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
    slow = {"ttfb_ms": 30, "rate_bytes_per_s": 20_000_000}
    grid = [(1, 0), (2, 0), (1, 1), (2, 2)]
    tiny = ps.shards(f"{URL}/tiny/").batch(1024)
    python = ps.shards(f"{URL}/tar4/").map(python_work).batch(64)
    folders = {None: "jpg", 1_000_000: "tar1", 4_000_000: "tar4", 16_000_000: "tar16", 64_000_000: "tar64"}

    def requests(folder: str) -> Callable[[int], float]:
        def rate(value: int) -> float:
            fetch = ps.FetchConfig(requests_min=min(8, value), requests_max=value)
            return loader_rate(raw(folder), seconds, fetch=fetch)

        return rate

    def crew(report: Any) -> tuple[int, int]:
        return report.best.threads, report.best.processes

    return [
        Case("JPEG objects, 30 ms", usual, "jpg", "requests_max", [4, 16, 64, 256],
             lambda report: report.best.requests_max, requests("jpg"), raw("jpg")),
        Case("JPEG objects, 100 ms", farther, "jpg", "requests_max", [4, 16, 64, 256],
             lambda report: report.best.requests_max, requests("jpg"), raw("jpg")),
        Case("JPEG objects, 40 MB/s in all", capped, "jpg", "requests_max", [4, 16, 64, 256],
             lambda report: report.best.requests_max, requests("jpg"), raw("jpg")),
        Case("tars of 64 MB, 20 MB/s each", slow, "tar64", "requests_max", [4, 8, 24, 256],
             lambda report: report.best.requests_max, requests("tar64"), raw("tar64")),
        Case("JPEGs decoded, tars of 4 MB", usual, "tar4", "threads, processes", grid, crew,
             crews(decoded("tar4"), seconds), decoded("tar4")),
        Case("2 ms of Python, tars of 4 MB", usual, "tar4", "threads, processes", grid, crew, crews(python, seconds), python),
        Case("100-byte samples in tars", far, "tiny", "threads, processes", grid, crew, crews(tiny, seconds), tiny),
        Case("blocking workers, JPEG objects", usual, "jpg", "workers", [1, 4, 16, 64],
             lambda report: report.best.workers, lambda value: blocking_rate("jpg", value, seconds), raw("jpg")),
        Case("blocking workers (4), packed", usual, "jpg", "shard bytes", list(folders),
             lambda report: report.best.shard_bytes, lambda value: blocking_rate(folders[value], 4, seconds), raw("jpg")),
        Case("ranges 512 KiB apart, 30 ms", usual, "tar64", "gap bytes", [0, 1 << 16, 1 << 19, 1 << 22],
             lambda report: report.best.gap_bytes_max, lambda value: ranges_rate(value, 256), raw("tar64")),
        Case("3 epochs, 40 MB/s in all", capped, "tar4", "cache", [False, True],
             lambda report: report.best.is_cached, lambda value: cache_rate(value, 3), raw("tar4"), epochs=3),
    ]  # fmt: skip


def write_data(folder: Path, *, scale: float) -> None:
    """Write the folders that the cases read: the same pictures as objects and in tars, and tiny samples."""
    pictures = photographs(40)
    Samples(pictures).write_objects(folder / "jpg", round(3000 * scale))
    for name, count in SAMPLES_IN.items():
        if name != "jpg":
            Samples(pictures).write_tars(folder / name, [count] * max(4, round(1800 * scale / count)), "jpg")
    Samples([bytes([n]) * 100 for n in range(100)]).write_tars(folder / "tiny", [20_000] * 4, "bin")


def run_case(case: Case, root: Path, turns: int, seconds: float) -> tuple[list[str], Row]:
    """Advise, then measure the grid and the advised value in turns."""
    with Origin(root, **case.store) as origin:
        os.environ.update(AWS_ENDPOINT_URL=origin.url, AWS_ACCESS_KEY_ID="AKBENCH", AWS_SECRET_ACCESS_KEY="bench")
        os.environ.update(AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")
        start_s = time.perf_counter()
        report = ps.advise(f"{URL}/{case.folder}/", pipeline=case.pipeline, seconds=seconds, epochs=case.epochs)
        spent_s = time.perf_counter() - start_s
        advised = case.advised(report)
        values = [*case.grid, *([] if advised in case.grid else [advised])]
        rates: dict[Any, list[float]] = {value: [] for value in values}
        for _ in range(turns):
            for value in values:
                rates[value].append(case.measure(value))
    medians = {value: statistics.median(found) for value, found in rates.items()}
    best = max(case.grid, key=medians.__getitem__)
    ratios = [mine / top for mine, top in zip(rates[advised], rates[best], strict=True)]
    shown = [case.name, case.knob, f"{best}: {medians[best]:,.0f}", f"{advised}: {medians[advised]:,.0f}"]
    shown += [f"{min(medians.values()):,.0f}", f"{statistics.median(ratios):.2f}", f"{spent_s:.0f}"]
    print(f"advise: {shown}, all {medians}", file=sys.stderr)
    return shown, Row(f"{case.name}: advised / best", ratios, NEAR, TARGET)


def main(options: Any) -> None:
    turns, seconds = options.turns(3, 1), 8.0 if options.quick else 10.0
    table = [["store and data", "knob", "best", "advised", "worst", "advised / best", "advise s"]]
    rows = []
    with bucket() as (root, folder):
        write_data(folder, scale=0.3 if options.quick else 1.0)
        for case in options.select(cases(0.5 if options.quick else 1.2)):
            shown, row = run_case(case, root, turns, seconds)
            table.append(shown)
            rows.append(row)
    record = {"bench": "advise", **surroundings(), "repetitions": turns}
    near = sum(row.verdict != "FAIL" for row in rows)
    print_report(f"advise: within 15% of the best in {near} of {len(rows)}", table, rows, record)


if __name__ == "__main__":
    main(arguments(__doc__))
