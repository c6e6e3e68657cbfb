"""What does the node's cache cost when it is cold, what is it worth when it is warm, and who fetches what?

The first part reads shards as bytes, in separate processes, whose memory is warmed by an uncounted pass over local files.
`readinto` is the lower bound: as many threads as the cache has, each reading 8 MiB of a file at a time into one buffer. `from
the disk` drops the page cache of files and entries before each turn. For `from memory`, a process has then read both once,
because the cost of a copy depends on what filled the page cache: `as written` are files that were just written, whose large
folios make the cheapest copies. `decoding` is a ``Loader`` that decodes photographs.

The second part starts 1, 2, 4 and 8 processes on one cold data set at the same moment, with a shared cache directory and
without one, from three kinds of stores. It reports their total rate and what the server sent. The third part measures samples:
the second epoch of libraries that keep a copy on disk.
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

import epochs
from clients import BUCKET
from harness import arguments, objects
from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

from penstock.bench.origin.server import Origin, ends_with_us
from penstock.bench.process import BenchError
from penstock.bench.samples import photographs
from penstock.bench.turns import Row, print_report, surroundings

MIB = 1 << 20
THREADS = 8
PART_BYTES = 8 * MIB
PROCESSES = (1, 2, 4, 8)
STORES: dict[str, dict[str, Any]] = {
    "a network that costs nothing": {},
    "30 ms, 90 MB/s a connection": {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000},
    "200 MB/s in all": {"ttfb_ms": 30, "total_bytes_per_s": 200_000_000},
}
CACHE_BYTES = 1 << 40
MOUNTED_S_MAX = 20.0


# ── in a process of its own ──────────────────────────────────────────────────────────────────────────────────────────


def readinto(folder: Path, buffers: list[bytearray], *, verified: bool = False) -> int:
    """Read all files, with one thread for each buffer; `verified` also computes their checksums."""
    from crc32c import crc32c

    parts = [(path, start) for path in sorted(folder.iterdir()) for start in range(0, path.stat().st_size, PART_BYTES)]
    todo, lock, sizes = iter(parts), threading.Lock(), []

    def work(buffer: bytearray) -> None:
        size_bytes = 0
        while True:
            with lock:
                part = next(todo, None)
            if part is None:
                break
            with part[0].open("rb", buffering=0) as file:
                file.seek(part[1])
                count = file.readinto(buffer) or 0
            if verified:
                crc32c(memoryview(buffer)[:count])
            size_bytes += count
        sizes.append(size_bytes)

    threads = [threading.Thread(target=work, args=[buffer]) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(sizes)


def streamed(store: Any, prefix: str = "") -> int:
    """Read everything below `prefix` as a loader does."""
    from penstock.fetch import PlanItem

    items = [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list(prefix)]
    return sum(len(chunk.data) for chunk in store.read_parts(items, part_bytes=PART_BYTES))


def decoded(pipeline: Any, cache: Any) -> int:
    """Decode photographs."""
    import penstock as ps

    with ps.Loader(pipeline, cache=cache) as loader:
        return sum(len(batch["jpg"]) for batch in loader)


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement. Returns {"count", "seconds"} and, for a store, its requests."""
    import penstock as ps
    from penstock.cache import CacheConfig
    from penstock.store.local import LocalStore

    files = Path(task["files"])
    streamed(LocalStore(files), task["warmed"])
    buffers = [bytearray(PART_BYTES) for _ in range(THREADS)]
    if not task["together"]:
        readinto(files, buffers)
    if task["drop"]:
        for folder in (files, Path(task["cache"])):
            drop_pages(folder)
    if task["do"] == "readinto":
        begun_s = time.perf_counter()
        return {
            "count": readinto(files, buffers, verified=task.get("verified", False)),
            "seconds": time.perf_counter() - begun_s,
        }
    cache = CacheConfig(task["cache"], CACHE_BYTES, free_ratio_min=0.0, threads_max=THREADS) if task["cached"] else None
    credentials = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    connection: dict[str, Any] = {"endpoint_url": task["url"], "region": REGION, "credentials": credentials}
    if task["do"] == "decode":
        shards = ps.shards(f"s3://{BUCKET}/tar/", **connection)
        pipeline = shards.decode(ps.Image("jpg", height=224, width=224), ps.Integer("cls")).batch(128)
        begun_s = time.perf_counter()
        return {"count": decoded(pipeline, cache), "seconds": time.perf_counter() - begun_s}
    with ps.connect(f"s3://{BUCKET}", cache=cache, **connection) as store:
        if task["together"]:
            print("ready", flush=True)
            sys.stdin.readline()
        begun_s = time.perf_counter()
        count = streamed(store, task["prefix"])
        seconds = time.perf_counter() - begun_s
        record: Any = store.statistics()
    operations = dict(record.inner.operations if cache is not None else record.operations)
    return {"count": count, "seconds": seconds, "requests": sum(operations.values())}


