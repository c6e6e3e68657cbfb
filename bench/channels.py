"""What do the channels of `penstock run` cost: files beside boto3 and the AWS CLI, pipes beside `cat`, and the start of a job?

--case small, large: a prefix becomes files in memory, in one command from its start to its end: `penstock run` in File mode,
`download_file` of boto3 in 32 threads, and `aws s3 sync` as it comes and with 32 requests. Beside them stand what wrk gets
from the store with 32 connections and what `cp` writes, each of them alone on the machine: the lower one is the limit of the
store or the disk. A download has to do both, and the server works meanwhile, so there is a second limit: the processors,
divided by the CPU time that the server, wrk and `cp` take for a byte.
--case pipe: MB/s of a pipe of local files, and of one from the store, beside `cat` of the same files into a FIFO of the same
size; the same reader counts from its first bytes to the end. `read_parts` of the files alone says what the engine allows.
--case start: seconds from the start of `penstock run` to the first record in the program, for each mode (`starts.py`).
"""

from __future__ import annotations

import filecmp
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from clients import BUCKET, HERE, Function, Wrk
from harness import MIB, arguments, objects
from jobs import RUN, SLOW, program
from starts import measure_starts

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

THREADS = 32
PEERS = HERE / "peers"


class Data(NamedTuple):
    """Objects of one prefix; if `is_one`, they are one file under many names, since memory holds the downloads, too."""

    prefix: str
    count: int
    size_bytes: int
    is_one: bool = False


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Downloads:
    """One prefix that becomes files, by several commands."""

    def __init__(self, root: Path, origin: Origin, data: Data) -> None:
        self._root = root
        self._origin = origin
        self._data = data
        self._source = root / BUCKET / data.prefix
        self._aws = HERE / ".venvs" / "awscli" / "bin" / "aws"

    def clients(self) -> list[Any]:
        tuned = "[default]\ns3 =\n  max_concurrent_requests = 32\n  multipart_chunksize = 16MB\n"
        (self._root / "aws-config").write_text(tuned)
        found: list[Any] = [
            Function("penstock run", self.measured, self.penstock),
            Function(f"boto3, {THREADS} threads", self.measured, self.boto3),
            Function("aws s3 sync", self.measured, self.aws, os.devnull),
            Function("aws s3 sync, 32 requests", self.measured, self.aws, str(self._root / "aws-config")),
            Function("cp", self.measured, self.copy),
        ]
        script = f"""
local n = -1
request = function()
  n = (n + 1) % {self._data.count}
  return wrk.format("GET", string.format("/{BUCKET}/{self._data.prefix}/%06d", n))
end"""
        return [*found, Wrk(connections=THREADS, seconds=2, script=script)]

    def measured(self, download: Any, *words: Any) -> dict[str, Any]:
        """Time one download into an empty folder, and compare the files."""
        folder = self._root / "downloaded"
        _warm_memory(self._root, self._data.count * self._data.size_bytes)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin_s = time.perf_counter()
        download(folder, *words)
        seconds = time.perf_counter() - begin_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._check(folder)
        shutil.rmtree(folder)
        return {
            "seconds": seconds, "bytes": self._data.count * self._data.size_bytes, "objects": self._data.count,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        }  # fmt: skip

    def penstock(self, folder: Path) -> None:
        url = f"train=s3://{BUCKET}/{self._data.prefix}/"
        program(self._origin, *RUN, "-c", url, "--base", folder, "--", "true")

    def boto3(self, folder: Path) -> None:
        python = HERE / ".venvs" / "boto3" / "bin" / "python"
        words = (self._origin.url, BUCKET, f"{self._data.prefix}/", folder, THREADS)
        program(self._origin, python, PEERS / "download_boto3.py", *words)

    def aws(self, folder: Path, config: str) -> None:
        source = f"s3://{BUCKET}/{self._data.prefix}"
        command = [self._aws, "s3", "sync", "--only-show-errors", source, folder]
        program(self._origin, *command, AWS_CONFIG_FILE=config)

    def copy(self, folder: Path) -> None:
        program(None, "cp", "-r", self._source, folder)

    def _check(self, folder: Path) -> None:
        below = folder / "input" / "data" / "train"
        folder = below if below.is_dir() else folder
        found = {path.name: path.stat().st_size for path in folder.iterdir()}
        wanted = {path.name: path.stat().st_size for path in self._source.iterdir()}
        if found != wanted:
            raise BenchError(f"{len(found)} files are there, or have wrong sizes, not {len(wanted)}")
        names = sorted(wanted)
        _, *wrong = filecmp.cmpfiles(folder, self._source, [*names[:20], *names[-2:]], shallow=False)
        if any(wrong):
            raise BenchError(f"these files are wrong: {wrong}")


