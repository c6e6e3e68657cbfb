"""How long does a job wait for its first record, by numbers of keys and prefixes, in each mode, with and without a manifest?

The keys are listed and have the same bytes, so a million of them cost the server little. It answers after 30 ms and sends
90 MB/s on each connection. A turn is one `penstock run` from its start until the program has read its first record, which is
compared; "all names first" lists every file before, as programs do that call `glob` or `list_files`.

File mode has all files on the disk before the program starts, so it is measured up to 10 000 keys: what it takes with more is
the rate of its downloads (`--case small`) and not its start. "mount --manifest" is the command `penstock mount` instead of a
channel, because FastFile mode mounts prefixes.

MB is the memory of all processes of penstock when the first record was read.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from clients import BUCKET, HERE, Function
from harness import memory_folder
from jobs import PENSTOCK, RUN, SLOW, program

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Run

READER = HERE / "peers" / "read_first.py"
RECORD = b"0123456789" * 10
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
PREFIXES = (1, 100, 10_000)
FILE_COUNT_MAX = 10_000
LARGE_COUNT = 1_000_000


class Start(NamedTuple):
    """One way to begin: the options of the channel, which names are read first, and where its names come from."""

    options: str = ""
    names: str = "first"
    source: str = "prefix"
    count_max: int = LARGE_COUNT


STARTS = {
    "File": Start("mode=file", count_max=FILE_COUNT_MAX),
    "File, manifest": Start("mode=file,type=ManifestFile", source="manifest", count_max=FILE_COUNT_MAX),
    "File, lazy": Start("mode=file,start=lazy"),
    "Pipe": Start("mode=pipe"),
    "Pipe, manifest": Start("mode=pipe,type=ManifestFile", source="manifest"),
    "Pipe, shuffled": Start("mode=pipe,seed=1"),
    "Pipe, shuffled, manifest": Start("mode=pipe,type=ManifestFile,seed=1", source="manifest"),
    "FastFile": Start("mode=fastfile"),
    "FastFile, all names first": Start("mode=fastfile", names="all"),
    "mount --manifest": Start(source="mount"),
    "mount --manifest, all names first": Start(names="all", source="mount"),
}


def keys_of(count: int, prefixes: int) -> Iterator[str]:
    each = count // prefixes
    return (f"data/{number // each:05d}/{number:07d}.jpg" for number in range(count))


def write_manifest(root: Path, origin: Origin, keys: list[str]) -> None:
    """Write the manifest that `penstock manifest` would write, beside the bucket, so that no listing shows it."""
    with urllib.request.urlopen(f"{origin.url}/{BUCKET}/{keys[0]}") as answer:
        etag = answer.headers["ETag"].strip('"')
    folder = root / "manifests"
    folder.mkdir(exist_ok=True)
    with (folder / "data.jsonl").open("w") as file:
        file.write(json.dumps({"penstock_manifest": 1, "base_url": f"s3://{BUCKET}/data/"}) + "\n")
        for key in keys:
            file.write(json.dumps({"key": key.removeprefix("data/"), "size_bytes": len(RECORD), "etag": etag}) + "\n")


class Started:
    """Begins jobs on one set of keys."""

    def __init__(self, origin: Origin, keys: list[str]) -> None:
        self._origin = origin
        self._count = len(keys)

    def measured(self, start: Start) -> dict[str, Any]:
        """Begin a job, and check what its program read."""
        begin_s = time.monotonic()
        answer = self._mounted(start) if start.source == "mount" else self._run(start)
        if answer["record"] != RECORD.decode():
            raise BenchError(f"the first record is {answer['record']!r}")
        if start.names == "all" and answer["names"] != self._count:
            raise BenchError(f"{answer['names']} names were listed, not {self._count}")
        return {"seconds": answer["first_s"] - begin_s, "serving_bytes": answer["serving_bytes"]}

    def _run(self, start: Start) -> dict[str, Any]:
        url = "s3://manifests/data.jsonl" if start.source == "manifest" else f"s3://{BUCKET}/data/"
        words = ["-c", f"train={url},{start.options}", "--", sys.executable, READER, start.names]
        return json.loads(program(self._origin, *RUN, *words, BENCH_RUN=uuid.uuid4().hex))

    def _mounted(self, start: Start) -> dict[str, Any]:
        directory = Path(tempfile.mkdtemp(prefix="penstock-start-"))
        ttl = ["--metadata-ttl", "indefinite"]
        name = uuid.uuid4().hex
        try:
            command = [*PENSTOCK, "mount", f"s3://{BUCKET}/data/", directory, "--manifest", "s3://manifests/data.jsonl"]
            program(self._origin, *command, *ttl, BENCH_RUN=name)
            try:
                return json.loads(program(None, sys.executable, READER, start.names, directory, BENCH_RUN=name))
            finally:
                program(None, *PENSTOCK, "umount", directory)
        finally:
            subprocess.run(["fusermount3", "-u", "-z", directory], check=False, capture_output=True)
            shutil.rmtree(directory, ignore_errors=True)


Answers = dict[str, dict[tuple[int, int], tuple[float, float]]]
"""For each way, by numbers of keys and of prefixes, the medians of the seconds and of the MB."""


def measure_starts(options: Any) -> None:
    counts, prefixes = ((1_000, 10_000), (1, 100)) if options.quick else (COUNTS, PREFIXES)
    print("The whole matrix takes about 9 minutes on an idle machine; --quick takes one.", file=sys.stderr)
    answers: Answers = {}
    for count in counts:
        for number in prefixes:
            if number < count:
                _measure(options, count, number, answers)
    _print_markdown(answers)


def _measure(options: Any, count: int, prefixes: int, answers: Answers) -> None:
    """Let all ways begin on one set of keys, in turns."""
    keys = list(keys_of(count, prefixes))
    with memory_folder() as root, Origin(root, listed={BUCKET: keys}, content=RECORD, **SLOW) as origin:
        write_manifest(root, origin, keys)
        started = Started(origin, keys)
        ways = {name: start for name, start in STARTS.items() if count <= start.count_max}
        clients = options.select([Function(name, started.measured, start) for name, start in ways.items()])
        metrics = {"seconds": lambda answer: answer["seconds"], "MB": lambda answer: answer["serving_bytes"] / 1e6}
        turns = options.turns(1 if count >= LARGE_COUNT else 2, 1)
        question = f"start of a job: {count} keys in {prefixes} prefixes, 30 ms"
        with Run(question, origin, clients, metrics, turns) as run:
            run.turns(lambda client: client.measure())
    run.report([])
    for client in clients:
        seconds, mb = (median(run.values(client.name, name)) for name in metrics)
        answers.setdefault(client.name, {})[count, prefixes] = seconds, mb


def _print_markdown(answers: Answers) -> None:
    """Print the seconds of all ways as one table, and their memory as another."""
    columns = sorted({column for row in answers.values() for column in row})
    for index, what in enumerate(("s to the first record", "MB")):
        names = [f"{count:_} in {prefixes:_}".replace("_", " ") for count, prefixes in columns]
        print(f"\n| {what}; keys in prefixes | {' | '.join(names)} |\n|---{'|---' * len(columns)}|")
        for way, row in answers.items():
            cells = (f"{row[column][index]:.3g}" if column in row else "" for column in columns)
            print(f"| {way} | {' | '.join(cells)} |")
    least, most = (1_000, 1), (LARGE_COUNT, 1)
    each = {
        way: (row[most][1] - row[least][1]) * 1e6 / (most[0] - least[0])
        for way, row in answers.items()
        if least in row and most in row
    }
    if each:
        print("\nbytes per key: " + ", ".join(f"{way} {value:.0f}" for way, value in each.items()))
