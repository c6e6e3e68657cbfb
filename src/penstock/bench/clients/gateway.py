"""TensorFlow with samples from a bucket: tars by ``tarfile`` and Pillow, or TFRecords by ``penstock.tensorflow``."""

from __future__ import annotations

import http.client
import io
import os
import tarfile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.bench.clients import loop
from penstock.bench.clients.tensorflow import Strings

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


class GatewayReader(loop.Plain):
    """`way` is ``direct`` (the tars themselves) or ``records``; a job names the endpoint and the keys."""

    packages = ("tensorflow-cpu", "penstock-data")

    def __init__(self, *, url: str, bucket: str, way: str) -> None:
        self.url, self.bucket, self.way = url, bucket, way

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Every sample once: pixels and labels in batches."""
        dataset = self._direct(job) if self.way == "direct" else self._records(job)
        for pixels, labels in dataset:
            yield (_Images(pixels) if self.way == "direct" else Strings(pixels, job["check"])), labels.numpy()

    def _direct(self, job: dict[str, Any]) -> Any:
        import tensorflow as tf

        signature = tf.TensorSpec((32, 32, 3), tf.uint8), tf.TensorSpec((), tf.int64)
        samples = tf.data.Dataset.from_generator(lambda: self._samples(job), output_signature=signature)
        return samples.batch(job["batch"]).prefetch(4)

    def _samples(self, job: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        import numpy as np
        from PIL import Image

        host = urlsplit(job.get("url") or self.url).netloc
        for key in job["keys"]:
            connection = http.client.HTTPConnection(host)
            connection.request("GET", f"/{self.bucket}/{key}")
            with tarfile.open(fileobj=connection.getresponse(), mode="r|") as archive:
                for member in archive:
                    data = archive.extractfile(member).read()
                    if member.name.endswith(".png"):
                        pixels = np.asarray(Image.open(io.BytesIO(data)))
                    else:
                        yield pixels, int(data.strip(b"[]"))
            connection.close()

    def _records(self, job: dict[str, Any]) -> Any:
        import tensorflow as tf

        import penstock as ps
        import penstock.tensorflow

        shards = ps.shards(
            [f"s3://{self.bucket}/{key}" for key in job["keys"]], format="tfrecord-raw",
            endpoint_url=job.get("url") or self.url,
        )  # fmt: skip
        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

        def parse(batch: Any) -> Any:
            found = tf.io.parse_example(batch["record"], features)
            return found["image"], found["label"]

        dataset = ps.tensorflow.dataset(shards.batch(job["batch"]), index="stream")
        return dataset.map(parse, num_parallel_calls=2)


class _Images:
    """A tensor of images: counted as arrays of bytes, which ``_loading`` takes for undecoded samples."""

    def __init__(self, tensor: Any) -> None:
        self.images = tensor.numpy()

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Any]:
        return (memoryview(image).cast("B") for image in self.images)


CLIENT = GatewayReader
