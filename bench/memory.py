"""Does streaming 4 GB through a consumer that sleeps hold resident memory within budget + 150 MB?

The consumer pauses after its first object, so that read-ahead has time to fill the budget, and then sleeps between objects.
Peak memory is the VmHWM of the process. Blobs belong to the caller and count towards no budget, so each is dropped before the
next is requested.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clients import BUCKET, Function, ran
from harness import arguments, keys_of, objects

from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row, Run

METRICS = {
    "peak MB": lambda answer: answer["peak_bytes"] / 1e6,
    "beyond budget MB": lambda answer: (answer["peak_bytes"] - answer["budget_bytes"]) / 1e6,
    "at rest MB": lambda answer: answer["rest_bytes"] / 1e6,
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
}
MIB = 1 << 20
CASES = {"large parts": ("big", 100 * MIB), "large whole": ("big", 100 * MIB), "small": ("small", 100_000)}
PAUSE_S, NAP_S, NAP_EVERY_BYTES = 2.0, 0.02, 16 * MIB


def memory_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def consume(url: str, case: str, total_bytes: int, budget_bytes: int) -> dict[str, Any]:
    """Stream and sleep, in a process of its own, whose memory is the answer."""
    import penstock

    prefix, size_bytes = CASES[case]
    there = 8 if prefix == "big" else 4000
    keys = (keys_of(prefix, there)[index % there] for index in range(-(-total_bytes // size_bytes)))
    store = penstock.connect(
        f"s3://{BUCKET}",
        endpoint_url=url,
        region="us-east-1",
        credentials=penstock.Credentials(access_key="AKBENCH", secret_key="bench"),
        fetch=penstock.FetchConfig(budget_bytes_max=budget_bytes or None),
    )
    next(iter(store.read_many(keys_of(prefix, 1))))  # the cost of any use of the library is not the cost of streaming
    rest_bytes, start_s = memory_bytes("VmRSS"), time.perf_counter()
    done = napped = 0

    def lengths() -> Iterator[int]:
        items = store.read_parts(keys) if case == "large parts" else store.read_many(keys)
        for item in items:
            length = len(item.data)
            del item
            yield length

    for length in lengths():
        if not done:
            time.sleep(PAUSE_S)
        done += length
        if done - napped >= NAP_EVERY_BYTES:
            time.sleep(NAP_S)
            napped = done
    seconds = time.perf_counter() - start_s
    budget_bytes = budget_bytes or penstock.config.default_budget_bytes()
    answer = {"bytes": done, "seconds": seconds, "rest_bytes": rest_bytes, "budget_bytes": budget_bytes}
    return {**answer, "peak_bytes": memory_bytes("VmHWM")}


def main(options: Any) -> None:
    total_bytes = (1 if options.quick else 4) * 1_000_000_000
    with objects({"big": (8, 100 * MIB), "small": (4000, 100_000)}) as root, Origin(root) as origin:

        def consumed(case: str, budget_bytes: int) -> dict[str, Any]:
            return json.loads(ran(sys.executable, __file__, "consume", origin.url, case, total_bytes, budget_bytes))

        clients = [
            Function(f"{case} {name}", consumed, case, budget_bytes)
            for case in CASES
            for name, budget_bytes in (("256 MiB", 256 * MIB), ("default budget", 0))
        ]
        question = f"{total_bytes / 1e9:g} GB through a consumer that sleeps"
        run = Run(question, origin, options.select(clients), METRICS, options.turns(2, 1))
        with run:
            run.turns(lambda client: client.measure())
        worst = max((run.values(name, "beyond budget MB") for name in run.answers), key=max)
        run.report([Row("peak beyond the budget, MB", [max(worst)], 150, 100, less=True)], total_bytes=total_bytes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["consume"]:
        print(json.dumps(consume(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main(arguments(__doc__))
