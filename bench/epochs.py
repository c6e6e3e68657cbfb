"""What the benchmarks of sample loading share: the samples, in each library's format, and the clients that load them."""

from __future__ import annotations

import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients import BUCKET, Client
from harness import memory_folder

from penstock.bench.clients.loop import MASK
from penstock.bench.measuring import Monitor
from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError, client_command
from penstock.bench.samples import write_tar, write_tfrecord
from penstock.bench.turns import Run

STORE = {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
"""The store answers after 30 ms and sends 90 MB/s on each connection."""

BATCH = 128
ANSWER_S_MAX = 150.0
MEAN_ERROR_MAX = 3.0  # most grey levels between the means of a picture from two decoders
METRICS: dict[str, Callable[[dict[str, Any]], float]] = {
    "samples/s": lambda answer: answer["samples"] / answer["seconds"],
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
    "CPU s/1000": lambda answer: answer["cpu_s"] / answer["samples"] * 1e3,
    "first batch s": lambda answer: answer["first_s"],
    "PSS MB": lambda answer: answer["pss_mb"],
}


# ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Samples:
    """The samples in a bucket: their shards, and what a correct client returns."""

    images: list[bytes]
    keys: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, label: int) -> bytes:
        return self.images[label % len(self.images)]

    @property
    def image_bytes(self) -> int:
        """Mean size of an image in bytes."""
        return sum(map(len, self.images)) // len(self.images)

    def bytes(self) -> int:
        return sum(len(self.image(label)) for label in self.labels)

    def write_tars(self, folder: Path, counts: list[int], image: str, *, label_text: bytes = b"%d") -> None:
        """Write a tar for each of `counts`, with pairs (`image`, cls), as tarfile and webdataset do."""
        folder.mkdir(parents=True)
        for number, count in enumerate(counts):
            path = folder / f"{number:06d}.tar"
            labels = range(len(self.labels), len(self.labels) + count)
            with path.open("wb") as file:
                fields = (({image: self.image(label), "cls": label_text % label}) for label in labels)
                write_tar(file, zip((f"{label:08d}" for label in labels), fields, strict=True))
            self.labels += labels
            self.keys.append(f"{folder.name}/{path.name}")

    def write_tfrecords(self, folder: Path, count_each: int) -> list[str]:
        """Write the same samples as ``tf.train.Example`` with an image and a label."""
        folder.mkdir(parents=True)
        keys = []
        for start in range(0, len(self.labels), count_each):
            path = folder / f"{start:08d}.tfrecord"
            with path.open("wb") as file:
                labels = self.labels[start : start + count_each]
                write_tfrecord(file, ({"image": self.image(label), "label": label} for label in labels))
            keys.append(f"{folder.name}/{path.name}")
        return keys

    def write_objects(self, folder: Path, count: int) -> None:
        """Write one object for each sample, whose name is its label."""
        folder.mkdir(parents=True)
        for label in range(count):
            (folder / f"{label:08d}.jpg").write_bytes(self.image(label))
            self.keys.append(f"{folder.name}/{label:08d}.jpg")
            self.labels.append(label)

    def again(self, folder: Path, times: int) -> None:
        """Add the same shards under more names, which makes the epoch longer without taking memory."""
        originals, labels = list(self.keys), list(self.labels)
        for turn in range(1, times):
            for key in originals:
                name = f"{turn}-{Path(key).name}"
                (folder / name).hardlink_to(folder / Path(key).name)
                self.keys.append(f"{folder.name}/{name}")
            self.labels += labels

    # ── verification ───────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, labels: list[int] | None = None) -> int:
        """Return the checksum of a client that delivered the samples of `labels`; None stands for all."""
        crc = [zlib.crc32(image) * 65537 + len(image) for image in self.images]
        return sum((label + 1) * crc[label % len(crc)] for label in (self.labels if labels is None else labels)) & MASK

    def means(self) -> list[float]:
        """Return the mean of each distinct picture after Pillow resized it."""
        import numpy as np

        from penstock.bench.clients.decoders import pillow

        return [float(np.asarray(pillow(image), "f4").mean()) for image in self.images]

    def verify(self, client: Any, answer: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
        """Return `answer`. Raises ``BenchError`` if the client did not deliver exactly these samples."""
        decoded = bool(job.get("decode"))
        wanted = {"samples": len(self), "bytes": len(self) * 224 * 224 * 3 if decoded else self.bytes()}
        if job["check"]:
            wanted["check"] = sum(label + 1 for label in self.labels) & MASK if decoded else self.check()
        if wrong := {name: answer[name] for name, value in wanted.items() if answer[name] != value}:
            raise BenchError(f"{client.name} delivered {wrong}, not {wanted}")
        if job["check"] and decoded:
            means = self.means()
            errors = [abs(mean - means[int(label) % len(means)]) for label, mean in answer["means"].items()]
            if len(errors) != len(set(self.labels)) or max(errors) > MEAN_ERROR_MAX:
                raise BenchError(f"{client.name}: {len(errors)} pictures, {max(errors):.1f} grey levels off at worst")
        return answer


def mixed_counts(total: int, sample_bytes: int, largest_bytes: int = 256 << 20) -> list[int]:
    """Return sample counts for shards of 256, 64, 16 and 4 MiB; about a quarter of all bytes is in each size."""
    counts, left = [], total
    for size_bytes in (256 << 20, 64 << 20, 16 << 20, 4 << 20):
        size = max(1, min(size_bytes, largest_bytes) // sample_bytes)
        share = left if size_bytes == 4 << 20 else total // 4
        while share >= size:
            counts.append(size)
            share, left = share - size, left - size
    counts += [left] if left else []
    random.Random(0).shuffle(counts)
    return counts


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Loads(Client):
    """A library that loads samples, driven by ``penstock.bench.clients``. `same` are entries of the job only for it."""

    answer_s_max = ANSWER_S_MAX

    def __init__(self, name: str, driver: str, *, same: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(name, driver, **options)
        self.extra = same or {}
        self.pss_mb = 0.0
        self.program: list[str] = []  # arguments of the interpreter, in place of the client's own program

    @property
    def command(self) -> list[str]:
        return [str(self.python), *(self.program or client_command(self.driver)[1:])]

    def job(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"batch": BATCH, "image": "jpg", "label": "cls", **job, **self.extra}

    def checked(self, samples: Samples, job: dict[str, Any]) -> None:
        """Run one uncounted epoch in which every byte is compared and memory is measured."""
        whole = {**self.job(job), "check": self.options.get("mode", "loader") == "loader"}
        with Monitor(self.pid) as monitor:
            answer = self.ask({"do": "epoch", "job": whole})
        self.pss_mb = monitor.peak_pss_bytes / 1e6
        self._verify(samples, answer, whole)

    def measured(self, samples: Samples, job: dict[str, Any]) -> dict[str, Any]:
        light = {**self.job(job), "check": False}
        answer = self._verify(samples, self.ask({"do": "epoch", "job": light}), light)
        return {**answer, "pss_mb": self.pss_mb}

    def _verify(self, samples: Samples, answer: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
        if self.options.get("mode") == "raw":  # raw reading gives parts of shards, not samples
            if answer["bytes"] < samples.bytes():
                raise BenchError(f"{self.name} delivered {answer['bytes']} bytes")
            return {**answer, "bytes": samples.bytes(), "samples": len(samples)}
        return samples.verify(self, answer, job)


class Fresh(Loads):
    """A new process for every turn, which loads one batch. Each label must come with the bytes of its picture."""

    def start(self, origin: Origin) -> None:
        self.origin = origin

    def measured(self, samples: Samples, job: dict[str, Any]) -> dict[str, Any]:
        process = Loads(self.name, self.driver, same=self.extra, **self.options)
        try:
            process.start(self.origin)
            self.versions = process.versions
            answer = process.ask({"do": "epoch", "job": {**process.job(job), "check": True}})
        finally:
            process.close()
        if answer["samples"] != BATCH or answer["check"] != samples.check(answer["labels"]):
            raise BenchError(f"{self.name}: a first batch of {answer['samples']}, labels {answer['labels'][:8]}...")
        return answer


@contextmanager
def bucket() -> Iterator[tuple[Path, Path]]:
    """Create a root folder in memory and a bucket in it; both are removed at the end."""
    with memory_folder() as root:
        (root / BUCKET).mkdir()
        (root / "scratch").mkdir()
        yield root, root / BUCKET


def pack(root: Path, driver: str, source: Path, target: Path, **options: Any) -> None:
    """Convert a folder of tars to the peer's own format with its own writer."""
    client = Loads(driver, driver, **options)
    try:
        client.start(Origin(root))
        client.ask({"do": "pack", "source": str(source), "target": str(target)})
    finally:
        client.close()


def build_index(origin: Origin, folder: Path, *, prefix: str = "tar") -> None:
    """Build penstock's index of the tars."""
    from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

    import penstock as ps

    keys = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    tars = ps.shards(f"s3://{BUCKET}/{prefix}/", endpoint_url=origin.url, region=REGION, credentials=keys)
    ps.build_index(tars, index_dir=folder)


def keys_in(root: Path, folder: str) -> list[str]:
    """Return the keys in a folder of the bucket, sorted."""
    return sorted(str(path.relative_to(root / BUCKET)) for path in (root / BUCKET / folder).iterdir())


def compare(
    question: str,
    root: Path,
    clients: list[Any],
    samples: Samples,
    job: dict[str, Any],
    turns: int,
    *,
    store: dict[str, Any] = STORE,
    metrics: dict[str, Callable[[dict[str, Any]], float]] = METRICS,
    checks: bool = True,
) -> Run:
    """Check every client once, then measure them in turn. Clients that fail are left out, with the reason in the record."""
    started = time.time()
    with Origin(root, **store) as origin:
        job = {
            **job,
            "keys": job.get("keys", samples.keys),
            "folder": str(root / BUCKET),
            "scratch": str(root / "scratch"),
        }
        run = Run(question, origin, clients, metrics, turns, tolerates=lambda client: not client.is_ours)
        with run:
            run.turns(
                lambda client: client.measured(samples, job),
                warm=(lambda client: _noted(client, samples, job)) if checks else None,
            )
    print(f"{question}: {time.time() - started:.0f} s", file=sys.stderr)
    return run


def _noted(client: Any, samples: Samples, job: dict[str, Any]) -> None:
    client.checked(samples, job)
    print(f"{client.name}: every sample verified, {client.pss_mb:.0f} MB at most", file=sys.stderr)


def lowest(run: Run, metric: str, name: str) -> list[float]:
    """Return the median of `name` divided by the lowest of the others; empty if a client was left out."""
    others = [statistics.median(run.values(other, metric)) for other in run.answers if other != name]
    if name not in run.answers or not others:
        return []
    return [value / min(others) for value in run.values(name, metric)]
