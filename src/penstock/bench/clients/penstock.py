"""penstock as it comes: ``Loader`` over shards or single objects; and its decoder alone, fed from memory."""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Self

import penstock as ps
from penstock import Loader  # its modules now, as peers' imports have theirs, and not under the clock
from penstock.bench.clients import decoders, loop, programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AHEAD_BYTES = 64 << 20


class Penstock:
    """`mode` ``loader``; ``raw``: the shards' bytes, unparsed; ``decode``: from memory, beside a client that discards.

    ``bare``: one batch in memory again and again; ``local``: the first shard from local files, again and again. By number in
    random order: ``stream``, or ``batches`` one by one. In a DataLoader with so many `workers`: ``torch`` or ``map``.
    `mount`: a folder to read instead of the bucket. `through` a gateway of its own, which is ``cold``, ``warm``: it has served
    all before, or runs a Lambda ``handler``. `cache`: size of a loader's cache on disk, which an epoch finds empty.
    `cluster`: number of workers on a Ray cluster, which starts before the clock.
    """

    packages = ("penstock-data", "numpy")

    def __init__(
        self,
        *,
        url: str | None,
        bucket: str,
        mode: str = "loader",
        mount: str = "",
        through: str = "",
        workers: int = 2,
        cache: str = "none",
        cluster: int = 0,
        **loader: Any,
    ) -> None:
        self.url, self.bucket, self.mode, self.loader = url, bucket, mode, loader
        self.through, self.workers, self.cluster = through, workers, cluster
        self.blocks, self.fetched_bytes, self.throttled_count = cache, 0, 0
        self.keys: list[str] = []
        if mode in ("torch", "map"):
            import penstock.torch  # noqa: F401 - not under the clock
        self.stack = ExitStack()
        self.connection: dict[str, Any] = {} if mount else {"endpoint_url": url, "anonymous": loop.ANONYMOUS}
        self.root = mount or f"s3://{bucket}"

    def prepare(self, job: dict[str, Any]) -> None:
        """An index that an earlier epoch left is not found, unless the job says where one is."""
        self.folder = self.stack.enter_context(
            tempfile.TemporaryDirectory(dir=job["scratch"], ignore_cleanup_errors=True)
        )
        os.environ["XDG_CACHE_HOME"] = self.folder
        self.loader |= programs.cluster_workers(self.stack, self.cluster)
        self.keys = job["keys"] if self.through and not job.get("objects") else []
        if self.through:
            served = programs.gateway(self.url, self.bucket, job, self.through)
            self.connection["endpoint_url"] = self.stack.enter_context(served)
        if self.mode == "local":
            self._copy(job)
        if self.through == "warm":
            self._within(job, lambda _: deque(self._load(job), maxlen=0))
        elif self.mode == "map" and not job.get("objects"):
            self._within(job, lambda done: ps.build_index(self.source(job, done)))
        self.fetched_bytes = self.throttled_count = 0

    def about(self) -> dict[str, Any]:
        """Bytes that came from the store, as far as a loader counts them; answers by which the store asked to slow down."""
        counted = {"fetched_bytes": self.fetched_bytes, "throttled_count": self.throttled_count}
        return {name: value for name, value in counted.items() if value}

    def _within(self, job: dict[str, Any], do: Callable[[list[str]], object]) -> None:
        """Do it for as many keys as there is time for; the epoch reads these. Without a limit, a large data set takes hours."""
        begun_s, done, step = time.perf_counter(), 0, 1
        while done < len(job["keys"]) and time.perf_counter() - begun_s < job.get("seconds_max", math.inf):
            self.keys = job["keys"][done : done + step]
            do(job["keys"][: done + step])
            done += step
            step *= 2
        self.keys = job["keys"][:done]

    def finish(self) -> None:
        self.stack.close()

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        if self.mode == "raw":
            return self._raw(job)
        if self.mode == "bare":
            return itertools.repeat(([b"image"], [b"0"]), job["batches_max"])
        if self.mode == "decode":
            return self._decode(job)
        if self.mode in ("stream", "batches"):
            return self._by_number(job)
        if self.mode == "local":
            return itertools.chain.from_iterable(self._load(job) for _ in itertools.count())
        if job.get("chunk_bytes"):
            return self._chunks(job)
        if self.mode == "torch":
            return self._torch(job)
        if self.mode == "map":
            return self._map(job)
        return self._load(job)

    def source(self, job: dict[str, Any], keys: list[str] | None = None) -> Any:
        """The data set, or only `keys` of it."""
        names = keys or job.get("source", loop.folder_of(job))
        urls = f"{self.root}/{names}" if isinstance(names, str) else [f"{self.root}/{name}" for name in names]
        made_here = {"format": "tfrecord"} if self.through and job["format"] == "tar" else {}
        return (ps.objects if job.get("objects") else ps.shards)(urls, **self.connection, **made_here)

    def decoded(self, pipeline: Any, job: dict[str, Any]) -> Any:
        """With the picture as an array, and the label; through a gateway, pixels come as they are."""
        if not job.get("decode") and (self.through or not job.get("pixels")):
            return pipeline
        side = decoders.SIDE if job.get("decode") else None
        label = ps.Bytes if job.get("label_kind") == "string" else ps.Integer
        labels = [label(job["label"])] if job["label"] and not job.get("objects") else []
        return pipeline.decode(ps.Image(job["image"], height=side, width=side), *labels)

    def pipeline(self, job: dict[str, Any]) -> Any:
        """Images and labels; where objects hold no label, the key's number is it."""
        pipeline = self.source(job, self.keys)
        if not (job.get("objects") or job.get("documents")):
            pipeline = pipeline.select([name for name in (job["image"], job["label"]) if name])
        if job.get("shuffle"):
            pipeline = pipeline.shuffle(window=job["shuffle"], seed=job.get("seed", 0))
        if job.get("documents"):
            pipeline = pipeline.token_blocks(job["block"], dtype="uint16")
        pipeline = self.decoded(pipeline, job)
        return pipeline.batch(job["batch"], drop_last=False)

    def _load(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        kept = {"cache": f"{self.folder}/blocks:{self.blocks}"} if self.blocks != "none" else {}
        with Loader(self.pipeline(job), **kept, **self.loader) as loader:
            try:
                for batch in loop.begun(loader, job):
                    yield loop.of_blocks(batch["tokens"]) if job.get("block") else _of(batch, job)
                    del batch
            finally:
                self.fetched_bytes += loader.statistics().bytes

    def _copy(self, job: dict[str, Any]) -> None:
        """Copy the first shard, or as many objects as a batch has, to the folder in which the epoch then finds it."""
        keys = job["keys"][: job["batch"] if job.get("objects") else 1]
        with ps.connect(f"s3://{self.bucket}/", endpoint_url=self.url) as store:
            for blob in store.read_many(keys):
                path = Path(self.folder, blob.key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(blob.data)
        self.root, self.connection, self.keys = self.folder, {}, keys

    def _chunks(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Ranges of ``chunk_bytes`` at random places of the shards."""
        source, size = Random(0), job["chunk_bytes"]
        with ps.connect(f"{self.root}/", **self.connection) as store:
            sizes = {info.key: info.size_bytes for info in store.list(loop.folder_of(job))}

            def ranges() -> Iterator[tuple[str, ps.ByteRange]]:
                while True:
                    key = source.choice(job["keys"])
                    start = source.randint(0, max(0, sizes[key] - size))
                    yield key, ps.ByteRange(start, min(start + size, sizes[key]))

            chunks = ((blob.data, None) for blob in store.read_many(ranges(), ordered=False))
            yield from loop.batched(chunks, job["batch"])

    def _torch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Batches that the data set makes, in a DataLoader."""
        from torch.utils.data import DataLoader

        from penstock.torch import IterableDataset

        dataset = IterableDataset(self.pipeline(job), **self.loader)
        for batch in DataLoader(dataset, batch_size=None, num_workers=self.workers):
            images, labels = _of(batch, job)
            yield (images.numpy() if job.get("decode") else images), labels

    def _map(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Samples by number in random order, in a DataLoader."""
        from torch.utils.data import DataLoader

        from penstock.torch import MapDataset

        source = self.source(job, self.keys)
        dataset = MapDataset(self.decoded(source, job))
        yield from DataLoader(
            dataset, job["batch"], shuffle=True, num_workers=self.workers, collate_fn=partial(_collated, job)
        )

    def _by_number(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """A permutation of all samples, by ranges of their own; shards by the index that the job has."""
        import numpy as np

        source = ps.objects if job.get("objects") else ps.shards
        made = source(f"s3://{self.bucket}/{loop.folder_of(job)}", **self.connection)
        with made.open(index="require", index_dir=job.get("index"), **self.loader) as dataset:
            order = np.random.default_rng(job.get("seed", 0)).permutation(len(dataset))
            samples = dataset.iter_samples(order)
            for start in range(0, len(order), job["batch"]):
                numbers = order[start : start + job["batch"]]
                batch = dataset[numbers] if self.mode == "batches" else list(itertools.islice(samples, len(numbers)))
                yield _of(_columns(batch), job)

    def _raw(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Parts instead of samples, in order: no parser, no batch, no order."""
        store = ps.connect(f"s3://{self.bucket}", **self.connection)
        chunks = store.read_parts(job["keys"])
        try:
            for chunk in chunks:
                yield [chunk.data], [0]
                del chunk
        finally:
            self.throttled_count = chunks.statistics().throttled_count

    def _decode(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Decodes the pictures of `job`'s files as often as the epoch has them, while the server sends their bytes."""
        import numpy as np

        field = decoders._field(job["image"])
        pictures = [memoryview(image) for image, _ in itertools.islice(loop.tar_samples(job["pictures"]), 512)]
        total, side = job["samples"], decoders.SIDE
        threads = self.loader.get("threads", 2)
        with _Discarding(self.url, self.bucket, job["keys"]) as server, ThreadPoolExecutor(threads) as pool:

            def decode(start: int) -> Any:
                batch = np.empty((min(job["batch"], total - start), side, side, 3), np.uint8)
                for row in range(len(batch)):
                    data = pictures[(start + row) % len(pictures)]
                    field.decode_into(data, batch[row])
                    server.allow(len(data) + 1536)  # and its two headers and its label in the tar
                return batch

            for batch in pool.map(decode, range(0, total, job["batch"])):
                yield batch, np.zeros(len(batch))
                del batch


def _of(batch: Any, job: dict[str, Any]) -> loop.Batch:
    """The images and labels of a batch of columns."""
    if job.get("objects"):
        return batch[job["image"]], [loop.number_of(key) for key in batch["__key__"]]
    return batch[job["image"]], batch[job["label"]] if job["label"] else []


def _columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _collated(job: dict[str, Any], samples: list[dict[str, Any]]) -> loop.Batch:
    """A batch in a worker: bytes and arrays, which cross to the training process."""
    import numpy as np

    images, labels = _of(_columns(samples), job)
    return (np.stack(images) if job.get("decode") else [bytes(image) for image in images]), labels


class _Discarding:
    """A process that reads the shards from the server and drops their bytes in the kernel, at the pace of ``allow``."""

    def __init__(self, url: str, bucket: str, keys: list[str]) -> None:
        command = [sys.executable, "-m", __spec__.name, url, bucket, *keys]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owed_bytes, self._allowed_bytes, self._lock = AHEAD_BYTES, AHEAD_BYTES, threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        told, _ = self._process.communicate()
        if kind is None and int(told) < 0.8 * (self._allowed_bytes - AHEAD_BYTES):
            raise AssertionError(f"the server sent {int(told)} bytes beside the decoding of {self._allowed_bytes}")

    def allow(self, count: int) -> None:
        with self._lock:
            self._owed_bytes += count
            self._allowed_bytes += count
            if self._owed_bytes >= 1 << 20:
                self._process.stdin.write(struct.pack("<Q", self._owed_bytes))
                self._process.stdin.flush()
                self._owed_bytes = 0


def discard(url: str, bucket: str, keys: list[str]) -> None:
    """Reads `keys` over eight connections; MSG_TRUNC drops the bytes without copying them. Prints how many they were."""
    address = urllib.parse.urlsplit(url)
    permits = total = 0
    condition = threading.Condition()

    def take(count: int) -> None:
        nonlocal permits, total
        with condition:
            while permits <= 0:
                condition.wait()
            permits -= count
            total += count

    def read(mine: list[str]) -> None:
        connection, unused = socket.create_connection((address.hostname, address.port)), bytearray(1 << 20)
        for key in mine:
            connection.sendall(f"GET /{bucket}/{key} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            fields, body = head.split(b"\r\n\r\n", 1)
            left = int(fields.lower().split(b"content-length:")[1].split()[0]) - len(body)
            while left:
                take(got := connection.recv_into(unused, min(left, 1 << 20), socket.MSG_TRUNC))
                left -= got

    lanes = [threading.Thread(target=read, args=(keys[start::8],), daemon=True) for start in range(8)]
    for lane in lanes:
        lane.start()
    while record := sys.stdin.buffer.read(8):
        with condition:
            permits += struct.unpack("<Q", record)[0]
            condition.notify_all()
    sys.stdout.write(str(total))


CLIENT = Penstock

if __name__ == "__main__":
    discard(sys.argv[1], sys.argv[2], sys.argv[3:])
