"""How long until the first batch after resuming at 90% of an epoch, beside a fresh start?

Shuffled tars of 115 KB JPEGs, 4 to 256 MiB, undecoded, in batches of 128, from a store with 30 ms to the first byte and
90 MB/s a connection; every turn in a new process, with and without an index.
"""

from __future__ import annotations

from typing import Any

from epochs import BATCH, METRICS, STORE, Fresh, Loads, Samples, bucket, build_index, mixed_counts
from harness import arguments

from penstock.bench.origin.server import Origin
from penstock.bench.samples import photographs
from penstock.bench.turns import Row, Run

MODES = ("stream", "require")
NAMES = {"stream": "without an index", "require": "by an index"}


def saved(origin: Origin, index: dict[str, str], job: dict[str, Any], batches: int) -> None:
    """Read 90% of the epoch and save the loader's state."""
    client = Loads("penstock", "penstock", **index)
    try:
        client.start(origin)
        client.ask(
            {"do": "epoch", "job": {**client.job(job), "check": False, "batches_max": batches, "state_at": batches}}
        )
    finally:
        client.close()


def main(options: Any) -> None:
    total = 2048 if options.quick else 8192
    batches = total * 9 // 10 // BATCH
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        size_bytes = samples.image_bytes
        samples.write_tars(folder / "tar", mixed_counts(total, size_bytes, (16 if options.quick else 256) << 20), "jpg")
        job = {"prefix": "tar", "keys": samples.keys, "shuffle": 1024, "scratch": str(root / "scratch")}
        chosen: list[Any] = []
        for mode in MODES:
            state = {"state": str(root / f"{mode}.json")}
            index = {"index": mode, "index_dir": str(root / "index")}
            for name, extra in (("fresh", {}), ("resumed", {"resume": True})):
                more = {**state, **extra, "batches_max": 1}
                chosen.append(Fresh(f"{name}, {NAMES[mode]}", "penstock", same=more, **index))
        chosen = options.select(chosen)
        question = f"first batch at 90% of {total} shuffled JPEGs"
        metrics = {"first batch s": METRICS["first batch s"]}
        with Origin(root, **STORE) as origin, Run(question, origin, chosen, metrics, options.turns(5, 2)) as run:
            build_index(origin, root / "index")
            for mode in MODES:
                index = {"index": mode, "index_dir": str(root / "index")}
                saved(origin, index, {**job, "state": str(root / f"{mode}.json")}, batches)
            run.turns(lambda client: client.measured(samples, job))
        rows = []
        for name in NAMES.values():
            ratios = run.ratios("first batch s", f"resumed, {name}", f"fresh, {name}")
            rows.append(Row(f"resumed : fresh, {name}", ratios, 1.5, 1, less=True))
        run.report(rows)


if __name__ == "__main__":
    main(arguments(__doc__))
