"""TensorFlow with TFRecords from a bucket, by the ways that need no build of TensorFlow of one's own.

``dataset`` is ``penstock.tensorflow.dataset``, ``gateway`` the same on a gateway in front of the bucket, ``mount`` is
``TFRecordDataset`` on a mounted bucket, and ``pipe`` a generator that reads what ``penstock cat`` writes. ``local``: files.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.clients.gateway import GatewayReader
from penstock.bench.clients.tensorflow import Strings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bench.clients import loop


class TensorFlowWays(GatewayReader):
    """A job names the keys, the ``folder`` of the bucket on this machine, and for ``gateway`` its ``url``."""

    def prepare(self, job: dict[str, Any]) -> None:
        self._stack = ExitStack()
        os.environ["AWS_ENDPOINT_URL"] = self.url
        if self.way == "mount":
            import penstock as ps

            self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._stack.enter_context(ps.mount(f"s3://{self.bucket}/", self.directory, endpoint_url=self.url))

    def finish(self) -> None:
        self._stack.close()

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Every sample once."""
        made = self._records(job) if self.way in ("dataset", "gateway") else self._parsed(job)
        for images, labels in made:
            yield Strings(images, job["check"]), labels.numpy()

    def _parsed(self, job: dict[str, Any]) -> Any:
        import tensorflow as tf

        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

        def parse(records: Any) -> Any:
            found = tf.io.parse_example(records, features)
            return found["image"], found["label"]

        if self.way == "pipe":
            signature = tf.TensorSpec((), tf.string)
            records = tf.data.Dataset.from_generator(lambda: self._piped(job), output_signature=signature)
        else:
            folder = self.directory if self.way == "mount" else Path(job["folder"])
            records = tf.data.TFRecordDataset([str(folder / key) for key in job["keys"]], buffer_size=8 << 20)
        return records.batch(job["batch"]).map(parse, num_parallel_calls=2).prefetch(4)

    def _piped(self, job: dict[str, Any]) -> Iterator[bytes]:
        urls = [f"s3://{self.bucket}/{key}" for key in job["keys"]]
        command = [sys.executable, "-m", "penstock", "cat", *urls]
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=1 << 20) as process:
            assert process.stdout is not None
            while head := process.stdout.read(12):
                (size_bytes,) = struct.unpack_from("<Q", head)
                yield process.stdout.read(size_bytes + 4)[:-4]
        if process.returncode:
            raise RuntimeError(f"penstock cat ended with status {process.returncode}")


CLIENT = TensorFlowWays
