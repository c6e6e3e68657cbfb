"""How many samples a second does WebDataset read from S3 by penstock, by pipes, and by the S3 Connector's reader?

JPEGs of 115 KB in tars of 4 to 256 MiB, undecoded, in a WebLoader with 4 workers; only how the bytes of a shard arrive differs.
The store answers after 30 ms and sends 90 MB/s on each connection, or without delay (``--case``).
"""

from __future__ import annotations

from typing import Any

from epochs import STORE, Loads, Samples, bucket, compare, mixed_counts
from harness import arguments

from penstock.bench.samples import photographs
from penstock.bench.turns import Row

WORKERS = 4
OURS = "s3:// by penstock"
CONNECTORS = ("connector", "connector, buffered")
CASES: dict[str, dict[str, Any]] = {"behind 30 ms": STORE, "without delay": {}}


def clients() -> list[Any]:
    return [
        Loads(OURS, "webdataset", way="penstock", workers=WORKERS),
        Loads("pipe:curl", "webdataset", way="curl", workers=WORKERS),
        Loads("pipe:aws s3 cp", "webdataset", way="aws", workers=WORKERS),
        Loads("connector", "webdataset", way="connector", workers=WORKERS),
        Loads("connector, buffered", "webdataset", way="connector", workers=WORKERS, buffer_bytes=1 << 20),
    ]


def measure(options: Any, case: str) -> None:
    total = 800 if options.quick else 8000
    with bucket() as (root, folder):
        samples = Samples(photographs(40 if options.quick else 200))
        largest_bytes = (32 if options.quick else 256) << 20
        samples.write_tars(folder / "tar", mixed_counts(total, samples.image_bytes, largest_bytes), "jpg")
        job = {"prefix": "tar", "keys": samples.keys, "decode": False, "samples": len(samples)}
        question = f"{len(samples)} JPEGs of {samples.image_bytes // 1000} KB in {len(samples.keys)} tars, {case}"
        chosen = options.select(clients())
        run = compare(question, root, chosen, samples, job, options.turns(3, 1), store=CASES[case])

        def ratios(*names: str) -> list[float]:
            return run.ratios("samples/s", OURS, run.best("samples/s", *names))

        rows = [
            Row("samples/s : pipe:curl", ratios("pipe:curl"), 1, 1.5),
            Row("samples/s : pipe:aws s3 cp", ratios("pipe:aws s3 cp"), 1, 1.5),
            Row("samples/s : the connector's reader at its best", ratios(*CONNECTORS), 1, 1.5),
        ]
        run.report(rows, case=case)


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": [*CASES, "all"], "default": "all"})
    for one in CASES:
        if chosen.case in (one, "all"):
            measure(chosen, one)
