"""What does the node's cache cost when it is cold, what is it worth when it is warm, and who fetches what?

Everything runs in processes of its own, whose memory is warmed by an uncounted pass over local files. `readinto` is the
floor: as many threads as the cache has, each reading 8 MiB of a file at a time into one buffer that it keeps. `from the disk`
drops the page cache of files and entries before each turn; `from memory` does not, and is a race of one memory copy against
a copy and a checksum. Bytes and requests are counted where they leave the cache, below it, by every process.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import Row, arguments, objects, print_report, surroundings
from origin.origin import Origin
from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

MIB = 1 << 20
THREADS = 8
PART_BYTES = 8 * MIB
CONSUMER_BYTES_PER_S = 150e6  # of the decoding load: two cores of 224 x 224 JPEG take about 60 MB/s


# ── in a process of its own ──────────────────────────────────────────────────────────────────────────────────────────


def readinto(folder: Path) -> int:
    """Bytes of all files, read by threads into buffers that they keep."""
    parts = [(path, start) for path in sorted(folder.iterdir()) for start in range(0, path.stat().st_size, PART_BYTES)]
    todo, lock, sizes = iter(parts), threading.Lock(), []

    def work() -> None:
        buffer, size_bytes = bytearray(PART_BYTES), 0
        while True:
            with lock:
                part = next(todo, None)
            if part is None:
                break
            with part[0].open("rb", buffering=0) as file:
                file.seek(part[1])
                size_bytes += file.readinto(buffer) or 0
        sizes.append(size_bytes)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sizes)


def epoch(store: Any, consumer_bytes_per_s: float = 0.0) -> int:
    """Bytes of everything in the store, streamed as a loader does, to a consumer of this rate."""
    from penstock.fetch import PlanItem

    items = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list()]
    size_bytes, begun_s = 0, time.perf_counter()
    for chunk in store.read_parts(items, part_bytes=PART_BYTES):
        size_bytes += len(chunk.data)
        ahead_s = size_bytes / consumer_bytes_per_s - (time.perf_counter() - begun_s) if consumer_bytes_per_s else 0.0
        if ahead_s > 0:
            time.sleep(ahead_s)
    return size_bytes


def work(task: dict[str, Any]) -> dict[str, Any]:
    """One measurement."""
    import penstock as ps
    from penstock.cache import CacheConfig
    from penstock.store.local import LocalStore

    files = Path(task["files"])
    epoch(LocalStore(files))
    readinto(files)
    if task["drop"]:
        for folder in (files, Path(task["cache"])):
            drop_pages(folder)
    if task["do"] == "readinto":
        begun_s = time.perf_counter()
        return {"bytes": readinto(files), "seconds": time.perf_counter() - begun_s}
    cache = CacheConfig(task["cache"], 1 << 40, free_ratio_min=0.0, threads_max=THREADS) if task["cached"] else None
    credentials = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    with ps.connect(
        "s3://bench", endpoint_url=task["url"], credentials=credentials, region=REGION, cache=cache
    ) as store:
        begun_s = time.perf_counter()
        size_bytes = epoch(store, task.get("consumer_bytes_per_s", 0.0))
        seconds = time.perf_counter() - begun_s
        record: Any = store.statistics()
    asked = record.inner if cache is not None else record
    answer = {"bytes": size_bytes, "seconds": seconds, "received_bytes": asked.received_bytes}  # listings too
    return {**answer, "operations": dict(asked.operations), "troubles": dict(record.troubles) if cache else {}}


def drop_pages(folder: Path) -> None:
    """Have the kernel forget what it holds of the files below `folder`; clean pages only, so they are synced first."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


# ── the benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """Runs tasks, and keeps their rates in MB/s by name, turn by turn."""

    def __init__(self, folder: Path, url: str) -> None:
        self.files, self.cache, self.url = folder / "files", folder / "cache", url
        self.rates: dict[str, list[float]] = {}

    def start(self, do: str, **options: Any) -> subprocess.Popen[str]:
        task = {"do": do, "files": str(self.files), "cache": str(self.cache), "url": self.url, "drop": False, **options}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        command = [sys.executable, __file__, "--work", json.dumps(task)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a worker failed with {process.returncode}")
        return dict(json.loads(out))

    def measure(self, name: str, do: str, **options: Any) -> dict[str, Any]:
        answer = self.end(self.start(do, **options))
        self.rates.setdefault(name, []).append(answer["bytes"] / answer["seconds"] / 1e6)
        print(f"cache: {name}: {self.rates[name][-1]:.0f} MB/s", file=sys.stderr)
        return answer

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]


