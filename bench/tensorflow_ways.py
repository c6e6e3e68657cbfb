"""How long does TensorFlow take for a TFRecord of 1 GB in a bucket, by each way that needs no build of its own?

``penstock.tensorflow.dataset``, the same through a gateway, ``TFRecordDataset`` on a mounted bucket, a generator on a pipe from
``penstock cat``, and ``TFRecordDataset`` on a local file. Records are ``tf.train.Example`` with 100 KB and a label, in batches.
The store answers after 30 ms and sends 90 MB/s on each connection. It needs ``make .venvs/tensorflow/.ready``.
"""

from __future__ import annotations

import os
import random
from typing import Any

from clients import BUCKET
from epochs import METRICS, STORE, Samples, bucket
from gateway import gateway
from gateway_tensorflow import RECORDS, TensorFlowReader
from harness import arguments

from penstock.bench.origin.server import Origin
from penstock.bench.turns import Run

IMAGE_BYTES = 100_000
TOTAL_BYTES = 1_000_000_000
WAYS = {"dataset": "records", "gateway": "records", "mount": "mount", "pipe": "pipe", "local": "local"}


def main() -> None:
    options = arguments(__doc__)
    count = TOTAL_BYTES // IMAGE_BYTES // (10 if options.quick else 1)
    with bucket() as (root, folder):
        content = random.Random(0)
        samples = Samples([content.randbytes(IMAGE_BYTES) for _ in range(100)], labels=list(range(count)))
        keys = samples.write_tfrecords(folder / "records", count)
        clients = options.select(
            [TensorFlowReader(name, "tensorflow", same=RECORDS, way=way) for name, way in WAYS.items()]
        )
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            clients = [client for client in clients if client.name != "mount"]
        with Origin(root, **STORE) as origin, gateway(origin.url) as served:

            def job(client: Any) -> dict[str, Any]:
                url = served.url if client.name == "gateway" else origin.url
                return {"url": url, "keys": keys, "folder": str(root / BUCKET)}

            question = f"TensorFlow: a TFRecord of {count * IMAGE_BYTES / 1e9:g} GB"
            metrics = {"seconds": lambda answer: answer["seconds"], **METRICS}
            with Run(question, origin, clients, metrics, options.turns(3, 1)) as run:
                run.turns(
                    lambda client: client.measured(samples, job(client)),
                    warm=lambda client: client.checked(samples, job(client)),
                )
                run.report([], bytes=count * IMAGE_BYTES)


if __name__ == "__main__":
    main()
