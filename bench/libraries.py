"""Which library delivers a cold first epoch fastest, with the least CPU and memory, the same samples in each one's format?

115 KB JPEGs, undecoded, in batches of 128, from a store with 30 ms to the first byte and 90 MB/s a connection. tar: penstock,
webdataset; chunks of LitData; MDS of MosaicML Streaming; Parquet: Hugging Face datasets and Ray Data. Each peer as it did best,
in speed, CPU or memory; MosaicML twice, since an IndexError of its own often ends one of the two. Memory is the peak of the
proportional sizes of a library's processes.
"""

from __future__ import annotations

from typing import Any

from epochs import Loads, Samples, bucket, compare, keys_in, lowest, mixed_counts, pack
from harness import arguments

from penstock.bench.samples import photographs
from penstock.bench.turns import Row

PEERS = {
    "webdataset": ("webdataset 8", "webdataset 2", "webdataset 0"),
    "LitData": ("litdata best",),
    "MosaicML Streaming": ("mosaicml 8", "mosaicml best"),
    "Hugging Face datasets": ("datasets",),
    "Ray Data": ("ray best",),
}


def clients() -> list[Any]:
    return [
        Loads("penstock", "penstock"),
        Loads("webdataset 8", "webdataset", workers=8),
        Loads("webdataset 2", "webdataset", workers=2),
        Loads("webdataset 0", "webdataset", workers=0),
        Loads("litdata best", "litdata", workers=2),
        Loads("mosaicml 8", "mosaicml", workers=8),
        Loads("mosaicml best", "mosaicml", workers=3),
        Loads("datasets", "datasets"),
        Loads("ray best", "ray", prefetch=8),
    ]


def main(options: Any) -> None:
    total = 1024 if options.quick else 4096  # LitData drops what is left of a multiple of 8 workers x 128
    with bucket() as (root, folder):
        samples = Samples(photographs(40 if options.quick else 200))
        size_bytes = samples.image_bytes
        samples.write_tars(folder / "tar", mixed_counts(total, size_bytes, (16 if options.quick else 64) << 20), "jpg")
        chosen = options.select(clients())
        formats = {"litdata": "litdata", "mosaicml": "mosaicml", "datasets": "parquet", "ray": "parquet"}
        job = {"prefix": "tar", "litdata": "litdata", "mosaicml": "mosaicml"}
        for client in chosen:
            made = formats.get(client.driver)
            if made and not (folder / made).exists():
                pack(root, client.driver if made != "parquet" else "datasets", folder / "tar", folder / made)
        if (folder / "parquet").exists():
            job["parquet"] = keys_in(root, "parquet")
        question = f"{total} JPEGs of {size_bytes // 1000} KB, undecoded, cold, in each one's format"
        run = compare(question, root, chosen, samples, job, options.turns(3, 1))
        rows = [
            Row(f"samples/s : {name}", run.ratios("samples/s", "penstock", run.best("samples/s", *both)), 1, 1.5)
            for name, both in PEERS.items()
        ]
        rows.append(
            Row("CPU, share of the lowest of the others", lowest(run, "CPU s/1000", "penstock"), 1, 1, less=True)
        )
        rows.append(
            Row("memory, share of the lowest of the others", lowest(run, "PSS MB", "penstock"), 1, 1, less=True)
        )
        run.report(rows)


if __name__ == "__main__":
    main(arguments(__doc__))
