"""TensorFlow: penstock's data set, and the ways to TFRecords and tars that need no build of TensorFlow of one's own.

``dataset`` is ``penstock.tensorflow.dataset``, ``records`` the same on undecoded TFRecords, with ``parse_example``. With
``TFRecordDataset``: ``local`` reads files (of the job's ``folder``, or downloaded first), ``mount``, ``rclone`` and ``s3fs``
those of a mounted bucket, ``io`` the bucket by tensorflow-io. ``boto3`` is a py_function that fetches whole shards of
TFRecords, ``naive`` one that takes tars apart, both in ``interleave``; ``service`` has two workers of tf.data service make
the batches of either. ``pipe`` is a generator that reads what ``penstock cat`` writes.
"""

from __future__ import annotations

import io
import os
import struct
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf
from tensorflow.data.experimental import service

from penstock.bench.clients import decoders, loop, programs

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE_WORKERS = 2
OURS = ("dataset", "records", "mount", "pipe")


class TensorFlow:
    """`readers` shards at a time. A job may name another endpoint by ``url``, and ask for ``pixels`` of pictures in tars."""

    def __init__(self, *, url: str | None, bucket: str, way: str = "local", readers: int = 2) -> None:
        self.url, self.bucket, self.way, self.readers = url, bucket, way, readers
        self.packages = ("tensorflow-cpu", *(("penstock-data",) if way in OURS else ()))
        self.stack, self.servers = ExitStack(), list[object]()
        if way in OURS:
            import penstock.tensorflow  # noqa: F401 - not under the clock

    def prepare(self, job: dict[str, Any]) -> None:
        self.url = job.get("url", self.url)
        loop.use_endpoint(self.url)
        self.directory = job.get("folder")
        if self.way == "io":
            loop.use_endpoint(self.url, "S3_ENDPOINT")
            import tensorflow_io  # noqa: F401 - registers s3://
        elif self.way in ("mount", "rclone", "s3fs"):
            self.directory = self.stack.enter_context(tempfile.TemporaryDirectory(dir=job.get("scratch")))
            self.stack.enter_context(programs.mounted(self.way, self.url, self.bucket, self.directory))
        elif self.way == "service":
            self.dispatcher = service.DispatchServer()
            address = self.dispatcher.target.partition("://")[2]
            for _ in range(SERVICE_WORKERS):
                self.servers.append(service.WorkerServer(service.WorkerConfig(dispatcher_address=address)))
            self.servers.append(self.dispatcher)  # stopping one of them holds the lock that its functions wait for

    def finish(self) -> None:
        self.stack.close()

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        made = self._ours(job) if self.way == "dataset" else self._parsed(job)
        for batch in made:
            labels = batch[1].numpy() if len(batch) > 1 else []
            if job.get("objects"):
                labels = [loop.number_of(key.decode()) for key in labels]
            if batch[0].dtype != tf.string:
                yield batch[0].numpy(), labels
            else:
                yield Strings(batch[0], job.get("check", False)), labels

    def _ours(self, job: dict[str, Any]) -> Any:
        import penstock.tensorflow
        from penstock.bench.clients.penstock import Penstock

        names = [name for name in (job["image"], "__key__" if job.get("objects") else job["label"]) if name]
        dataset = penstock.tensorflow.dataset(Penstock(url=self.url, bucket=self.bucket).pipeline(job))
        return dataset.map(lambda batch: tuple(batch[name] for name in names))

    def _parsed(self, job: dict[str, Any]) -> Any:
        """Batches of the undecoded samples that this way reads."""
        if self.way == "naive" or (self.way == "service" and job.get("format") == "tar"):
            made = self._shards(partial(self._tar, job), job, [tf.string] * (2 if job["label"] else 1))
            return self._distributed(self._pictures(made.batch(job["batch"]), job)).prefetch(4)
        if self.way == "records":
            return self._pictures(self._columns(job), job)
        if self.way in ("boto3", "service"):
            records = self._shards(self._records, job, tf.string)
        elif self.way == "pipe":
            signature = tf.TensorSpec((), tf.string)
            records = tf.data.Dataset.from_generator(lambda: self._piped(job), output_signature=signature)
        else:
            records = tf.data.TFRecordDataset(self._paths(job), num_parallel_reads=self.readers, buffer_size=8 << 20)
        batches = records.batch(job["batch"]).map(partial(self._examples, job), num_parallel_calls=2)
        return self._distributed(self._pictures(batches, job)).prefetch(4)

    def _examples(self, job: dict[str, Any], records: Any) -> Any:
        features = {job["image"]: tf.io.FixedLenFeature([], tf.string)}
        if job["label"]:
            features[job["label"]] = tf.io.FixedLenFeature([], job.get("label_kind", "int64"))
        found = tf.io.parse_example(records, features)
        return tuple(found[name] for name in features)

    def _pictures(self, batches: Any, job: dict[str, Any]) -> Any:
        def picture(data: Any) -> Any:
            pixels = tf.image.resize(
                tf.io.decode_image(data, 3, expand_animations=False), (decoders.SIDE, decoders.SIDE)
            )
            return tf.cast(pixels, tf.uint8)

        def decoded(images: Any, *labels: Any) -> Any:
            return tf.map_fn(picture, images, fn_output_signature=tf.uint8), *labels

        return batches.map(decoded, num_parallel_calls=self.readers) if job.get("decode") else batches

    # ── where records come from ──────────────────────────────────────────────────────────────────────────────────────

    def _paths(self, job: dict[str, Any]) -> list[str]:
        keys = job.get("tfrecord", job["keys"])
        if self.way == "io":
            return [f"s3://{self.bucket}/{key}" for key in keys]
        if self.directory is None:
            self.directory = self.stack.enter_context(tempfile.TemporaryDirectory(dir=job["scratch"]))
            programs.download(self.url, self.bucket, job, self.directory)
        return [f"{self.directory}/{key}" for key in keys]

    def _columns(self, job: dict[str, Any]) -> Any:
        import penstock as ps
        import penstock.tensorflow

        urls = [f"s3://{self.bucket}/{key}" for key in job["keys"]]
        shards = ps.shards(urls, format="tfrecord-raw", endpoint_url=self.url).batch(job["batch"])
        dataset = ps.tensorflow.dataset(shards, index="stream")
        return dataset.map(lambda batch: self._examples(job, batch["record"]), num_parallel_calls=2)

    def _shards(self, read: Any, job: dict[str, Any], types: Any) -> Any:
        """What `read` returns for each key, sample by sample."""

        def shard(key: Any) -> Any:
            found = tf.py_function(read, [key], types)
            for column in found if isinstance(found, list) else [found]:
                column.set_shape([None])
            return tf.data.Dataset.from_tensor_slices(tuple(found) if isinstance(found, list) else found)

        keys = tf.data.Dataset.from_tensor_slices(job.get("tfrecord", job["keys"]))
        return keys.interleave(shard, cycle_length=self.readers, num_parallel_calls=self.readers)

    def _distributed(self, batches: Any) -> Any:
        """What the workers of tf.data service make; other ways make it here."""
        if self.way != "service":
            return batches
        return batches.apply(service.distribute(service.ShardingPolicy.DYNAMIC, self.dispatcher.target))

    def _records(self, key: Any) -> Any:
        body = loop.boto3_body(self.url, self.bucket, key.numpy().decode()).read()
        records, at = [], 0
        while at < len(body):
            (length,) = struct.unpack_from("<Q", body, at)
            records.append(body[at + 12 : at + 12 + length])
            at += length + 16
        return tf.constant(records)

    def _tar(self, job: dict[str, Any], key: Any) -> Any:
        body = loop.boto3_body(self.url, self.bucket, key.numpy().decode())
        samples = list(loop.read_tar(body, (job["image"], job["label"])))
        images = [sample[job["image"]] for sample in samples]
        if job.get("pixels"):
            import numpy as np
            from PIL import Image

            images = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).tobytes() for image in images]
        return [images, [sample[job["label"]] for sample in samples]] if job["label"] else [images]

    def _piped(self, job: dict[str, Any]) -> Iterator[bytes]:
        with programs.piped(self.url, self.bucket, job["keys"]) as pipe:
            while head := pipe.read(12):
                (size_bytes,) = struct.unpack_from("<Q", head)
                yield pipe.read(size_bytes + 4)[:-4]


class Strings:
    """A tensor of strings: counted as a training step would see it, without making Python objects of them."""

    def __init__(self, tensor: Any, check: bool) -> None:
        self.tensor, self.lengths = tensor, None if check else tf.strings.length(tensor).numpy()

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __iter__(self) -> Iterator[Any]:
        if self.lengths is None:
            return iter(self.tensor.numpy().tolist())
        return (range(length) for length in self.lengths.tolist())


CLIENT = TensorFlow
