"""By how much does a loader slow a training loop whose step holds the interpreter for 20 ms, and what of it is the machine?

The step adds integers in Python, as many as take 20 ms without a loader. In the case `read`, it takes batches of 32 undecoded
JPEGs of 112 KB, which is 180 MB/s. In the case `decode`, it takes batches of 4, decoded and resized to 224, which is 200 a
second.

Each client is a training process that runs short windows in turn: bare (only steps, while its loader is idle), loaded (steps
with batches), and control (only steps, while a second process takes the same batches at the same pace from a loader of its
own). In the control, the cores, caches, memory and server are as busy as in the loaded window, but no part of the loader is in
the process that trains. The slow-down is the time per step of a loaded window divided by the mean of the two bare windows
around it, and likewise for the control; the report has medians and quartiles of all turns. The slow-down of the control is
due to the machine's two cores, and the difference between the two is due to the loader.

On a shared machine, windows differ by a fifth whatever runs in them. So the benchmark also measures inside the loaded window
what the loader takes from a step: the time in which the loop's thread waited for a processor, for the interpreter or for a
batch, and its processor time for taking the batch. This does not include a step that computes more slowly because caches are
shared.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epochs import STORE, Loads, Samples, bucket, build_index, mixed_counts
from harness import arguments

from penstock.bench.clients.windows import STEP_S
from penstock.bench.origin.server import Origin
from penstock.bench.samples import photographs
from penstock.bench.turns import Row, print_report, surroundings

OURS = ("penstock, threads", "penstock, 1 process", "penstock, 2 processes")
PEER = "connector, 2 workers, our decoder"
ROWS = {"taken from a step": "of the step", "slow-down": "slow-down", "against the control": "loader's own"}
BATCHES = {"read": 32, "decode": 4}
STEPS, SETTLE = 12, 4  # steps of a window: those that count, and those before them
TWIN_STEPS = 20  # slightly longer than the window beside it, including the steps that do not count


class Trainer:
    """The process of a client that trains, and a second one that only loads."""

    def __init__(self, name: str, driver: str, job: dict[str, Any], **options: Any) -> None:
        self.name, self.options = name, options
        self._pair = Loads(name, driver, **options), Loads(name, driver, **options)
        self._job = {**self._pair[0].job(job), "check": False}
        self.turns: list[dict[str, Any]] = []

    def start(self, origin: Origin) -> None:
        for one in self._pair:
            one.start(origin)

    def close(self) -> None:
        for one in self._pair:
            one.close()

    @property
    def versions(self) -> dict[str, str]:
        return self._pair[0].versions

    def window(self, kind: str, loops: int, *, twin: bool = False, steps: int = STEPS) -> dict[str, Any]:
        """Run a window of one of the two processes. Times are in ms per step."""
        command = {"do": "steps", "job": self._job, "kind": kind, "steps": steps, "settle": SETTLE, "burn": loops}
        answer = self._pair[twin].ask(command)
        return {
            name: value / steps * (1e3 if name.endswith(("_s", "seconds")) else 1) for name, value in answer.items()
        }

    def control(self, loops: int, pool: ThreadPoolExecutor) -> dict[str, Any]:
        """Run a bare window while the second process loads."""
        beside = pool.submit(self.window, "paced", 0, twin=True, steps=TWIN_STEPS)
        found = self.window("bare", loops)
        beside.result()
        return found

    def turn(self, loops: int, pool: ThreadPoolExecutor) -> None:
        """Run four windows: bare, loaded, control, bare. The middle two change places from turn to turn."""
        before = self.window("bare", loops)
        if len(self.turns) % 2:
            control, loaded = self.control(loops, pool), self.window("loaded", loops)
        else:
            loaded, control = self.window("loaded", loops), self.control(loops, pool)
        after = self.window("bare", loops)
        bare_ms = (before["seconds"] + after["seconds"]) / 2
        blocked_ms = loaded["seconds"] - loaded["cpu_s"] - loaded["queued_s"]
        taken_ms = loaded["queued_s"] + blocked_ms + loaded["taken_cpu_s"]
        self.turns.append({
            "ms a step": loaded["seconds"], "bare ms": bare_ms,
            "slow-down": loaded["seconds"] / bare_ms - 1, "control's": control["seconds"] / bare_ms - 1,
            "loader's own": loaded["seconds"] / control["seconds"] - 1, "waited ms": loaded["waited_s"],
            "queued ms": loaded["queued_s"], "blocked ms": blocked_ms, "of the step": taken_ms / (STEP_S * 1e3),
            "taking ms": loaded["taken_cpu_s"], "others' ms": loaded["others_cpu_s"], "switches": loaded["switches"],
        })  # fmt: skip


def trainers(job: dict[str, Any], index: dict[str, str]) -> list[Trainer]:
    peer = {"workers": 2, "decoder": "penstock", "throughput_target_gbps": 200, "buffer_bytes": 1 << 20}
    return [
        Trainer(OURS[0], "penstock", job),
        Trainer(OURS[1], "penstock", job, processes=1, **index),
        Trainer(OURS[2], "penstock", job, processes=2, lanes=2, **index),
        Trainer(PEER, "s3torchconnector", job, **peer),
    ]


def loops_for(trainer: Trainer) -> int:
    """Return how many additions take 20 ms of processor time, whatever else runs."""
    loops = 200_000
    for _ in range(3):
        loops = round(loops * STEP_S * 1e3 / trainer.window("bare", loops)["cpu_s"])
    return loops


def measure(options: Any, case: str) -> None:
    batch, turns = BATCHES[case], options.turns(10, 2)
    steps = (turns + 1) * max(STEPS + SETTLE, TWIN_STEPS + SETTLE) + 20
    with bucket() as (root, folder), ThreadPoolExecutor(1) as pool:
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", mixed_counts(steps * batch // 6, samples.image_bytes, 64 << 20), "jpg")
        samples.again(folder / "tar", 7)
        job = {"prefix": "tar", "keys": samples.keys, "decode": case == "decode", "batch": batch}
        job["scratch"] = str(root / "scratch")
        chosen = options.select(trainers(job, {"index_dir": str(root / "index")}))
        with Origin(root, **STORE) as origin:
            build_index(origin, root / "index")
            try:
                for each in chosen:
                    each.start(origin)
                loops = loops_for(chosen[0])
                for each in chosen:  # connections, imports and first accesses to memory do not count
                    each.turn(loops, pool)
                    each.turns.clear()
                for _ in range(turns):
                    for each in chosen:
                        each.turn(loops, pool)
            finally:
                for each in chosen:
                    each.close()
    report(chosen, f"a step of 20 ms ({loops} additions), batches of {batch}, {case}", case, turns)


def report(chosen: list[Trainer], question: str, case: str, turns: int) -> None:
    """Report medians and quartiles of all turns, and the slow-down inside the step, in total, and over the control."""
    names = list(chosen[0].turns[0])
    table, rows = [["client", *names]], []
    record: dict[str, Any] = {"bench": question, "case": case, **surroundings(), "repetitions": turns, "clients": {}}
    for each in chosen:
        spread = {name: _quartiles([turn[name] for turn in each.turns]) for name in names}
        table.append([each.name, *(f"{mid:.3g} ({low:.3g}..{high:.3g})" for low, mid, high in spread.values())])
        record["clients"][each.name] = {"options": each.options, "versions": each.versions, **spread}
        if each.name in OURS:
            for title, name in ROWS.items():
                rows.append(Row(f"{title}: {each.name}", [turn[name] for turn in each.turns], 0.05, 0.01, less=True))
    print_report(f"{question}; quartiles", table, rows, record)


def _quartiles(values: list[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive"))


if __name__ == "__main__":
    chosen_case = arguments(__doc__, case={"choices": ["read", "decode", "all"], "default": "all"})
    for one in ("read", "decode"):
        if chosen_case.case in (one, "all"):
            measure(chosen_case, one)
