"""How many 3 KB samples a second (CIFAR-like PNGs, undecoded) come out of tars and TFRecords, beside webdataset and TensorFlow?

penstock, webdataset and "TensorFlow, S3" read from a store with 30 ms to the first byte and 90 MB/s a connection, "TensorFlow,
local" files in memory; `parse_example` in batches of 128 for both. Between TensorFlow and S3 is boto3 in a py_function:
tensorflow-io 0.37.1, its last, installs beside TensorFlow 2.21 and does not load (undefined symbol of tsl::mutex).
"""

from __future__ import annotations

from typing import Any

from epochs import Loads, Samples, bucket, compare
from harness import arguments

from penstock.bench.samples import thumbnails
from penstock.bench.turns import Row

TIMES = 2
"""That each shard is in the bucket: of an epoch of less than a second, the start would be an eighth."""

TAR, TFRECORD = "penstock", "penstock tfrecord"
RECORDS = {"prefix": "tfrecord", "image": "image", "label": "label"}
WEBDATASETS = ("webdataset 8", "webdataset 2", "webdataset 0")
OVER_S3 = ("TensorFlow, S3", "TensorFlow, S3, 8 at once")


def clients() -> list[Any]:
    return [
        Loads(TAR, "penstock"),
        Loads(TFRECORD, "penstock", same=RECORDS),
        Loads("webdataset 8", "webdataset", workers=8),
        Loads("webdataset 2", "webdataset", workers=2),
        Loads("webdataset 0", "webdataset", workers=0),
        Loads("TensorFlow, local", "tensorflow", same=RECORDS),
        Loads("TensorFlow, S3", "tensorflow", same=RECORDS, way="boto3", readers=2),
        Loads("TensorFlow, S3, 8 at once", "tensorflow", same=RECORDS, way="boto3", readers=8),
    ]


def rows(run: Any) -> list[Row]:
    def share(name: str, *others: str) -> list[float]:
        return run.ratios("samples/s", name, run.best("samples/s", *others))

    tar, records = share(TFRECORD, TAR), run.ratios("samples/s", TAR, TFRECORD)
    apart = [max(a, b) - 1 for a, b in zip(tar, records, strict=True)]
    return [
        Row("tar, samples/s : webdataset at its best", share(TAR, *WEBDATASETS), 8, 15),
        Row("tar, samples/s : TFRecordDataset, local", share(TAR, "TensorFlow, local"), 0.6, 1),
        Row("tfrecord, samples/s : TFRecordDataset, local", share(TFRECORD, "TensorFlow, local"), 0.6, 1),
        Row("tar, samples/s : TensorFlow from S3", share(TAR, *OVER_S3), 1, 1.5),
        Row("tar and tfrecord apart", apart, 0.15, 0.05, less=True),
    ]


def main(options: Any) -> None:
    shards, each = (4, 2500) if options.quick else (16, 6250)
    with bucket() as (root, folder):
        samples = Samples(thumbnails(200 if options.quick else 2000))
        samples.write_tars(folder / "tar", [each] * shards, "png")
        written = Samples(samples.images, samples.write_tfrecords(folder / "tfrecord", each), list(samples.labels))
        if not options.quick:
            samples.again(folder / "tar", TIMES)
            written.again(folder / "tfrecord", TIMES)
        job = {"prefix": "tar", "image": "png", "tfrecord": written.keys}
        question = f"{len(samples)} PNGs of {samples.image_bytes} bytes in {len(samples.keys)} shards, undecoded"
        run = compare(question, root, options.select(clients()), samples, job, options.turns(3, 1))
        run.report(rows(run))


if __name__ == "__main__":
    main(arguments(__doc__))