def drop_pages(folder: Path) -> None:
    """Drop the page cache of the files below `folder`. Only clean pages can be dropped, so the files are synced first."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


# ── shards as bytes ──────────────────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """Runs tasks and collects their rates by name, turn by turn: MB/s for bytes, samples/s for photographs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rates: dict[str, list[float]] = {}
        self._caches_count = 0

    def new_cache(self) -> Path:
        """Return a new cache directory for the next turns. All are removed at the end, since ext4 reuses inodes slowly."""
        self._caches_count += 1
        return self.folder / f"cache-{self._caches_count}"

    def start(self, do: str, url: str, cache: Path | None, **options: Any) -> subprocess.Popen[str]:
        task = {
            "do": do, "url": url, "cache": str(cache), "cached": cache is not None, "files": str(self.folder / "files"),
            "drop": False, "together": False, "prefix": "big/", "warmed": "", **options,
        }  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        command = [*ends_with_us("KILL"), sys.executable, __file__, "--work", json.dumps(task)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a worker failed with {process.returncode}")
        return dict(json.loads(out))

    def measure(self, name: str, do: str, url: str, cache: Path | None, **options: Any) -> dict[str, Any]:
        answer = self.end(self.start(do, url, cache, **options))
        rate = answer["count"] / answer["seconds"]
        self.keep(name, rate if do == "decode" else rate / 1e6)
        return answer

    def keep(self, name: str, rate: float) -> None:
        self.rates.setdefault(name, []).append(rate)
        print(f"cache: {name}: {rate:.0f}", file=sys.stderr)

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]

    def together(self, count: int, url: str, cache: Path | None) -> float:
        """Return the total MB/s of processes that start one data set at the same moment, until the last has all of it."""
        running = [
            self.start("stream", url, cache, prefix="shared/", together=True, warmed="00000") for _ in range(count)
        ]
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("a worker did not get ready")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [self.end(process) for process in running]
        return sum(answer["count"] for answer in answers) / max(answer["seconds"] for answer in answers) / 1e6


def write_rate(folder: Path, size_bytes: int) -> float:
    """Return the MB/s of writing to the disk, including the sync."""
    path, block = folder / "probe", os.urandom(4 * MIB)
    begun_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun_s
    path.unlink()
    return size_bytes / seconds / 1e6


def sent(log: Path) -> int:
    """Return the bytes of objects that an origin sent, from its log, without listings."""
    rows = [line.split() for line in log.read_text().splitlines()]
    return sum(int(size_bytes) for method, status, size_bytes in rows if method == "GET" and int(size_bytes) > 65536)