def write_rate(folder: Path, size_bytes: int) -> float:
    """MB/s of writing so much to the disk, synced."""
    path, block = folder / "probe", os.urandom(4 * MIB)
    begun_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun_s
    path.unlink()
    return size_bytes / seconds / 1e6


def together(bench: Bench, processes_count: int, data_bytes: int, *, cached: bool) -> tuple[float, float]:
    """Processes on one cold data set at the same time: data sets received by all together, and the slowest's seconds."""
    running = [bench.start("epoch", cached=cached) for _ in range(processes_count)]
    answers = [bench.end(process) for process in running]
    return sum(answer["received_bytes"] for answer in answers) / data_bytes, max(a["seconds"] for a in answers)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(json.loads(sys.argv[2]))))
        return
    options = arguments(__doc__ or "", at={"help": "a folder on the disk to be measured; default: the temporary one"})
    count, size_bytes = (4, 16 * MIB) if options.quick else (8, 64 * MIB)
    with objects({"big": (count, size_bytes)}) as root, tempfile.TemporaryDirectory(dir=options.at) as name:
        folder = Path(name)
        shutil.copytree(root / "bench" / "big", folder / "files")
        with Origin(root) as origin:
            run(Bench(folder, origin.url), folder, count * size_bytes, options.turns(5, 1))


def run(bench: Bench, folder: Path, data_bytes: int, turns: int) -> None:
    """All turns, and the report."""
    disk = [write_rate(folder, data_bytes) for _ in range(2)]
    received, waits, requests = [], [], []
    load = {"consumer_bytes_per_s": CONSUMER_BYTES_PER_S}
    for _ in range(turns):
        for name, more in (("raw", {}), ("under load", load)):
            shutil.rmtree(bench.cache, ignore_errors=True)
            bench.measure(f"cold, {name}", "epoch", cached=True, **more)
            bench.measure(f"no cache, {name}", "epoch", cached=False, **more)
        for where, drop in (("the disk", True), ("memory", False)):
            warm = bench.measure(f"warm, from {where}", "epoch", cached=True, drop=drop)
            bench.measure(f"readinto, from {where}", "readinto", drop=drop)
            requests.append(sum(warm["operations"].values()))
        shutil.rmtree(bench.cache, ignore_errors=True)
        shared, shared_s = together(bench, 8, data_bytes, cached=True)
        _, alone_s = together(bench, 8, data_bytes, cached=False)
        received.append(shared)
        waits.append(alone_s / shared_s)
    rows = [
        Row(
            "warm : readinto, from the disk", bench.ratios("warm, from the disk", "readinto, from the disk"), 0.8, 0.88
        ),
        Row("warm : readinto, from memory", bench.ratios("warm, from memory", "readinto, from memory"), 0.8, 0.88),
        Row("requests of a warm epoch", [float(value) for value in requests], 1, 1, less=True),
        Row("cold : no cache, raw", bench.ratios("cold, raw", "no cache, raw"), 0.6, 0.8),
        Row("cold : no cache, under load", bench.ratios("cold, under load", "no cache, under load"), 0.9, 0.97),
        Row("8 cold processes: data sets fetched", received, 1.001, 1.001, less=True),
        Row("8 cold processes: speed : without", waits, 1, 1.5),
    ]
    spread = {
        name: {"median": round(statistics.median(rates)), "min": round(min(rates)), "max": round(max(rates))}
        for name, rates in bench.rates.items()
    }
    table = [["MB/s", "median (min..max)"]]
    table += [[name, f"{s['median']} ({s['min']}..{s['max']})"] for name, s in spread.items()]
    table.append(["disk, written and synced", f"{statistics.median(disk):.0f}"])
    record = {"bench": "cache", "data_bytes": data_bytes, "disk_write_mb_per_s": disk, **surroundings(), "MB/s": spread}
    print_report("cache", table, rows, record)


if __name__ == "__main__":
    main()