def _warm_memory(folder: Path, size_bytes: int) -> None:
    """Touch as much memory as the files will take: a virtual machine gets memory that it uses for the first time from its host.

    That costs more CPU time than a download, and whoever comes first would pay it.
    """
    path = folder / "warm"
    zeros = bytes(16 * MIB)
    with path.open("wb") as file:
        for _ in range(-(-size_bytes // len(zeros))):
            file.write(zeros)
    path.unlink()


@contextmanager
def _named(root: Path, data: Data) -> Iterator[None]:
    """Give the one file of `data` its names."""
    folder = root / BUCKET / data.prefix
    for number in range(1, data.count if data.is_one else 0):
        (folder / f"{number:06d}").hardlink_to(folder / "000000")
    yield


def measure_files(options: Any, data: Data, *, delayed: bool) -> None:
    question = f"File: {data.count} files of {data.size_bytes:_} bytes, {'30 ms' if delayed else 'no delay'}"
    metrics = {
        "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
        "files/s": lambda answer: answer["objects"] / answer["seconds"],
        "CPU s/GB": lambda answer: answer["cpu_s"] / answer["bytes"] * 1e9,
        "server's": lambda answer: answer["server_cpu_s"] / answer["bytes"] * 1e9,
    }
    with (
        objects({data.prefix: (1 if data.is_one else data.count, data.size_bytes)}) as root,
        _named(root, data),
        Origin(root, **(SLOW if delayed else {})) as origin,
    ):
        downloads = Downloads(root, origin, data)
        run = Run(question, origin, options.select(downloads.clients()), metrics, options.turns(3, 1))
        run.tolerates = lambda client: client.name.startswith("aws")
        with run:
            run.turns(lambda client: _with_server(client, origin))
    ours, boto3 = "penstock run", f"boto3, {THREADS} threads"
    aws = run.best("MB/s", "aws s3 sync", "aws s3 sync, 32 requests")
    rows = [
        Row(f"{question}: boto3", run.ratios("MB/s", ours, boto3), 3, 5),
        Row(f"{question}: aws s3 sync at its best", run.ratios("MB/s", ours, aws), 2, 5),
    ]
    if {ours, "wrk", "cp"} <= set(run.answers):
        each = zip(*(run.values(name, "MB/s") for name in (ours, "wrk", "cp")), strict=True)
        rows.append(Row(f"{question}: the store or cp", [rate / min(limits) for rate, *limits in each], 0.7, 0.95))
        shared = [rate / limit for rate, limit in zip(run.values(ours, "MB/s"), _shared_limits(run), strict=True)]
        rows.append(Row(f"{question}: server, wrk and cp on the same processors", shared, 0.7, 0.95))
    run.report(rows)


def _with_server(client: Any, origin: Origin) -> dict[str, Any]:
    before_s = origin.cpu_s()
    answer = client.measure()
    return {**answer, "server_cpu_s": origin.cpu_s() - before_s}


def _shared_limits(run: Run) -> list[float]:
    """Return, for each turn, the MB/s at which server, wrk and cp together keep all processors busy."""
    costs = (run.values("wrk", "server's"), run.values("wrk", "CPU s/GB"), run.values("cp", "CPU s/GB"))
    return [1000 * len(os.sched_getaffinity(0)) / sum(each) for each in zip(*costs, strict=True)]


# ── pipes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_cat(root: Path, source: Path) -> dict[str, Any]:
    fifo = root / "fifo"
    os.mkfifo(fifo)
    try:
        files = sorted(str(path) for path in source.iterdir())
        with subprocess.Popen(["sh", "-c", 'exec cat "$@" > "$0"', str(fifo), *files]) as cat:
            answer = json.loads(program(None, sys.executable, PEERS / "read_fifo.py", fifo))
            if cat.wait():
                raise BenchError("cat failed")
    finally:
        fifo.unlink()
    return answer


def by_pipe(origin: Origin | None, url: str) -> dict[str, Any]:
    script = 'exec "$0" "$1" "$SM_CHANNEL_TRAIN"_0'
    reader = ["sh", "-c", script, sys.executable, PEERS / "read_fifo.py"]
    return json.loads(program(origin, *RUN, "-c", f"train={url},mode=pipe", "--", *reader))


def by_engine(source: Path) -> dict[str, Any]:
    """Read the files without a pipe, and drop what was read."""
    from penstock import connect

    with connect(str(source)) as store:
        chunks = store.read_parts(sorted(path.name for path in source.iterdir()))
        first_bytes = len(next(chunks).data)
        begin_s = time.perf_counter()
        size_bytes = sum(len(chunk.data) for chunk in chunks)
        seconds = time.perf_counter() - begin_s
    return {"bytes": size_bytes, "all_bytes": first_bytes + size_bytes, "seconds": seconds}


def measure_pipe(options: Any) -> None:
    count, size_bytes = (4, 64 * MIB) if options.quick else (16, 128 * MIB)
    question = f"Pipe: {count} files of {size_bytes // MIB} MiB"
    with objects({"pipe": (count, size_bytes)}) as root, Origin(root) as origin:
        source = root / BUCKET / "pipe"
        clients = [
            Function("cat", by_cat, root, source),
            Function("engine alone", by_engine, source),
            Function("penstock, local files", by_pipe, None, str(source)),
            Function("penstock, from the store", by_pipe, origin, f"s3://{BUCKET}/pipe/"),
        ]
        metrics = {"MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6}
        with Run(question, origin, options.select(clients), metrics, options.turns(5, 2)) as run:
            run.turns(lambda client: _whole(client.measure(), count * size_bytes))
    ours = "penstock, local files"
    rows = [Row(f"{question}: cat", run.ratios("MB/s", ours, "cat"), 0.7, 0.95)]
    if {ours, "cat", "engine alone"} <= set(run.answers):
        each = zip(*(run.values(name, "MB/s") for name in (ours, "cat", "engine alone")), strict=True)
        rates = [rate / min(limits) for rate, *limits in each]
        rows.append(Row(f"{question}: cat or the engine alone, whichever is slower", rates, 0.7, 0.95))
    run.report(rows)


def _whole(answer: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    if answer["all_bytes"] != size_bytes:
        raise BenchError(f"{answer['all_bytes']} bytes came through the pipe, not {size_bytes}")
    return answer


CASES = {
    "small": lambda options: [
        measure_files(options, Data("small", 1000 if options.quick else 10_000, 100_000), delayed=delayed)
        for delayed in (False, True)
    ],
    "large": lambda options: [
        measure_files(
            options, Data("large", *((3, 10**8) if options.quick else (10, 10**9)), is_one=True), delayed=delayed
        )
        for delayed in (False, True)
    ],
    "pipe": measure_pipe,
    "start": measure_starts,
}


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": list(CASES), "help": "one of the questions; all if it is left out"})
    for name, question_of in CASES.items():
        if chosen.case in (None, name):
            question_of(chosen)
