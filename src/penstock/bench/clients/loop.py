"""The process of a client that loads samples: it reads commands and answers them, one line of JSON each. Standard library only.

Commands:
  {"do": "open", "url": endpoint or null, "bucket": ..., "options": {...}}  -> {"versions": {...}}
  {"do": "pack", "source": folder of tars, "target": folder}               -> {}: the same samples in the peer's format
  {"do": "epoch", "job": {...}}                                            -> see ``run_epoch``
  {"do": "steps", ...}                                                     -> see ``windows.py``
Any failure answers {"error": text}. Credentials and region come from the environment, as each library finds them.

A job has "keys" (of the bucket, in order), "prefix" (their folder), "format", "batch", and the names of two fields, "image"
(the largest) and "label" (or null). Other entries are read by single clients: "source" is the prefix, pattern or key that names
the keys, or the keys, if it is not their folder.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
import tarfile
import threading
import time
import traceback
import zlib
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock.bench.clients import ANONYMOUS_VARIABLE
from penstock.bench.clients.steps import make_step
from penstock.bench.clients.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Batch: TypeAlias = tuple[Any, Any]
"""Images (buffers, or one array[B, H, W, 3]) and labels (texts, numbers or one array), one of each for a sample."""

IMAGE, LABEL = "jpg", "cls"
"""The fields of the repository's own samples, which ``pack`` converts."""
MASK = 0xFFFFFFFFFFFFFFFF
END_S = 1.0
"""Time for the end of a command that runs when standard input ends."""
LABELS_MAX = 1024
ANONYMOUS = ANONYMOUS_VARIABLE in os.environ
"""Whether the data is public, and clients read it without credentials."""
BATCHES_MIN, STEADY_S = 4, 1.0
"""Batches, and seconds after the first one, after which an epoch may end because its time is over: a rate needs some."""


class Loads(Protocol):
    """What a driver file defines; `options` of its ``__init__`` are its own."""

    packages: Sequence[str]

    def prepare(self, job: dict[str, Any]) -> None:
        """Forgets what an earlier epoch left on disk; starts what is not the data set's. Not counted."""

    def epoch(self, job: dict[str, Any]) -> Iterator[Batch]:
        """Every sample once."""

    def finish(self) -> None:
        """Ends what ``prepare`` started. Not counted."""


def tar_samples(folder: str) -> Iterator[tuple[bytes, int]]:
    """(image, label) of every sample of a folder of tars, for ``pack``."""
    for path in sorted(Path(folder).glob("*.tar")):
        with path.open("rb") as file:
            for sample in read_tar(file, (IMAGE, LABEL)):
                yield sample[IMAGE], int(sample[LABEL])


def read_tar(
    file: Any, fields: Sequence[str | None], buffer_bytes: int = tarfile.RECORDSIZE
) -> Iterator[dict[str, bytes]]:
    """The samples of a stream of tars by ``tarfile``, as dicts of `fields`; their members have one name before the dot."""
    with tarfile.open(fileobj=file, mode="r|", bufsize=buffer_bytes, ignore_zeros=True) as archive:
        last, found = "", dict[str, bytes]()
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, field = name.partition(".")
            if f"{folder}/{stem}" != last and found:
                yield found
                found = {}
            last = f"{folder}/{stem}"
            if field.lower() in fields and (content := archive.extractfile(member)):
                found[field.lower()] = content.read()
            archive.members.clear()  # type: ignore[attr-defined] # tarfile keeps them all otherwise
        if found:
            yield found


