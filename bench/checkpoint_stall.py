"""How long does a checkpoint stop the training loop, and what share of the training time is lost to checkpoints?

A loop whose steps are waits, as those of a CPU that feeds a GPU, saves 1.7 GB of model and AdamW state every N steps: by
``ps.torch.Checkpoint`` in the background and waiting, by the S3 Connector's ``S3Checkpoint``, by boto3 from memory, and to a
file on the local disk that boto3 uploads. The stall, without what a save waits for the one before, is compared with one copy of
the state to memory that was used before, in the same process. The store takes 30 ms to answer and 90 MB/s on each connection,
or has no delay (``--without-delay``).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients import BUCKET, HERE
from harness import arguments, memory_folder

from penstock.bench.origin.server import ends_with_us
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

STALL_LIMIT, STALL_TARGET = 1.10, 1.0
SAVES = 3


class Loop:
    """A training loop in a process of its own; a new one for each turn."""

    def __init__(self, name: str, way: str, venv: str | None = None) -> None:
        self.name, self.way, self.venv = name, way, venv
        self.options = {"way": way}
        self.versions: dict[str, str] = {}

    def start(self, origin: Any) -> None:
        """Nothing runs between turns."""

    def close(self) -> None:
        """Nothing runs between turns."""

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        python = Path(sys.executable) if self.venv is None else HERE / ".venvs" / self.venv / "bin" / "python"
        if not python.exists():
            raise BenchError(f"{self.name}: {python} is missing; run bench/setup.sh")
        command = [str(python), str(HERE / "peers" / "train_saving.py"), json.dumps({**job, "way": self.way})]
        done = subprocess.run([*ends_with_us("KILL"), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{self.name}: {done.stderr[-1000:]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        self.versions = answer.pop("versions")
        return answer


WAYS = [
    Loop("penstock, in the background", "penstock"),
    Loop("penstock, waiting", "penstock_wait"),
    Loop("connector", "connector", "s3torchconnector"),
    Loop("boto3", "boto3"),
    Loop("local disk, then boto3", "disk_boto3"),
]


@contextmanager
def sink(*, ttfb_ms: float, rate_bytes_per_s: int) -> Iterator[str]:
    """Serve an S3 that takes uploads, in a process of its own; its URL."""
    command = [sys.executable, str(HERE / "sink.py"), f"--ttfb-ms={ttfb_ms}", f"--rate={rate_bytes_per_s}"]
    with subprocess.Popen(
        [*ends_with_us("KILL"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def measure(options: Any, every: int) -> None:
    state_bytes = 60_000_000 if options.quick else 1_700_000_000
    step_s = 0.02 if options.quick else 0.05
    saves = 2 if options.quick else SAVES
    delay = (
        {"ttfb_ms": 0, "rate_bytes_per_s": 0}
        if options.without_delay
        else {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
    )
    where = "without delay" if options.without_delay else "30 ms, 90 MB/s for each connection"
    metrics = {
        "stall ms": lambda answer: 1000 * statistics.median(answer["stalls_s"]),
        "stall : copy": lambda answer: statistics.median(answer["stalls_s"]) / statistics.median(answer["copies_s"]),
        "wait for the save before ms": lambda answer: 1000 * statistics.median(answer["waits_s"]),
        "time lost %": lambda answer: 100 * (1 - every * saves * step_s / answer["loop_s"]),
        "wait at the end s": lambda answer: answer["end_s"],
    }
    question = f"{state_bytes / 1e9:.2g} GB every {every} steps of {1000 * step_s:g} ms, {where}"
    clients = options.select(WAYS)
    with memory_folder() as folder, sink(**delay) as endpoint:  # type: ignore[arg-type]
        job = {
            "endpoint": endpoint, "bucket": BUCKET, "folder": options.folder or str(folder), "state_bytes": state_bytes,
            "steps": every * saves, "every": every, "step_s": step_s, "threads": 2,
        }  # fmt: skip
        with Run(
            question, None, clients, metrics, options.turns(3, 1), tolerates=lambda client: client.venv is not None
        ) as run:
            run.turns(lambda client: client.measure(job))
    ours = WAYS[0].name
    rows = [
        Row("stall : one copy of the state", run.values(ours, "stall : copy"), STALL_LIMIT, STALL_TARGET, less=True)
    ]
    for other in WAYS[2:]:
        ratios = run.ratios("time lost %", ours, other.name)
        rows.append(Row(f"time lost : {other.name}", ratios, 1.0, 0.5, less=True))
    run.report(rows, every=every, where=where)


if __name__ == "__main__":
    chosen = arguments(
        __doc__,
        every={
            "type": int,
            "choices": [10, 100, 1000],
            "help": "steps between two saves; default: each of 10, 100, 1000",
        },
        folder={
            "help": "folder on the local disk for the files that boto3 uploads; default: in memory, which favours it"
        },
        without_delay={"action": "store_true", "help": "a store on loopback as it is"},
    )
    for one in (10,) if chosen.quick and not chosen.every else (10, 100, 1000):
        if chosen.every in (None, one):
            measure(chosen, one)
