"""How long until the first batch, from 1 000 shards, shuffled?

From constructing the data set, in a process that has imported its library but never used it, to a batch of 128 in the loop's
hand; on a store with 30 ms to the first byte. The shards hold 64 PNGs of 3 KB each, and the peers' own formats as many: these
come with an index, and so do the shards of "penstock, indexed", as packing leaves them. The others' are plain tars.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from epochs import METRICS, STORE, Fresh, Samples, bucket, build_index, pack, thumbnails
from harness import Row, Run, arguments
from origin.origin import Origin

ROUND_TRIP_S = 0.03
MOSAIC = ("mosaicml 0", "mosaicml 2", "mosaicml 8")
LITDATA = ("litdata 0", "litdata 2", "litdata 8")
INDEXED = "penstock, indexed"
EACH = 64


def clients() -> list[Any]:
    return [
        Fresh("penstock", "penstock", index="stream"),
        Fresh(INDEXED, "penstock", same={"prefix": "packed"}, index="require"),
        Fresh("penstock, no shuffle", "penstock", same={"shuffle": 0}, index="stream"),
        *(Fresh(name, "litdata", workers=int(name[-1])) for name in LITDATA),
        *(Fresh(name, "mosaicml", workers=int(name[-1])) for name in MOSAIC),
        Fresh("webdataset 8, no shuffle", "webdataset", workers=8),
    ]


def packed(root: Path, folder: Path) -> None:
    """The tars again, with the index beside them that packing leaves."""
    shutil.copytree(folder / "tar", folder / "packed", copy_function=os.link)
    with Origin(root) as origin:
        build_index(origin, root / "index", prefix="packed")
    (made,) = (root / "index").iterdir()
    made.rename(folder / "packed" / ".penstock")


def split(folder: Path, shards: int) -> None:
    """Whether the peer's writer made about as many shards as the tars are."""
    made = len(list(folder.iterdir())) - 1
    if not 0.9 * shards <= made <= 1.1 * shards:
        raise RuntimeError(f"{folder.name}: {made} shards instead of {shards}")


def main(options: Any) -> None:
    shards = 100 if options.quick else 1000
    with bucket() as (root, folder):
        samples = Samples(thumbnails(500))
        samples.write_tars(folder / "tar", [EACH] * shards, "png")
        packed(root, folder)
        chosen = options.select(clients())
        sizes = {"litdata": EACH, "mosaicml": (samples.image_bytes + 40) * EACH}
        job: dict[str, Any] = {
            "prefix": "tar",
            "image": "png",
            "keys": samples.keys,
            "shuffle": 16384,
            "batches_max": 1,
        }
        job["scratch"] = str(root / "scratch")
        for driver in {client.driver for client in chosen} & set(sizes):
            job[driver] = f"{driver}-of-{sizes[driver]}"
            pack(root, driver, folder / "tar", folder / job[driver])
            split(folder / job[driver], shards)
        question = f"first batch of {shards} shards, cold"
        metrics = {"first batch s": METRICS["first batch s"]}
        with Origin(root, **STORE) as origin, Run(question, origin, chosen, metrics, options.turns(5, 2)) as run:
            run.tolerates = lambda client: client.driver != "penstock"
            run.turns(lambda client: client.measured(samples, job))
        report(run)


def report(run: Run) -> None:
    rows = []
    for name in ("penstock", INDEXED):
        ours = run.values(name, "first batch s") if name in run.answers else []
        rows.append(Row(f"{name}, seconds", ours, 1 + 3 * ROUND_TRIP_S, 1 + 3 * ROUND_TRIP_S, less=True))
    for name, both in {"MosaicML": MOSAIC, "LitData": LITDATA}.items():
        best = run.best("first batch s", *both, less=True)
        rows.append(Row(f"{name}'s at its best : ours, indexed", run.ratios("first batch s", best, INDEXED), 10, 10))
    run.report(rows)


if __name__ == "__main__":
    main(arguments(__doc__))