def read_parquet(file: Any, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file by pyarrow, as dicts of the two columns."""
    import pyarrow.parquet

    columns = [name for name in (job["image"], job["label"]) if name]
    for rows in pyarrow.parquet.ParquetFile(file).iter_batches(job["batch"], columns=columns):
        yield from rows.to_pylist()


def columns_of(table: Any, job: dict[str, Any]) -> Batch:
    """The images and labels of a table of Arrow."""
    return table[job["image"]].to_pylist(), table[job["label"]].to_pylist() if job["label"] else []


def folder_of(job: dict[str, Any]) -> str:
    """The prefix of all keys: empty, or with a slash at its end."""
    return f"{job['prefix']}/" if job["prefix"] else ""


def number_of(key: str) -> str:
    """The number in an object's name, which is its label."""
    return key.rsplit("/", 1)[-1].split(".", maxsplit=1)[0]


def use_endpoint(url: str | None, *names: str) -> None:
    """Set variables of the environment to the endpoint, if it is not Amazon."""
    if url:
        os.environ.update(dict.fromkeys(names or ("AWS_ENDPOINT_URL",), url))


@cache
def boto3_client(url: str | None, _process_id: int) -> Any:
    """boto3's client of S3 in this process."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    signed = {"signature_version": UNSIGNED} if ANONYMOUS else {}
    config = Config(max_pool_connections=32, s3={"addressing_style": "path" if url else "auto"}, **signed)
    return boto3.client("s3", endpoint_url=url, config=config)


def boto3_body(url: str | None, bucket: str, key: str) -> Any:
    """An object as a stream by boto3."""
    return boto3_client(url, os.getpid()).get_object(Bucket=bucket, Key=key)["Body"]


def label_of(label: Any) -> int:
    """As a number: from text, from bytes, from an array's element; 0 without a label."""
    if isinstance(label, (bytes, bytearray, memoryview)):
        return int(bytes(label).strip(b"[]"))
    return int(label.item()) if hasattr(label, "item") else int(label or 0)


def sample_check(image: Any, label: int) -> int:
    """An integer that depends on all bytes of the sample and on which label they came with."""
    return (label + 1) * (zlib.crc32(image) * 65537 + len(image))


class Tally:
    """What was delivered: number and lengths of every sample, and with `check` their bytes or mean colours."""

    def __init__(self, *, check: bool) -> None:
        self.check = check
        self.batches = self.samples = self.bytes = self.sum = 0
        self.means: dict[int, float] = {}
        self.labels: list[int] = []  # of the first samples

    def add(self, batch: Batch) -> None:
        images, labels = batch
        self.batches += 1
        self.samples += len(images)
        decoded = hasattr(images, "shape") and len(images.shape) == 4
        self.bytes += images.nbytes if decoded else sum(map(len, images))
        if not self.check:
            return
        labels = labels if len(labels) else [None] * len(images)
        if len(labels) != len(images):
            raise AssertionError(f"{len(images)} images with {len(labels)} labels")
        for image, label in zip(images, labels, strict=True):
            number = label_of(label)
            if len(self.labels) < LABELS_MAX:
                self.labels.append(number)
            if decoded:
                self.means[number] = round(float(image.astype("f4").mean()), 2)
                self.sum += number + 1
            else:
                self.sum += sample_check(image, number)

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = {"samples": self.samples, "bytes": self.bytes, "batches": self.batches}
        if self.check:
            found.update(check=self.sum & MASK, means=self.means, labels=self.labels)
        return found


def tree(pid: int) -> list[int]:
    """The process and everything below it."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # ended meanwhile
    return found


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of the tree, with the children that have ended."""
    ticks = 0
    for one in tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_epoch(client: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Load an epoch or its beginning, and answer what that took.

    `job` may have "batches_max", "seconds_max" (then it ends with a batch that is late), "cached" (the first batch
    comes again and again), "epochs" (so many one after another), "step" (see ``steps.py``) and
    "check" (the bytes of every sample enter a sum, and not only their number and lengths).

    Returns:
        "seconds" and "first_s" count from "start_s" (of ``time.perf_counter``), before the data set is made. "cpu_s" is user
        and system time of the client and all that it started. "stall_s" is the time in which the loop waited for batches
        after the first one, "step_s" that of its steps. "times_s" are the times at which batches came, "counts" and "sizes"
        the samples and bytes that had come by then.
    """
    try:
        client.prepare(job)
        return {**_loaded(client, job), **(client.about() if hasattr(client, "about") else {})}
    finally:
        client.finish()


def _loaded(client: Any, job: dict[str, Any]) -> dict[str, Any]:
    step = make_step(job.get("step"))
    tally, most, seconds_max = Tally(check=job.get("check", False)), job.get("batches_max"), job.get("seconds_max")
    times_s: list[float] = []
    counts: list[int] = []
    sizes: list[int] = []
    step_s = 0.0
    cpu_s, start_s = tree_cpu_s(os.getpid()), time.perf_counter()
    batches: Iterator[Any] = itertools.chain.from_iterable(client.epoch(job) for _ in range(job.get("epochs", 1)))
    if job.get("cached"):
        batches = itertools.repeat(next(iter(batches)))
    for batch in batches:
        came_s = time.perf_counter()
        tally.add(batch)
        times_s.append(round(came_s - start_s, 6))
        counts.append(tally.samples)
        sizes.append(tally.bytes)
        if step is not None:
            step(batch)
            step_s += time.perf_counter() - came_s
        del batch
        now_s = time.perf_counter() - start_s
        is_late = seconds_max is not None and now_s >= max(seconds_max, times_s[0] + min(seconds_max, STEADY_S))
        if len(times_s) == most or (is_late and len(times_s) >= BATCHES_MIN):
            break
    seconds = time.perf_counter() - start_s
    busy_s = tree_cpu_s(os.getpid())  # a cluster takes the seconds of its processes along when it ends
    del batches  # ends its workers, whose seconds then count
    cpu_s = max(busy_s, tree_cpu_s(os.getpid())) - cpu_s
    first_s = times_s[0] if times_s else 0.0
    return {
        "start_s": start_s, "seconds": seconds, "first_s": first_s, "cpu_s": cpu_s, "step_s": step_s,
        "stall_s": max(0.0, seconds - first_s - step_s), **tally.answer(), "times_s": times_s, "counts": counts, "sizes": sizes,
    }  # fmt: skip


def _commands(end: Callable[[], object]) -> Iterator[str]:
    """The lines of standard input. Where they end while a command runs, `end` has to end mounts, which would stay."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        with os.fdopen(os.dup(0)) as told:  # not sys.stdin, which forked workers close
            for line in told:
                lines.put(line)
        lines.put("")
        time.sleep(END_S)
        end()

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, "")


def serve(make: Callable[..., Any]) -> None:
    """Answer commands until standard input ends. What the client prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)
    client: Any = None
    windows: Any = None

    def end() -> None:
        if client is not None:
            client.finish()
        os._exit(1)

    for line in _commands(end):
        command = json.loads(line)
        try:
            if command["do"] == "open":
                client = make(url=command["url"], bucket=command["bucket"], **command["options"])
                windows = Windows(client)
                answer: dict[str, Any] = {"versions": {n: importlib.metadata.version(n) for n in client.packages}}
            elif command["do"] == "pack":
                client.pack(command["source"], command["target"])
                answer = {}
            elif command["do"] == "steps":
                answer = windows.take(command)
            else:
                answer = run_epoch(client, command["job"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a client's own threads must not hold the process


def block_of(image: bytes, label: int) -> Any:
    """A block of tokens, uint16[2 + tokens]: the sample's number in two of them, and its bytes."""
    import numpy as np

    return np.concatenate([np.array([label & 0xFFFF, label >> 16], "u2"), np.frombuffer(image, "u2")])


def of_blocks(blocks: Any) -> Batch:
    """The samples of a batch of such blocks, uint16[B, 2 + tokens]."""
    return [row[2:].tobytes() for row in blocks], (blocks[:, 0] + (blocks[:, 1].astype("i8") << 16)).tolist()


def begun(loader: Any, job: dict[str, Any]) -> Iterator[Any]:
    """The batches of a loader with ``state_dict``, which saves its state and goes on from one as the job says."""
    if job.get("resume"):
        loader.load_state_dict(json.loads(Path(job["state"]).read_text()))
    for count, batch in enumerate(loader, start=1):
        if count == job.get("state_at"):
            Path(job["state"]).write_text(json.dumps(loader.state_dict()))
        yield batch


class Plain:
    """Nothing to prepare, nothing to finish."""

    def prepare(self, job: dict[str, Any]) -> None:
        """Nothing is kept between epochs."""

    def finish(self) -> None:
        """Nothing was started."""


def batched(samples: Iterable[tuple[Any, Any]], size: int) -> Iterator[Batch]:
    """Lists of `size` images and labels; the last may be shorter."""
    images, labels = [], []
    for image, label in samples:
        images.append(image)
        labels.append(label)
        if len(images) == size:
            yield images, labels
            images, labels = [], []
    if images:
        yield images, labels
