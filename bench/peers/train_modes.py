"""A training loop on TFRecords in TensorFlow, which notes the time of every 1 000 records: train_modes.py MODE JOB.

MODE is ``pipe`` or ``fastfile``, which read the channel `train`, or ``direct``. JOB is JSON; bench/channel_modes.py writes it.
Each record begins and ends with its number, and the number is followed by the CRC-32 of what lies between.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from _serving import cpu_s

NOTED_RECORDS = 1_000


def pipe(batch: int, urls: list[str]) -> Any:
    del urls
    from penstock.channels import PipeReader

    reader = PipeReader("train", format="tfrecord")
    records = tf.data.Dataset.from_generator(lambda: iter(reader), output_signature=tf.TensorSpec((), tf.string))
    return records.batch(batch).prefetch(4)


def fastfile(batch: int, urls: list[str]) -> Any:
    del urls
    files = tf.data.Dataset.list_files(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "*"), shuffle=False)
    return tf.data.TFRecordDataset(files).batch(batch).prefetch(4)


def direct(batch: int, urls: list[str]) -> Any:
    import penstock as ps
    import penstock.tensorflow

    shards = ps.shards(urls, format="tfrecord-raw").batch(batch)
    return ps.tensorflow.dataset(shards, index="stream").map(lambda columns: columns["record"])


MODES = {"pipe": pipe, "fastfile": fastfile, "direct": direct}


@tf.function
def seen(records: Any, size_bytes: Any) -> Any:
    """Return the numbers of a batch of records, or -1 for one that is not whole."""
    first = tf.reshape(tf.io.decode_raw(tf.strings.substr(records, 0, 8), tf.int64), [-1])
    last = tf.reshape(tf.io.decode_raw(tf.strings.substr(records, size_bytes - 8, 8), tf.int64), [-1])
    whole = (first == last) & (tf.strings.length(records) == size_bytes)
    return tf.where(whole, first, -1)


def check_bytes(records: Any) -> None:
    for record in records.numpy():
        if zlib.crc32(record[12:-8]) != int.from_bytes(record[8:12], "little"):
            raise ValueError("a record has other bytes")


def steps(mode: str, job: dict[str, Any]) -> Iterator[Any]:
    """Do the steps of a training; yield the numbers of each batch."""
    work = bytes(job["step_bytes"])
    size_bytes = tf.constant(job["record_bytes"])
    for records in MODES[mode](job["batch"], job["urls"]):
        yield seen(records, size_bytes).numpy()
        if job["checks"]:
            check_bytes(records)
        if work:
            hashlib.sha256(work)


def main(mode: str, text: str) -> None:
    job = json.loads(text)
    times_s: list[float] = []
    numbers: list[Any] = []
    records_count = 0
    for found in steps(mode, job):
        numbers.append(found)
        records_count += len(found)
        if records_count >= NOTED_RECORDS * (len(times_s) + 1):
            times_s.append(time.monotonic() - job["begin_s"])
    counts = np.bincount(np.concatenate(numbers) + 1, minlength=job["different_count"] + 1)
    answer = {"times_s": times_s, "counts": counts.tolist(), "cpu_s": cpu_s()}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # TensorFlow's threads take seconds to end


if __name__ == "__main__":
    main(*sys.argv[1:])
