"""How fast are files read through the mount, beside `rclone mount` and s3fs?

All clients take turns within one run against one nginx, once with 30 ms before each answer and 90 MB/s per connection, and
once without delay. Each turn has a mount of its own, so nothing is left of the one before. Where a cache is measured, the
turns share the cache and the mount is new, so that the kernel holds no pages of it. The program that reads is another process
(`peers/read_files.c`), which costs little. Before the turns that count, each client reads everything once, and a sum of all
bytes is compared with that of the stored files. Folders are listed before the clock starts.

"rclone, tuned" has the settings that measured best for the row. A client that needs more than 60 s for a turn sits out.
All parts take about 15 minutes, of which --part chunks takes 4.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from clients import BUCKET, HERE, ran
from harness import MIB, arguments, keys_of, memory_folder, objects
from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

from penstock.bench.origin.server import Origin, ends_with_us
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

DELAYED = {"ttfb_ms": 30.0, "rate_bytes_per_s": 90_000_000}
NETWORKS: dict[str, dict[str, Any]] = {"30 ms, 90 MB/s a connection": DELAYED, "no delay": {}}
MOUNTED_S_MAX, TURN_S_MAX = 20.0, 60.0
SMALL_BYTES = 100_000
BUDGET_BYTES = 256 * MIB
CHUNKS = [4096 << power for power in range(12)]  # 4 KiB to 8 MiB
CHUNKS_BYTES = 128 * MIB
SHARES = (0.5, 0.8, 0.95)

SERVER_TIME = ["--use-server-modtime"]  # otherwise it sends a HEAD for each file
STREAMS = [*SERVER_TIME, "--vfs-read-chunk-size", "4M", "--vfs-read-chunk-streams", "16", "--max-read-ahead", "1M"]
PIECES = [*SERVER_TIME, "--vfs-read-chunk-size", "256K", "--vfs-read-chunk-size-limit", "off", "--buffer-size", "0"]
FULL = [*SERVER_TIME, "--vfs-cache-mode", "full", "--max-read-ahead", "1M"]

METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
    "objects/s": lambda answer: answer["objects"] / answer["seconds"],
    "CPU s": lambda answer: answer["cpu_s"],
    "peak MB": lambda answer: answer["peak_bytes"] / 1e6,
}


@dataclass(frozen=True)
class Sizes:
    """How much there is to read."""

    large_bytes: int = 1_000_000_000
    stream_bytes: int = 250_000_000
    small_count: int = 4000
    random_count: int = 2000
    listed_count: int = 100_000

    def prefixes(self, part: str) -> dict[str, tuple[int, int]]:
        """Return the objects that a part needs, as ``harness.objects`` takes them."""
        every: dict[str, dict[str, tuple[int, int]]] = {
            "one": {"large": (1, self.large_bytes)},
            "eight": {"stream": (8, self.stream_bytes)},
            "random-order": {"small": (self.small_count, SMALL_BYTES)},
            "listing-order": {"small": (self.small_count, SMALL_BYTES)},
            "random": {"large": (1, self.large_bytes)},
            "find": {f"names/{number:02d}": (self.listed_count // 100, 64) for number in range(100)},
            "chunks": {"chunks": (1, self.large_bytes)},
            "memory": {"handles": (32, self.large_bytes // 25)},
            "warm": {
                "large": (1, self.large_bytes),
                "stream": (8, self.stream_bytes),
                "small": (self.small_count, SMALL_BYTES),
            },
        }
        return every[part]


QUICK = Sizes(200_000_000, 40_000_000, 800, 300, 10_000)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mount:
    """A client that mounts the bucket anew for each turn.

    Args:
        name: Its name in the table.
        kind: ``penstock``, ``rclone``, ``s3fs``, ``budget``: penstock with a byte budget, or ``folder``: the stored files
            themselves through penstock's FUSE session, which is what a mount could reach at most.
        flags: Further words of the command; ``{cache}`` is a folder of its own that lives as long as the client.
    """

    driver = "mount"

    def __init__(self, name: str, kind: str, flags: Sequence[str] = ()) -> None:
        self.name, self.kind, self.flags = name, kind, list(flags)
        self.options: dict[str, Any] = {"flags": self.flags}
        self.versions: dict[str, str] = {}

    def start(self, origin: Origin | None) -> None:
        assert origin is not None
        self._url, self._root = origin.url, origin.root / BUCKET
        self._folder = origin.root / f"mounts-{self.name.replace(' ', '-').replace(',', '')}"
        self._folder.mkdir()
        (self._folder / "key").write_text(f"{ACCESS_KEY}:{SECRET_KEY}")
        (self._folder / "key").chmod(0o600)
        self._turns = itertools.count()
        program = {"rclone": str(HERE / ".venvs" / "rclone" / "bin" / "rclone"), "s3fs": "s3fs"}.get(self.kind)
        if program is not None:
            if not shutil.which(program):
                raise BenchError(f"{program} is missing; run bench/setup.sh")
            self.versions = {self.kind: re.search(r"[vV]([\d.]+)", ran(program, "--version"))[1]}

    def close(self) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self, directory: Path) -> list[str]:
        flags = [flag.format(cache=self._folder / "cache") for flag in self.flags]
        match self.kind:
            case "penstock":
                served = ["mount", f"s3://{BUCKET}", str(directory), "--endpoint-url", self._url, "--foreground"]
                return [sys.executable, "-m", "penstock", *served, "--metadata-ttl", "5min", *flags]
            case "budget":
                script = str(HERE / "peers" / "mount_penstock.py")
                return [sys.executable, script, f"s3://{BUCKET}@{self._url}", str(directory), *flags]
            case "folder":
                script = str(HERE / "peers" / "serve_folder.py")
                return [sys.executable, script, str(directory), str(self._root), *flags]
            case "rclone":
                program = str(HERE / ".venvs" / "rclone" / "bin" / "rclone")
                where = ["--config", os.devnull, "--cache-dir", str(self._folder / "cache")]
                return [program, "mount", f"bench:{BUCKET}", str(directory), "--read-only", *where, *flags]
            case _:
                options = ["use_path_request_style", "listobjectsv2", "ro", "nomixupload", f"url={self._url}"]
                options += [f"passwd_file={self._folder / 'key'}", f"tmpdir={self._folder}", *flags]
                return ["s3fs", BUCKET, str(directory), "-f", *(word for o in options for word in ("-o", o))]

    def _environment(self) -> dict[str, str]:
        remote = {
            "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": self._url, "ACCESS_KEY_ID": ACCESS_KEY,
            "SECRET_ACCESS_KEY": SECRET_KEY, "REGION": REGION, "FORCE_PATH_STYLE": "true", "LIST_VERSION": "2",
        }  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        environment |= {f"RCLONE_CONFIG_BENCH_{key}": value for key, value in remote.items()}
        environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
        return environment

    @contextmanager
    def mounted(self) -> Iterator[tuple[Path, int]]:
        """Mount the bucket; the directory, and the process that serves it."""
        directory = self._folder / f"mount-{next(self._turns)}"
        directory.mkdir()
        with (self._folder / "log").open("w+") as log:
            process = subprocess.Popen(
                [*ends_with_us("TERM"), *self._command(directory)],
                env=self._environment(), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                deadline_s = time.monotonic() + MOUNTED_S_MAX
                while not os.path.ismount(directory):
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        log.seek(0)
                        raise BenchError(f"did not mount: status {process.poll()}: {log.read()[-1000:]}")
                    time.sleep(0.02)
                yield directory, process.pid
            finally:
                process.stdin.close()
                subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, capture_output=True)
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        directory.rmdir()

    def measure(self, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        with self.mounted() as (directory, pid):
            before_s = time.perf_counter()
            try:
                answer = work(directory)
            except subprocess.TimeoutExpired as slow:
                raise BenchError(f"needed more than {TURN_S_MAX:g} s") from slow
            except subprocess.CalledProcessError as failed:
                elapsed_s = time.perf_counter() - before_s
                raise BenchError(f"{failed.cmd[0]} failed after {elapsed_s:.1f} s: {failed.stderr[-300:]}") from failed
            return answer | usage(pid)


class Local(Mount):
    """The stored files themselves, which are in memory."""

    def __init__(self) -> None:
        super().__init__("local files", "local")

    def start(self, origin: Origin | None) -> None:
        assert origin is not None
        self._root = origin.root / BUCKET

    @contextmanager
    def mounted(self) -> Iterator[tuple[Path, int]]:
        yield self._root, os.getpid()


class Cat(Mount):
    """``penstock cat`` of the same object, from its first byte on."""

    def __init__(self) -> None:
        super().__init__("penstock cat", "cat")

    def measure(self, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        command = [sys.executable, "-m", "penstock", "cat", f"s3://{BUCKET}/large/000000", "--endpoint-url", self._url]
        cat = subprocess.Popen(command, env=self._environment(), stdout=subprocess.PIPE)
        out = subprocess.run([READER, "stream"], stdin=cat.stdout, capture_output=True, text=True, check=True).stdout
        cat.stdout.close()
        if cat.wait(10):
            raise BenchError(f"penstock cat ended with status {cat.returncode}")
        return {**json.loads(out), "cpu_s": 0.0, "peak_bytes": 0}


READER = "/nowhere/read_files"


def usage(pid: int) -> dict[str, Any]:
    """Return CPU time and peak memory of a process and those that it started."""
    ticks, peak_bytes = 0, 0
    waiting = [pid]
    while waiting:
        now = waiting.pop()
        folder = Path(f"/proc/{now}")
        waiting += map(int, (folder / "task" / str(now) / "children").read_text().split())
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
        peak_bytes += int(re.search(r"VmHWM:\s+(\d+) kB", (folder / "status").read_text())[1]) * 1024
    return {"cpu_s": ticks / os.sysconf("SC_CLK_TCK"), "peak_bytes": peak_bytes}


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


def reads(paths: Sequence[str], *words: str, checks: bool = False, lists: str = "") -> Callable[[Path], dict[str, Any]]:
    """Return work that reads these files, after listing the folder `lists`, which is not timed."""

    def work(directory: Path) -> dict[str, Any]:
        if lists:
            subprocess.run(["ls", "-f", directory / lists], stdout=subprocess.DEVNULL, check=True, timeout=TURN_S_MAX)
        out = subprocess.run(
            [READER, *words], input="".join(f"{directory / path}\n" for path in paths), text=True,
            env=os.environ | ({"CHECK": "1"} if checks else {}), capture_output=True, check=True, timeout=TURN_S_MAX,
        ).stdout  # fmt: skip
        return json.loads(out)

    return work


def finds(sizes: Sizes) -> Callable[[Path], dict[str, Any]]:
    """Return work that walks all directories with find(1)."""

    def work(directory: Path) -> dict[str, Any]:
        before_s = time.perf_counter()
        command = ["find", directory / "names"]
        found = subprocess.run(command, capture_output=True, check=True, timeout=TURN_S_MAX).stdout.count(b"\n")
        answer = {"seconds": time.perf_counter() - before_s, "objects": found, "bytes": 0, "check": 0}
        if found != sizes.listed_count + 101:
            raise BenchError(f"find printed {found} lines")
        return answer

    return work


Work = Callable[[int, bool], Callable[[Path], dict[str, Any]]]
"""What to do in a turn: its number, and whether all bytes are summed."""


def compared(run: Run, work: Work) -> None:
    """Let the clients take turns, after each has read everything once and its sum was compared."""
    assert run.origin is not None
    root = run.origin.root / BUCKET
    wanted = work(0, True)(root)

    def check(client: Any) -> None:
        answer = client.measure(work(0, True))
        if not isinstance(client, Cat) and any(answer[name] != wanted[name] for name in ("bytes", "objects", "check")):
            raise BenchError(f"{client.name} delivered other bytes")

    turn = {client.name: itertools.count(1) for client in run.clients}
    run.turns(lambda client: client.measure(work(next(turn[client.name]), False)), warm=check)


PEERS = ("rclone", "rclone, tuned", "s3fs")


def peers(tuned: Sequence[str]) -> list[Mount]:
    counts = ["parallel_count=32", "multireq_max=64"]
    return [Mount("rclone", "rclone"), Mount("rclone, tuned", "rclone", tuned), Mount("s3fs", "s3fs", counts)]


def against(
    run: Run, metric: str, text: str, limits: tuple[float, float], *, names: Sequence[str] = PEERS
) -> list[Row]:
    """Return the row of penstock against the fastest peer."""
    best = run.best(metric, *names)
    return [Row(f"{text} : {best}", run.ratios(metric, "penstock", best), *limits)]


@contextmanager
def taking_turns(question: str, origin: Origin, clients: list[Any], options: Any) -> Iterator[Run]:
    run = Run(
        f"mount: {question}", origin, options.select(clients), METRICS, options.turns(3, 1),
        tolerates=lambda client: not client.name.startswith("penstock"),
    )  # fmt: skip
    with run:
        yield run


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def networks(part: str, root: Path) -> Iterator[tuple[int, str, Origin]]:
    for index, (network, settings) in enumerate(NETWORKS.items()):
        with Origin(root, **settings) as origin:
            yield index, f"{part}, {network}", origin


def one(root: Path, sizes: Sizes, options: Any) -> None:
    """One sequential reader of one large object."""
    limits = (1.4, 2.0), (1.3, 2.0)
    for index, question, origin in networks("one sequential reader", root):
        clients = [Mount("penstock", "penstock"), *peers(STREAMS), Cat()]
        with taking_turns(question, origin, clients, options) as run:
            compared(run, lambda _, checks: reads(["large/000000"], "whole", "1", checks=checks))
            rows = against(run, "MB/s", question, limits[index])
            run.report(
                [*rows, Row("one reader : penstock cat", run.ratios("MB/s", "penstock", "penstock cat"), 0, 0.85)]
            )


def eight(root: Path, sizes: Sizes, options: Any) -> None:
    """Eight sequential readers, each of a file of its own."""
    limits = (1.3, 2.0), (1.1, 1.5)
    for index, question, origin in networks("8 sequential readers", root):
        with taking_turns(question, origin, [Mount("penstock", "penstock"), *peers(STREAMS)], options) as run:
            compared(run, lambda _, checks: reads(keys_of("stream", 8), "whole", "8", checks=checks))
            run.report(against(run, "MB/s", question, limits[index]))


def random_order(root: Path, sizes: Sizes, options: Any) -> None:
    """Small files on 16 threads, in another random order in each turn."""

    def work(turn: int, checks: bool) -> Callable[[Path], dict[str, Any]]:
        keys = keys_of("small", sizes.small_count)
        Random(turn).shuffle(keys)
        return reads(keys, "whole", "16", checks=checks, lists="small")

    limits = (1.05, 1.1), (1.2, 1.6)
    for index, question, origin in networks("small files in random order", root):
        with taking_turns(question, origin, [Mount("penstock", "penstock"), *peers(SERVER_TIME)], options) as run:
            compared(run, work)
            rows = against(run, "objects/s", question, limits[index])
            if not index and "penstock" in run.answers:
                shares = [value / (16 / 0.03) for value in run.values("penstock", "objects/s")]
                rows.append(Row("16 threads behind 30 ms : 533/s", shares, 0, 0.95))
            run.report(rows)


def listing_order(root: Path, sizes: Sizes, options: Any) -> None:
    """Small files on 16 threads, in the order of their listing."""
    limits = (4.0, 8.0), (1.2, 1.6)
    keys = keys_of("small", sizes.small_count)
    for index, question, origin in networks("small files in the order of their listing", root):
        with taking_turns(question, origin, [Mount("penstock", "penstock"), *peers(SERVER_TIME)], options) as run:
            compared(run, lambda _, checks: reads(keys, "whole", "16", checks=checks, lists="small"))
            run.report(against(run, "objects/s", question, limits[index]))


def random_reads(root: Path, sizes: Sizes, options: Any) -> None:
    """Reads of 256 KiB at random places of one large object, on 8 threads, without a cache.

    s3fs always has one: it fetches far more than is asked for, and keeps all of it on its disk, which here is memory. It stands
    in a row of its own, without a limit.
    """
    limits = (2.5, 3.5), (2.5, 3.5)
    for index, question, origin in networks("random reads of 256 KiB", root):

        def work(turn: int, checks: bool) -> Callable[[Path], dict[str, Any]]:
            count = sizes.random_count
            return reads(["large/000000"], "random", "8", str(count), str(turn * count), checks=checks)

        with taking_turns(question, origin, [Mount("penstock", "penstock"), *peers(PIECES)], options) as run:
            compared(run, work)
            rows = against(run, "objects/s", question, limits[index], names=PEERS[:2])
            run.report([*rows, *against(run, "objects/s", question, (0, 1), names=PEERS[2:])])


def chunk_name(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // 1024} KiB"


def reads_chunks(turn: int, checks: bool) -> Callable[[Path], dict[str, Any]]:
    """Return work that reads one file in sequence, and then chunks of each size at random places of a file of their own."""

    def work(directory: Path) -> dict[str, Any]:
        sequential, *files = keys_of("chunks", len(CHUNKS) + 1)
        parts = {"sequential": reads([sequential], "whole", "1", checks=checks, lists="chunks")(directory)}
        for size_bytes, file in zip(CHUNKS, files, strict=True):
            count = max(12, min(32, CHUNKS_BYTES // size_bytes))
            words = ("chunks", "1", str(count), str(turn), str(size_bytes))
            parts[chunk_name(size_bytes)] = reads([file], *words, checks=checks)(directory)
        total = {name: sum(part[name] for part in parts.values()) for name in ("seconds", "bytes", "objects")}
        check = [part["check"] for part in parts.values()]
        return {**total, "check": check, "rates": {n: p["bytes"] / p["seconds"] / 1e6 for n, p in parts.items()}}

    return work


def chunks(root: Path, sizes: Sizes, options: Any) -> None:
    """Chunks of 4 KiB to 8 MiB at random places of one file, one after the other: from which size on is that nearly sequential?

    Every chunk is read once, and every size has a file of its own, so that the kernel's page cache answers nothing.
    No setting of rclone is best for all sizes: "pieces" is for small reads, and "streams" for large ones.
    """
    folder = root / BUCKET / "chunks"
    for number in range(1, len(CHUNKS) + 1):
        (folder / f"{number:06d}").hardlink_to(folder / "000000")
    names = ["sequential", *map(chunk_name, CHUNKS)]
    for _, question, origin in networks("random chunks", root):
        clients = [
            Mount("penstock", "penstock"),
            Mount("rclone", "rclone"),
            Mount("rclone, pieces", "rclone", PIECES),
            Mount("rclone, streams", "rclone", STREAMS),
        ]
        run = Run(
            f"mount: {question}, MB/s", origin, options.select(clients),
            {name: lambda answer, name=name: answer["rates"][name] for name in names}, options.turns(2, 1),
            tolerates=lambda client: client.name != "penstock",
        )  # fmt: skip
        with run:
            compared(run, reads_chunks)
            run.report([])
        _print_chunks(run, names)


def _print_chunks(run: Run, names: list[str]) -> None:
    """Print MB/s by size, and from which size on random reads reach a share of the sequential speed."""
    clients = list(run.answers)
    rates = {client: {name: median(run.values(client, name)) for name in names} for client in clients}
    print(f"\n| {run.question} | {' | '.join(clients)} |\n|---{'|---' * len(clients)}|")
    for name in names:
        print(f"| {name} | {' | '.join(f'{rates[client][name]:.3g}' for client in clients)} |")
    for share in SHARES:
        found = (smallest_chunk(rates[client], share) for client in clients)
        print(f"| smallest chunk at {share:.0%} of sequential | {' | '.join(found)} |")


def smallest_chunk(rates: dict[str, float], share: float) -> str:
    """Return the smallest size from which on all random reads reach a share of the sequential speed."""
    reached = ""
    for size_bytes in reversed(CHUNKS):
        if rates[chunk_name(size_bytes)] < share * rates["sequential"]:
            break
        reached = chunk_name(size_bytes)
    return reached or f"above {chunk_name(CHUNKS[-1])}"


def find(root: Path, sizes: Sizes, options: Any) -> None:
    """find(1) over 100 prefixes."""
    for _, question, origin in networks(f"find over {sizes.listed_count} keys", root):
        fast = [*SERVER_TIME, "--no-modtime", "--no-checksum"]
        with taking_turns(question, origin, [Mount("penstock", "penstock"), *peers(fast)], options) as run:
            compared(run, lambda *_: finds(sizes))
            run.report(against(run, "objects/s", question, (5.0, 10.0)))


def again(work: Work) -> Work:
    """Return work that is done twice in each mount, the second time with the clock."""

    def both(turn: int, checks: bool) -> Callable[[Path], dict[str, Any]]:
        once = work(turn, checks)
        return lambda directory: (once(directory), once(directory))[1]

    return both


def warm(root: Path, sizes: Sizes, options: Any) -> None:
    """Read what a cache in memory holds, beside the same files read locally.

    "Copied" is the stored files through the FUSE session without a cache: no mount that copies can be faster. The second
    reading in a mount is that of a second epoch, which finds the kernel's pages.
    """
    small = keys_of("small", sizes.small_count)
    cases: dict[str, tuple[str, Work]] = {
        "one reader": ("MB/s", lambda _, checks: reads(["large/000000"], "whole", "1", checks=checks)),
        "8 readers": ("MB/s", lambda _, checks: reads(keys_of("stream", 8), "whole", "8", checks=checks)),
        "small files": ("objects/s", lambda _, checks: reads(small, "whole", "16", checks=checks, lists="small")),
    }
    first = {case: (metric, work, (0.5, 0.9), (1.5, 3.0)) for case, (metric, work) in cases.items()}
    second = {f"{case} again": (metric, again(work), (0.0, 0.9), (0.0, 1.0)) for case, (metric, work) in cases.items()}
    for case, (metric, work, local_limits, peer_limits) in (first | second).items():
        with Origin(root) as origin:
            clients = [
                Mount("penstock", "penstock", ["--cache", "{cache}:8GB"]), Mount("rclone", "rclone", FULL), Local(),
                Mount("copied", "folder", []),
            ]  # fmt: skip
            with taking_turns(f"warm cache, {case}", origin, clients, options) as run:
                compared(run, work)
                local, peer = (run.ratios(metric, "penstock", name) for name in ("local files", "rclone"))
                rows = [
                    Row(f"warm, {case} : local files", local, *local_limits),
                    Row(f"warm, {case} : rclone", peer, *peer_limits),
                ]
                rows.append(Row(f"copied, {case} : local files", run.ratios(metric, "copied", "local files"), 0, 1))
                run.report(rows)


def memory(root: Path, sizes: Sizes, options: Any) -> None:
    """Peak memory with 32 files that are read at the same time."""
    with Origin(root, **DELAYED) as origin:
        clients = [Mount("penstock", "budget", [str(BUDGET_BYTES)]), *peers(STREAMS)]
        with taking_turns("32 open files", origin, clients, options) as run:
            compared(run, lambda _, checks: reads(keys_of("handles", 32), "whole", "32", checks=checks))
            peaks = run.values("penstock", "peak MB") if "penstock" in run.answers else []
            beyond = [value - BUDGET_BYTES / 1e6 for value in peaks]
            run.report([Row("peak beyond the budget, MB", beyond, 150, 100, less=True)])


PARTS = {
    "one": one,
    "eight": eight,
    "random-order": random_order,
    "listing-order": listing_order,
    "random": random_reads,
    "chunks": chunks,
    "find": find,
    "warm": warm,
    "memory": memory,
}


def main() -> None:
    global READER
    options = arguments(__doc__ or "", part={"choices": PARTS, "help": "only this part"})
    sizes = QUICK if options.quick else Sizes()
    with memory_folder() as folder:
        READER = str(folder / "read_files")
        ran("cc", "-O2", "-pthread", "-o", READER, HERE / "peers" / "read_files.c")
        for name, part in PARTS.items():
            if options.part in (None, name):
                with objects(sizes.prefixes(name)) as root:
                    part(root, sizes, options)


if __name__ == "__main__":
    main()
