"""The same TFRecords in TensorFlow through Pipe, Fast File and directly: steps per second, averaged from the start of the job.

Records of 100 KB lie in files of 200 MB, each of which is read once, so that no page cache has them. Pipe is `PipeReader` in a
`from_generator`, because `TFRecordDataset` cannot read pipes. Fast File is `TFRecordDataset` on the mounted files, as it comes.
"direct" is `penstock.tensorflow.dataset` on the store, without `penstock run`. A step is a batch of 50 records, and the program
notes the time of every 1 000 records; the clock starts with the command, so imports, the mount and the first listing count.
The CPU share is that of all processes of the job over its whole time, of all processors; the server is not among them.

Each way runs without work, and with steps that hash as many bytes as one processor hashes in 2 ms, which stand for what a
training step costs the host. Before the runs that count, the CRC-32 of every byte is compared once for each way.

The server has 30 ms before each answer and 90 MB/s per connection, and then no delay. It takes about 5 minutes; --quick one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from clients import BUCKET, HERE, Function
from harness import arguments, memory_folder
from jobs import RUN, SLOW, program

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

PYTHON = HERE.parent / ".venvs" / "tensorflow" / "bin" / "python"
PROGRAM = HERE / "peers" / "train_modes.py"
RECORD_BYTES, FILE_RECORDS, DIFFERENT_FILES = 100_000, 2_000, 3
BATCH, NOTED_RECORDS = 50, 1_000
FILES_COUNT, QUICK_FILES_COUNT, CHECKED_FILES_COUNT = 50, 4, 3
STEP_S = 0.002
WAYS = {"Pipe": "pipe", "Fast File": "fastfile", "direct": "direct"}
SHOWN = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class Case:
    """One network and one kind of step."""

    name: str
    network: dict[str, Any]
    step_s: float


CASES = (
    Case("30 ms, 90 MB/s a connection", SLOW, 0),
    Case("the same, steps of 2 ms", SLOW, STEP_S),
    Case("no delay", {}, 0),
    Case("no delay, steps of 2 ms", {}, STEP_S),
)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def framed(number: int, content: bytes) -> bytes:
    """Return a TFRecord that begins and ends with its number, and has the CRC-32 of what lies between."""
    from penstock.formats.tfrecord import masked_crc

    name = number.to_bytes(8, "little")
    record = name + zlib.crc32(content).to_bytes(4, "little") + content + name
    head = len(record).to_bytes(8, "little")
    crcs = (masked_crc(part).to_bytes(4, "little") for part in (head, record))
    return head + next(crcs) + record + next(crcs)


@contextmanager
def stored(files_count: int) -> Iterator[Path]:
    """Create the files: a few different ones under many names, since each name is an object of its own to all readers."""
    with memory_folder() as root:
        folder = root / BUCKET / "records"
        folder.mkdir(parents=True)
        noise = Random(0).randbytes(2 * RECORD_BYTES)
        for index in range(files_count):
            path = folder / f"{index:03d}.tfrecord"
            if index >= DIFFERENT_FILES:
                path.hardlink_to(folder / f"{index % DIFFERENT_FILES:03d}.tfrecord")
                continue
            with path.open("wb") as file:
                for number in range(index * FILE_RECORDS, (index + 1) * FILE_RECORDS):
                    at = number * 16 % RECORD_BYTES
                    file.write(framed(number, noise[at : at + RECORD_BYTES - 20]))
        yield root


def expected(files_count: int) -> list[int]:
    """Return how often each record comes; the first number stands for records that are not whole."""
    each = [len(range(index, files_count, DIFFERENT_FILES)) for index in range(DIFFERENT_FILES)]
    return [0] + [count for count in each for _ in range(FILE_RECORDS)]


def hashed_bytes(seconds: float) -> int:
    """Return how many bytes one processor hashes in so many seconds."""
    block = bytes(1 << 22)
    times_s = []
    for _ in range(7):
        begin_s = time.perf_counter()
        hashlib.sha256(block)
        times_s.append(time.perf_counter() - begin_s)
    return round(len(block) * seconds / min(times_s))


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trained(
    origin: Origin, mode: str, files_count: int, *, step_bytes: int = 0, checks: bool = False
) -> dict[str, Any]:
    """Run the program once over the first files, and check which records it has seen."""
    prefix = "records" if files_count > CHECKED_FILES_COUNT else "checked"
    job = {
        "begin_s": time.monotonic(), "batch": BATCH, "record_bytes": RECORD_BYTES, "step_bytes": step_bytes, "checks": checks,
        "different_count": DIFFERENT_FILES * FILE_RECORDS,
        "urls": [f"s3://{BUCKET}/{prefix}/{index:03d}.tfrecord" for index in range(files_count)],
    }  # fmt: skip
    words = [PYTHON, PROGRAM, mode, json.dumps(job)]
    if mode != "direct":
        words = [*RUN, "-c", f"train=s3://{BUCKET}/{prefix}/,mode={mode}", "--", *words]
    variables = {"BENCH_RUN": uuid.uuid4().hex, "PYTHONPATH": str(HERE.parent / "src")}
    answer = json.loads(program(origin, *words, **variables))
    if answer["counts"] != expected(files_count):
        raise BenchError(f"{mode}: records are missing, repeated or damaged: {answer['counts'][:10]}...")
    return answer


def measure(case: Case, root: Path, files_count: int, options: Any) -> Run:
    """Let the ways take turns in one case."""
    cores = os.cpu_count() or 1
    step_bytes = hashed_bytes(case.step_s) if case.step_s else 0
    records_count = files_count * FILE_RECORDS
    metrics = {
        f"steps/s, {count}": lambda answer, count=count: average(answer, count)
        for count in SHOWN
        if count <= records_count
    }
    metrics["CPU share"] = lambda answer: answer["cpu_s"] / answer["times_s"][-1] / cores
    with Origin(root, **case.network) as origin:
        clients = [
            Function(name, lambda mode=mode: trained(origin, mode, files_count, step_bytes=step_bytes), mode=mode)
            for name, mode in WAYS.items()
        ]
        with Run(f"modes: {case.name}", origin, options.select(clients), metrics, options.turns(1, 1)) as run:
            run.turns(lambda client: client.measure())
    last = f"steps/s, {max(count for count in SHOWN if count <= records_count)}"
    run.report(
        [Row(f"{name} : direct", run.ratios(last, name, "direct"), 0, 1) for name in WAYS if name != "direct"],
        step_bytes=step_bytes,
    )
    return run


def average(answer: dict[str, Any], records_count: int) -> float:
    """Return steps per second from the start of the job until so many records were read."""
    return records_count / BATCH / answer["times_s"][records_count // NOTED_RECORDS - 1]


def check_bytes(root: Path, options: Any) -> None:
    """Compare every byte once, in each way."""
    folder = root / BUCKET / "checked"
    folder.mkdir()
    for index in range(CHECKED_FILES_COUNT):
        name = f"{index:03d}.tfrecord"
        (folder / name).hardlink_to(root / BUCKET / "records" / name)
    with Origin(root) as origin:
        for client in options.select([Function(name, trained, origin, mode) for name, mode in WAYS.items()]):
            trained(origin, WAYS[client.name], CHECKED_FILES_COUNT, checks=True)
            print(f"modes: {client.name}: all bytes are right", file=sys.stderr)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def print_markdown(runs: dict[str, Run]) -> None:
    """Print one table of all cases."""
    metrics = list(next(iter(runs.values())).metrics)
    print(f"\n| | | {' | '.join(metrics)} |\n|---|---{'|---' * len(metrics)}|")
    for case, run in runs.items():
        for name in run.answers:
            values = [median(run.values(name, metric)) for metric in metrics]
            cells = [
                f"{value:.0%}" if m == "CPU share" else f"{value:.3g}" for m, value in zip(metrics, values, strict=True)
            ]
            print(f"| {case} | {name} | {' | '.join(cells)} |")


WIDTH, HEIGHT, LEFT, TOP, GUTTER = 400, 170, 52, 46, 30  # px, of one plot
COLOURS = {"Pipe": "#c7792f", "Fast File": "#2f81c7", "direct": "#6aa84f"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#78818a}.title{font-weight:600;font-size:13px}.end{text-anchor:end}"
    "polyline{fill:none;stroke-width:2}line{stroke:#78818a;stroke-opacity:.4}"
)


def plot(runs: dict[str, Run]) -> str:
    """Draw the averages of all cases over the number of records, as one SVG."""
    parts: list[str] = []
    for index, (case, run) in enumerate(runs.items()):
        left, top = index % 2 * (WIDTH + GUTTER), index // 2 * (HEIGHT + TOP + 30)
        parts += panel(case, run, left, top)
    width, height = 2 * WIDTH + GUTTER, -(-len(runs) // 2) * (HEIGHT + TOP + 30)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>Steps per second of Pipe, Fast File and direct reading, averaged from the start of the job</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def panel(case: str, run: Run, left: int, top: int) -> list[str]:
    """Draw one case."""
    curves = {name: curve(answers[-1]) for name, answers in run.answers.items()}
    largest = max(max(values) for values in curves.values())
    count = max(len(values) for values in curves.values())
    bottom, right = top + TOP + HEIGHT, left + WIDTH
    parts = [
        f'<text x="{left}" y="{top + 16}" class="title">{case}</text>',
        f'<line x1="{left + LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<text x="{left + LEFT - 6}" y="{bottom}" class="end">0</text>',
        f'<text x="{left + LEFT - 6}" y="{top + TOP + 8}" class="end">{largest:.3g}</text>',
        f'<text x="{left + LEFT}" y="{top + 34}">steps/s, average since the start of the job</text>',
        f'<text x="{right}" y="{bottom + 16}" class="end">{count * NOTED_RECORDS:,} records</text>'.replace(",", " "),
    ]
    for row, (name, values) in enumerate(curves.items()):
        points = " ".join(
            f"{left + LEFT + (at + 1) / count * (WIDTH - LEFT):.1f},{bottom - value / largest * (HEIGHT - 8):.1f}"
            for at, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" stroke="{COLOURS[name]}"/>')
        key = f'x="{right - 8}" y="{bottom - 12 - 16 * row}" class="end" style="fill:{COLOURS[name]}"'
        parts.append(f"<text {key}>{name}</text>")
    return parts


def curve(answer: dict[str, Any]) -> list[float]:
    return [average(answer, (at + 1) * NOTED_RECORDS) for at in range(len(answer["times_s"]))]


def main() -> None:
    options = arguments(
        __doc__ or "", plot={"type": Path, "help": "write the curves of the last turn to this SVG file"}
    )
    if not PYTHON.exists():
        raise BenchError(f"{PYTHON} is missing: make .venvs/tensorflow/.ready")
    files_count = QUICK_FILES_COUNT if options.quick else FILES_COUNT
    runs: dict[str, Run] = {}
    with stored(files_count) as root:
        check_bytes(root, options)
        for case in CASES[::2] if options.quick else CASES:
            runs[case.name] = measure(case, root, files_count, options)
    print_markdown(runs)
    if options.plot:
        options.plot.write_text(plot(runs))


if __name__ == "__main__":
    main()
