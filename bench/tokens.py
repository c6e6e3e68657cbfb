"""How many tokens a second come out of packed blocks, and does a loader that resumes give exactly the rest?

Blocks of 2048 tokens, uint16, in batches of 128, a cold epoch from a store with 30 ms to the first byte and 90 MB/s a
connection: what ``penstock pack --tokens`` writes, LitData's TokensLoader on its chunks, an array of MosaicML in MDS; and
penstock cutting documents of 10 to 3000 tokens in Parquet while it reads. Then 90% of an epoch is read and its state is saved,
and another process reads the rest: is that exact, and how long until its first batch?
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epochs import BATCH, METRICS, Loads, Samples, bucket, compare, pack
from harness import arguments

from penstock.bench.clients.loop import MASK, block_of
from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row

BLOCK = 2048
PEERS = {"LitData": ("litdata 2", "litdata 0"), "MosaicML Streaming": ("mosaicml 2", "mosaicml 0")}
DRIVERS = ("litdata", "mosaicml")


class Resumed(Loads):
    """Reads 90% of an epoch and saves its state; another process reads the rest. Both together must be the epoch."""

    def start(self, origin: Origin) -> None:
        self.origin = origin

    def measured(self, samples: Samples, job: dict[str, Any]) -> dict[str, Any]:
        most = len(samples) * 9 // 10 // BATCH
        state = {"state": f"{job['scratch']}/state.json"}
        first = self._part(job, {**state, "batches_max": most, "state_at": most})
        rest = self._part(job, {**state, "resume": True})
        found = first["samples"] + rest["samples"], (first["check"] + rest["check"]) & MASK
        return {**rest, "is_exact": found == (len(samples), samples.check())}

    def _part(self, job: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        process = Loads(self.name, self.driver, same={**self.extra, **more}, **self.options)
        try:
            process.start(self.origin)
            self.versions = process.versions
            return process.ask({"do": "epoch", "job": {**process.job(job), "check": True}})
        finally:
            process.close()


def clients(kind: type[Loads]) -> list[Any]:
    job = {"block": BLOCK}
    return [
        kind("penstock", "penstock", same={**job, "prefix": "penstock"}),
        kind("penstock, documents", "penstock", same={**job, "prefix": "documents", "documents": True}),
        kind("litdata 2", "litdata", same=job, workers=2, block=BLOCK),
        kind("litdata 0", "litdata", same=job, workers=0, block=BLOCK),
        kind("mosaicml 2", "mosaicml", same=job, workers=2, block=BLOCK),
        kind("mosaicml 0", "mosaicml", same=job, workers=0, block=BLOCK),
    ]


def write_ours(samples: Samples, folder: Path) -> None:
    """Pack the blocks as penstock does, and the same tokens as documents of other lengths."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import penstock as ps

    blocks = [block_of(samples.image(label), label) for label in samples.labels]
    ps.pack(({"tokens": block} for block in blocks), f"{folder}/penstock/%05d.mds", bytes_max=64 << 20)
    ends = np.cumsum(np.random.default_rng(0).integers(10, 3000, len(blocks) * BLOCK // 1000))
    documents = np.split(np.concatenate(blocks), ends[ends < len(blocks) * BLOCK])
    (folder / "documents").mkdir()
    pq.write_table(pa.table({"tokens": documents}), folder / "documents" / "0.parquet", row_group_size=2000)


def main(options: Any) -> None:
    import numpy as np

    total = BATCH * (40 if options.quick else 320)
    with bucket() as (root, folder):
        rng = np.random.default_rng(0)
        samples = Samples([rng.integers(0, 50_000, BLOCK - 2, "u2").tobytes() for _ in range(200)])
        samples.write_tars(folder / "tar", [total], "bin")
        write_ours(samples, folder)
        for driver in DRIVERS:
            pack(root, driver, folder / "tar", folder / driver, block=BLOCK)
        job = {name: name for name in DRIVERS}
        metrics = {"M tokens/s": lambda answer: answer["samples"] * BLOCK / answer["seconds"] / 1e6, **METRICS}
        question = f"{total} blocks of {BLOCK} tokens"
        run = compare(
            question, root, options.select(clients(Loads)), samples, job, options.turns(5, 1), metrics=metrics
        )
        run.report(
            [
                Row(f"tokens/s : {name}", run.ratios("samples/s", "penstock", run.best("samples/s", *both)), 1, 1.5)
                for name, both in PEERS.items()
            ]
        )
        metrics = {"first batch s": METRICS["first batch s"], "is exact": lambda answer: float(answer["is_exact"])}
        run = compare(
            f"the rest of {question}, resumed at 90%", root, options.select(clients(Resumed)), samples, job,
            options.turns(3, 1), metrics=metrics, checks=False,
        )  # fmt: skip
        run.report(
            [
                Row(f"exact: {name}", run.values(name, "is exact"), 1, 1)
                for name in run.answers
                if name.startswith("penstock")
            ]
        )


if __name__ == "__main__":
    main(arguments(__doc__))
