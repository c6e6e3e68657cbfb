"""By how much does the loader slow a training loop whose step holds the interpreter for 20 ms?

The step adds integers in Python, the same number for everybody, set so that it takes 20 ms without a loader. `read`: batches of
32 JPEGs of 115 KB, undecoded, 184 MB/s; `decode`: batches of 4, decoded and resized to 224, 200 a second. The loop's time per
step, from the first batch on, is divided by that of a loop over one batch in memory.
"""

from __future__ import annotations

from typing import Any

from epochs import STORE, Loads, Samples, bucket, build_index, mixed_counts, photographs
from harness import Row, Run, arguments
from origin.origin import Origin

STEP_S = 0.02
BARE = "no loader"
OURS = ("penstock, threads", "penstock, 1 process", "penstock, 2 processes")
PEER = "connector, 2 workers, our decoder"
BATCHES = {"read": 32, "decode": 4}


def clients(index: dict[str, str]) -> list[Any]:
    return [
        Loads(BARE, "penstock", mode="bare"),
        Loads(OURS[0], "penstock"),
        Loads(OURS[1], "penstock", processes=1, **index),
        Loads(OURS[2], "penstock", processes=2, **index),
        Loads(
            PEER, "s3torchconnector", workers=2, decoder="penstock", throughput_target_gbps=200, buffer_bytes=1 << 20
        ),
    ]


def loops_for(bare: Any) -> int:
    """Additions that take 20 ms of a processor, whatever else runs."""
    loops, job = 200_000, {"do": "epoch", "check": False, "batches_max": 50}
    for _ in range(3):
        answer = bare.ask({**job, "scratch": "/tmp", "burn": loops})
        loops = round(loops * STEP_S * 50 / answer["cpu_s"])
    return loops


def measure(options: Any, case: str) -> None:
    batch, steps = BATCHES[case], 50 if options.quick else 200
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", mixed_counts(steps * batch // 2, samples.image_bytes, 64 << 20), "jpg")
        samples.again(folder / "tar", 3)
        job = {"prefix": "tar", "keys": samples.keys, "decode": case == "decode", "batch": batch, "batches_max": steps}
        job["scratch"] = str(root / "scratch")
        metrics = {"ms a step": lambda answer: (answer["seconds"] - answer["first_s"]) / answer["batches"] * 1e3}
        chosen = options.select(clients({"index_dir": str(root / "index")}))
        with Origin(root, **STORE) as origin, Run("", origin, chosen, metrics, options.turns(5, 2)) as run:
            run.tolerates = lambda client: client.driver != "penstock"
            build_index(origin, root / "index")
            loops = loops_for(next(client for client in chosen if client.name == BARE))
            run.question = f"a step of 20 ms ({loops} additions), batches of {batch}, {case}"

            def turn(client: Any) -> dict[str, Any]:
                return client.ask({**client.job(job), "check": False, "burn": loops})

            run.turns(turn, warm=turn)
        rows = []
        for name in OURS:
            slower = [ratio - 1 for ratio in run.ratios("ms a step", name, BARE)]
            rows.append(Row(f"slow-down: {name}", slower, 0.05, 0.01, less=True))
        run.report(rows, case=case)


if __name__ == "__main__":
    chosen_case = arguments(__doc__, case={"choices": ["read", "decode", "all"], "default": "all"})
    for one in ("read", "decode"):
        if chosen_case.case in (one, "all"):
            measure(chosen_case, one)