def shards_as_bytes(root: Path, bench: Bench, data_bytes: int, turns: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure one process, cold and warm. Returns the rows and the record."""
    requests: list[float] = []
    disk = [write_rate(bench.folder, data_bytes) for _ in range(2)]
    with Origin(root) as origin:
        for _ in range(turns):
            for name, do in (("decoding", "decode"), ("raw", "stream")):
                cache = bench.new_cache()
                bench.measure(f"cold, {name}", do, origin.url, cache)
                bench.measure(f"no cache, {name}", do, origin.url, None)
            bench.measure("warm, from the disk", "stream", origin.url, cache, drop=True)
            bench.measure("readinto, from the disk", "readinto", origin.url, cache, drop=True)
            bench.end(bench.start("stream", origin.url, cache))
            requests.append(bench.measure("warm, from memory", "stream", origin.url, cache)["requests"])
            bench.measure("readinto, from memory", "readinto", origin.url, cache)
            bench.measure("readinto and CRC-32C, from memory", "readinto", origin.url, cache, verified=True)
            shutil.rmtree(bench.folder / "files")
            shutil.copytree(root / BUCKET / "big", bench.folder / "files")
            bench.measure("readinto, from memory, as written", "readinto", origin.url, cache)
    ratios = bench.ratios
    warm = [
        ("warm, from the disk", "readinto, from the disk"),
        ("warm, from memory", "readinto, from memory"),
        ("warm, from memory", "readinto and CRC-32C, from memory"),
    ]
    rows = [Row(f"{name} : {base.partition(',')[0]}", ratios(name, base), 0.8, 0.88) for name, base in warm]
    rows += [
        Row("requests of a warm epoch", requests, 1, 1, less=True),
        Row("cold : no cache, raw", ratios("cold, raw", "no cache, raw"), 0.6, 0.8),
        Row("cold : no cache, decoding", ratios("cold, decoding", "no cache, decoding"), 0.9, 0.97),
    ]
    return rows, {"disk_write_mb_per_s": disk}


def processes_together(root: Path, bench: Bench, data_bytes: int, turns: int, counts: tuple[int, ...]) -> list[Row]:
    """Measure cold processes with a shared cache and without. The rows are for the most processes; the record has all rates."""
    most, rows = counts[-1], []
    fetched: list[float] = []
    for number, (store, options) in enumerate(STORES.items()):
        for turn in range(turns):
            for count in counts:
                log = bench.folder / f"sent-{number}-{turn}-{count}"
                with Origin(root, log=log, **options) as origin:
                    bench.keep(f"{count} together, {store}", bench.together(count, origin.url, bench.new_cache()))
                fetched.append(sent(log) / data_bytes)
                with Origin(root, **options) as origin:
                    bench.keep(f"{count} without a cache, {store}", bench.together(count, origin.url, None))
        ratios = bench.ratios(f"{most} together, {store}", f"{most} without a cache, {store}")
        limited = "total_bytes_per_s" in options
        rows.append(
            Row(
                f"{most} together : without a cache, {store}",
                ratios,
                most / 2 if limited else 1,
                most * 0.8 if limited else 1.5,
            )
        )
    return [Row("data sets sent by the server, at most", [max(fetched)], 1.001, 1.001, less=True), *rows]


def tabulated(bench: Bench, disk: list[float]) -> tuple[list[list[str]], dict[str, dict[str, int]]]:
    """Print a table of all rates. Returns their spreads for the record."""
    spread = {
        name: {"median": round(statistics.median(rates)), "min": round(min(rates)), "max": round(max(rates))}
        for name, rates in bench.rates.items()
    }
    table = [["MB/s; decoding: samples/s", "median (min..max)"]]
    table += [[name, f"{s['median']} ({s['min']}..{s['max']})"] for name, s in spread.items()]
    table.append(["disk, written and synced", f"{statistics.median(disk):.0f}"])
    return table, spread


# ── second epochs of samples ─────────────────────────────────────────────────────────────────────────────────────────


class Mounted(epochs.Loads):
    """penstock without its cache, reading through ``rclone mount --vfs-cache-mode full``, which keeps a copy."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.mount = folder, folder / "mount"
        super().__init__(name, "penstock", mount=str(self.mount))
        self._rclone: subprocess.Popen[bytes] | None = None

    def start(self, origin: Origin) -> None:
        self.mount.mkdir(parents=True)
        remote = {
            "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": origin.url, "ACCESS_KEY_ID": ACCESS_KEY,
            "SECRET_ACCESS_KEY": SECRET_KEY, "REGION": REGION, "FORCE_PATH_STYLE": "true", "LIST_VERSION": "2",
        }  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        environment |= {f"RCLONE_CONFIG_BENCH_{key}": value for key, value in remote.items()}
        command = ["rclone", "mount", f"bench:{BUCKET}", str(self.mount), "--vfs-cache-mode", "full", "--read-only"]
        command += ["--cache-dir", str(self.folder / "kept"), "--config", os.devnull]
        self._rclone = subprocess.Popen([*ends_with_us("TERM"), *command], env=environment, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + MOUNTED_S_MAX
        while not os.path.ismount(self.mount):
            if self._rclone.poll() is not None or time.monotonic() > deadline_s:
                raise BenchError(f"rclone did not mount: status {self._rclone.poll()}")
            time.sleep(0.05)
        super().start(origin)

    def close(self) -> None:
        super().close()
        rclone, self._rclone = self._rclone, None
        if rclone is not None:
            subprocess.run(["fusermount3", "-u", str(self.mount)], check=False)
            rclone.terminate()
            rclone.wait(10)


def second_epochs(root: Path, folder: Path, samples: epochs.Samples, options: Any) -> Any:
    """Measure second epochs. Each library keeps what its uncounted first epoch fetched, in its own format."""
    scratch = root / "scratch"
    scratch.rmdir()
    scratch.symlink_to(folder)  # the copies are on the disk, not in memory
    clients = options.select(
        [
            epochs.Loads("penstock", "penstock", cache=f"{folder / 'cache'}:{CACHE_BYTES}"),
            Mounted("rclone mount", folder / "rclone"),
            epochs.Loads("litdata 8", "litdata", workers=8, keep=True),
            epochs.Loads("litdata best", "litdata", workers=2, keep=True),
            epochs.Loads("mosaicml 8", "mosaicml", workers=8, keep=True),
            epochs.Loads("mosaicml best", "mosaicml", workers=3, keep=True),
        ]
    )
    if not shutil.which("rclone") or not shutil.which("fusermount3"):
        print("cache: rclone mount sits out: apt-get install rclone fuse3", file=sys.stderr)
        clients = [client for client in clients if not isinstance(client, Mounted)]
    for driver in {client.driver for client in clients} - {"penstock"}:
        epochs.pack(root, driver, root / BUCKET / "tar", root / BUCKET / driver)
    job = {"prefix": "tar", "litdata": "litdata", "mosaicml": "mosaicml"}
    question = f"the second epoch of {len(samples)} JPEGs of {samples.image_bytes // 1000} KB, undecoded"
    return epochs.compare(question, root, clients, samples, job, options.turns(5, 1))


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(json.loads(sys.argv[2]))))
        return
    options = arguments(__doc__ or "", at={"help": "a folder on the disk to be measured; default: the temporary one"})
    count, size_bytes, pictures = (4, 16 * MIB, 1024) if options.quick else (16, 64 * MIB, 4096)
    shared_bytes = (8 if options.quick else 32) * MIB  # of 16, so that the cost of fresh memory is paid once by either
    with (
        objects({"big": (count, size_bytes), "shared": (16, shared_bytes)}) as root,
        tempfile.TemporaryDirectory(dir=options.at) as name,
    ):
        folder = Path(name)
        (root / "scratch").mkdir()
        shutil.copytree(root / BUCKET / "big", folder / "files")
        samples = epochs.Samples(photographs(40 if options.quick else 200))
        each = max(1, (16 if options.quick else 64) * MIB // samples.image_bytes)
        counts = [min(each, pictures - begun) for begun in range(0, pictures, each)]
        samples.write_tars(root / BUCKET / "tar", counts, "jpg")
        if not options.only:
            bench = Bench(folder)
            rows, record = shards_as_bytes(root, bench, count * size_bytes, options.turns(3, 1))
            counts = (PROCESSES[0], PROCESSES[-1]) if options.quick else PROCESSES
            rows += processes_together(root, bench, 16 * shared_bytes, options.turns(1, 1), counts)
            table, record["rates"] = tabulated(bench, record["disk_write_mb_per_s"])
            record["data_bytes"] = count * size_bytes
            print_report("cache: shards as bytes", table, rows, {"bench": "cache", **record, **surroundings()})
        run = second_epochs(root, folder, samples, options)
        peers = {
            "LitData": run.best("samples/s", "litdata 8", "litdata best"),
            "MosaicML Streaming": run.best("samples/s", "mosaicml 8", "mosaicml best"),
            "rclone mount": "rclone mount",
        }
        run.report(
            [
                Row(f"samples/s : {name}", run.ratios("samples/s", "penstock", best), 1, 1.5)
                for name, best in peers.items()
            ]
        )


if __name__ == "__main__":
    main()
