"""penstock as it comes: ``Loader`` over shards or single objects; and its decoder alone, fed from memory."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import penstock as ps
from penstock import Loader  # its modules now, as peers' imports have theirs, and not under the clock
from penstock.bench.clients import decoders, loop

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD_BYTES = 64 << 20


class Penstock:
    """`mode` ``loader``; ``raw``: the shards' bytes, unparsed; ``decode``: from memory, beside a client that discards.

    ``bare``: one batch in memory again and again; by number in random order: ``stream``, or ``batches`` one by one.

    `mount`: a folder to read instead of the bucket.
    """

    packages = ("penstock-data", "numpy")

    def __init__(self, *, url: str, bucket: str, mode: str = "loader", mount: str = "", **loader: Any) -> None:
        self.url, self.bucket, self.mode, self.loader = url, bucket, mode, loader
        self.cache = ""
        self.connection = {} if mount else {"endpoint_url": url}
        self.root = mount or f"s3://{bucket}"

    def prepare(self, job: dict[str, Any]) -> None:
        """An index that an earlier epoch left is not found, unless the job says where one is."""
        os.environ["XDG_CACHE_HOME"] = self.cache = tempfile.mkdtemp(dir=job["scratch"])

    def finish(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)

    def epoch(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        if self.mode == "raw":
            return self._raw(job)
        if self.mode == "bare":
            return itertools.repeat(([b"image"], [b"0"]), job["batches_max"])
        if self.mode == "decode":
            return self._decode(job)
        if self.mode in ("stream", "batches"):
            return self._by_number(job)
        return self._load(job)

    def pipeline(self, job: dict[str, Any]) -> Any:
        """Images and labels; where objects hold no label, the key's number is it."""
        name = job["image"]
        urls = f"{self.root}/{job['prefix']}/"
        source = ps.objects if job.get("objects") else ps.shards
        pipeline = source(urls, **self.connection)
        if job.get("shuffle"):
            pipeline = pipeline.shuffle(window=job["shuffle"], seed=job.get("seed", 0))
        if job.get("documents"):
            pipeline = pipeline.token_blocks(job["block"], dtype="uint16")
        if job.get("decode"):
            labels = [] if job.get("objects") else [ps.Integer(job["label"])]
            pipeline = pipeline.decode(ps.Image(name, height=decoders.SIDE, width=decoders.SIDE), *labels)
        return pipeline.batch(job["batch"], drop_last=False)

    def _load(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        name = job["image"]
        with Loader(self.pipeline(job), **self.loader) as loader:
            for batch in loop.begun(loader, job):
                if job.get("block"):
                    yield loop.of_blocks(batch["tokens"])
                else:
                    yield batch[name], _named(batch["__key__"]) if job.get("objects") else batch[job["label"]]
                del batch

    def _by_number(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """A permutation of all samples, by ranges of their own; shards by the index that the job has."""
        import numpy as np

        source = ps.objects if job.get("objects") else ps.shards
        made = source(f"s3://{self.bucket}/{job['prefix']}/", **self.connection)
        with made.open(index="require", index_dir=job.get("index"), **self.loader) as dataset:
            order = np.random.default_rng(job.get("seed", 0)).permutation(len(dataset))
            samples = dataset.iter_samples(order)
            for start in range(0, len(order), job["batch"]):
                numbers = order[start : start + job["batch"]]
                batch = dataset[numbers] if self.mode == "batches" else list(itertools.islice(samples, len(numbers)))
                images = [sample[job["image"]] for sample in batch]
                if job.get("objects"):
                    yield images, _named([sample["__key__"] for sample in batch])
                else:
                    yield images, [sample[job["label"]] for sample in batch]

    def _raw(self, job: dict[str, Any]) -> Iterator[loop.Batch]:
        """Parts instead of samples, in order: no parser, no batch, no order."""
        store = ps.connect(f"s3://{self.bucket}", **self.connection)
        keys = [info.key for info in store.list(job["prefix"] + "/")]
        for chunk in store.read_parts(keys):
            yield [chunk.data], [0]
            del chunk

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


def _named(keys: list[str]) -> list[str]:
    """The numbers in objects' names."""
    return [key.rsplit("/", 1)[-1].split(".")[0] for key in keys]


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
