"""How much do several event loops gain over TLS, and for how much of the time does each hold the interpreter?

The client reads large objects in order. py-spy samples which thread holds the interpreter lock, in a separate turn that is
not timed. On two cores, client and server share the processors, and the rates mean little; run this with eight or more.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from clients import HERE, Client
from harness import arguments, keys_of, objects, verified

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

OBJECT_BYTES = 100 << 20
COUNT = 8
SAMPLES_PER_S = 200
SAMPLED_S = 3
CORES_MIN = 8  # with fewer, loops and server compete for the same cores
METRICS = {
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
    "CPU ms/GB": lambda answer: answer["cpu_s"] / answer["bytes"] * 1e12,
    "interpreter held by each loop, %": lambda answer: 100 * answer["held_each"],
    "by all of them, %": lambda answer: 100 * answer["held_all"],
}


def shares_held(client: Client, read: Any) -> list[float]:
    """Return for each event loop the share of samples in which it holds the interpreter lock during `read()`."""
    sampler = HERE / ".venvs" / "pyspy" / "bin" / "py-spy"
    if not sampler.exists():
        raise BenchError(f"{sampler} is missing; run bench/setup.sh")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "samples")
        rate, seconds = str(SAMPLES_PER_S), str(SAMPLED_S)
        command = [sampler, "record", "--gil", "--threads", "-f", "raw", "-r", rate, "-d", seconds, "-o", found]
        with subprocess.Popen(
            [*map(str, command), "-p", str(client.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None:
                read()
            if process.returncode:
                raise BenchError(f"py-spy: {process.stderr.read()}")
        loops: Counter[str] = Counter()
        for line in found.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            if loop := re.search(r"penstock-loop-\d+", stack):
                loops[loop[0]] += int(count)
    return [count / (SAMPLES_PER_S * SAMPLED_S) for count in loops.values()]


def main(options: Any) -> None:
    keys = keys_of("big", COUNT)
    cores = len(os.sched_getaffinity(0))
    loops = {f"{count} loop{'s' if count > 1 else ''}": count for count in (1, 2, 4)}
    clients = [Client(name, "penstock", threads_count=count) for name, count in loops.items()]
    with (
        objects({"big": (COUNT, OBJECT_BYTES)}) as root,
        Origin(root, tls=True, workers=max(1, cores // 2)) as origin,
    ):
        run = Run(f"{COUNT} objects of 100 MiB over TLS", origin, options.select(clients), METRICS, options.turns(5, 2))

        def read(client: Client) -> dict[str, Any]:
            command = {"do": "read", "keys": keys, "size_bytes": OBJECT_BYTES, "in_order": True}
            return verified(client, client.ask(command), root, keys)

        def turn(client: Client) -> dict[str, Any]:
            answer = read(client)
            shares = shares_held(client, lambda: read(client))
            return {**answer, "held_each": sum(shares) / loops[client.name], "held_all": sum(shares)}

        with run:
            run.turns(turn, warm=read)
        rows = (
            [Row("MB/s : 4 loops to 1", run.ratios("MB/s", "4 loops", "1 loop"), 2, 3.5)] if cores >= CORES_MIN else []
        )
        run.report(rows, object_bytes=OBJECT_BYTES, cores=cores)


if __name__ == "__main__":
    main(arguments(__doc__))
