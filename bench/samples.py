"""How many 115 KB JPEGs a second come out of tar shards: undecoded (`read`), and decoded and resized to 224 (`decode`)?

The shards are 4 to 256 MiB, on a store with 30 ms to the first byte and 90 MB/s a connection; the batches are of 128. Each
peer is there as it comes (8 workers) and as it did best.
"""

from __future__ import annotations

from typing import Any

from epochs import Loads, Samples, bucket, compare, mixed_counts
from harness import arguments

from penstock.bench.samples import photographs
from penstock.bench.turns import Row

RAW, ALONE = "penstock raw", "decoding alone"
CONNECTORS = ("connector 8", "connector best")
DATASETS = ("webdataset 8", "webdataset best")
# Chosen for two cores; rows "at its best" take whichever of a peer's configurations did better in the run.
TUNED = {"workers": 4, "throughput_target_gbps": 200, "buffer_bytes": 1 << 20}


def clients(case: str) -> list[Any]:
    if case == "read":
        return [
            Loads("penstock", "penstock"),
            Loads(RAW, "penstock", mode="raw"),
            Loads("connector 8", "s3torchconnector", workers=8),
            Loads("connector best", "s3torchconnector", **TUNED),
            Loads("webdataset 8", "webdataset", workers=8),
            Loads("webdataset best", "webdataset", workers=2),
        ]
    return [
        Loads("penstock", "penstock"),
        Loads(ALONE, "penstock", mode="decode"),
        Loads("connector 8", "s3torchconnector", workers=8),
        Loads("connector best", "s3torchconnector", **TUNED | {"workers": 3}),
        Loads("connector, our decoder", "s3torchconnector", decoder="penstock", **TUNED | {"workers": 3}),
        Loads("webdataset, our decoder", "webdataset", decoder="penstock", workers=3),
    ]


def rows(case: str, run: Any) -> list[Row]:
    def share(*names: str) -> list[float]:
        return run.ratios("samples/s", "penstock", run.best("samples/s", *names))

    if case == "read":
        return [
            Row("samples/s : connector, 8 workers", share("connector 8"), 3, 6),
            Row("samples/s : connector at its best", share(*CONNECTORS), 3, 6),
            Row("share of raw reading", share(RAW), 0.8, 0.95),
            Row("samples/s : webdataset at its best", share(*DATASETS), 1, 1.5),
        ]
    return [
        Row("samples/s : connector + Pillow, 8 workers", share("connector 8"), 1.8, 2.2),
        Row("samples/s : connector + Pillow at its best", share(*CONNECTORS), 1.8, 2.2),
        Row(
            "samples/s : fastest peer, our decoder",
            share("connector, our decoder", "webdataset, our decoder"),
            1.1,
            1.25,
        ),
        Row("share of decoding alone", share(ALONE), 0.85, 0.92),
    ]


def measure(options: Any, case: str) -> None:
    total = 800 if options.quick else 8000 if case == "read" else 3000
    with bucket() as (root, folder):
        samples = Samples(photographs(40 if options.quick else 200))
        size_bytes = samples.image_bytes
        samples.write_tars(folder / "tar", mixed_counts(total, size_bytes, (32 if options.quick else 256) << 20), "jpg")
        job = {"prefix": "tar", "decode": case == "decode", "pictures": str(folder / "tar"), "samples": len(samples)}
        question = f"{len(samples)} JPEGs of {size_bytes // 1000} KB in {len(samples.keys)} tars, {case}"
        run = compare(question, root, options.select(clients(case)), samples, job, options.turns(3, 1))
        run.report(rows(case, run), case=case)


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": ["read", "decode", "all"], "default": "all"})
    for one in ("read", "decode"):
        if chosen.case in (one, "all"):
            measure(chosen, one)
