"""TensorFlow: ``TFRecordDataset`` and ``parse_example`` in batches, from local files or from S3 by way of boto3."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import loop

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


class TensorFlow(loop.Plain):
    """`via` is ``local`` (the kernel's page cache), or ``boto3``: tensorflow-io does not load into this one.

    With ``boto3`` a py_function fetches whole shards, eight at a time, and gives its records as one tensor each.
    """

    packages = ("tensorflow-cpu",)

    def __init__(self, *, url: str, bucket: str, via: str = "local", readers: int = 2) -> None:
        self.url, self.bucket, self.via, self.readers = url, bucket, via, readers

    def _records(self, job: dict[str, Any]) -> Any:
        import tensorflow as tf

        if self.via == "local":
            paths = [f"{job['folder']}/{key}" for key in job["tfrecord"]]
            return tf.data.TFRecordDataset(paths, num_parallel_reads=self.readers, buffer_size=8 << 20)
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=32, s3={"addressing_style": "path"})
        client = boto3.client("s3", endpoint_url=self.url, config=config)

        def fetch(key: Any) -> Any:
            body = client.get_object(Bucket=self.bucket, Key=key.numpy().decode())["Body"].read()
            records, at = [], 0
            while at < len(body):
                (length,) = struct.unpack_from("<Q", body, at)
                records.append(body[at + 12 : at + 12 + length])
                at += length + 16
            return tf.constant(records)

        def shard(key: Any) -> Any:
            records = tf.py_function(fetch, [key], tf.string)
            records.set_shape([None])
            return records

        keys = tf.data.Dataset.from_tensor_slices(job["tfrecord"])
        return keys.map(shard, num_parallel_calls=self.readers).unbatch()

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        import tensorflow as tf

        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
        dataset = self._records(job).batch(job["batch"])
        dataset = dataset.map(lambda records: tf.io.parse_example(records, features), num_parallel_calls=2).prefetch(4)
        for batch in dataset:
            yield Strings(batch["image"], job["check"]), batch["label"].numpy()


class Strings:
    """A tensor of strings: counted as a training step would see it, without making Python objects of them."""

    def __init__(self, tensor: Any, check: bool) -> None:
        import tensorflow as tf

        self.tensor, self.lengths = tensor, None if check else tf.strings.length(tensor).numpy()

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __iter__(self) -> Iterator[Any]:
        if self.lengths is None:
            return iter(self.tensor.numpy().tolist())
        return (range(length) for length in self.lengths.tolist())


CLIENT = TensorFlow
