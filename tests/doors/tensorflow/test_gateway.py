"""TensorFlow reads TFRecords that the gateway makes of WebDataset tars in a bucket, by each way that needs no patched build."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import penstock as ps
from gateways import ACCESS_KEY, REGION, SECRET_KEY, RunningGateway
from pages import programs_of
from penstock.testing.ministack import Ministack

ROOT = Path(__file__).parents[3]
HANDLERS = ROOT / "tests/integration/gateway/lambda_handlers/article"
HANDLER_PYTHON = ROOT / ".venvs/lambda/bin/python"
BUCKET, SHARDS, SAMPLES = "training", 4, 64
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def picture(number: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return a sample that can be learned: the class is the brighter half."""
    label = number % 2
    pixels = np.random.default_rng(number).integers(0, 100, (8, 8, 3), dtype=np.uint8)
    pixels[:, 4 * label : 4 * label + 4] += 120
    return pixels, label


def tar_of(shard: int, *, text: str) -> bytes:
    """Return a WebDataset tar with PNGs, and labels in the form `text`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            pixels, label = picture(number)
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "png")
            for name, data in (("png", png.getvalue()), ("cls", text.format(label).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.fixture(scope="module")
def store() -> Iterator[Ministack]:
    """Return an S3 server whose bucket holds tars with labels as digits, and others with labels as the text ``[1]``."""
    with Ministack() as server:
        server.create_bucket(BUCKET)
        client = server.client()
        for shard in range(SHARDS):
            for folder, text in (("digits", "{}"), ("lists", "[{}]")):
                client.put_object(Bucket=BUCKET, Key=f"{folder}/train-{shard:03d}.tar", Body=tar_of(shard, text=text))
        client.close()
        yield server


@pytest.fixture
def start(tmp_path: Path, store: Ministack) -> Iterator[Callable[..., RunningGateway]]:
    """Return a function that starts a gateway in front of a folder of the bucket."""
    running: list[RunningGateway] = []

    def started(folder: str, *flags: str) -> RunningGateway:
        upstream = ["--upstream", f"s3://{BUCKET}/{folder}/", "--endpoint-url", store.endpoint_url]
        running.append(RunningGateway(tmp_path, *upstream, *flags, upstream=store.environment))
        return running[-1]

    try:
        yield started
    finally:
        for gateway in running:
            gateway.close()


def connection(gateway: RunningGateway) -> dict[str, Any]:
    """Return the options with which penstock reads from the gateway."""
    keys = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    return {"endpoint_url": gateway.url, "region": REGION, "credentials": keys}


def parsed(records: Any) -> Any:
    """Return a data set of pairs of pixels and labels, from batches of raw records."""

    def parse(batch: Any) -> Any:
        found = tf.io.parse_example(batch, FEATURES)
        pixels = tf.reshape(tf.io.decode_raw(found["image"], tf.uint8), [-1, 8, 8, 3])
        return tf.cast(pixels, tf.float32) / 255.0, found["label"]

    return records.map(parse)


def trained_loss(data: Any, *, epochs: int) -> list[float]:
    """Train a linear classifier, and return the mean loss of each epoch."""
    weights = tf.Variable(tf.zeros([8 * 8 * 3, 2]))
    losses = []
    for _ in range(epochs):
        found = []
        for pixels, labels in data:
            with tf.GradientTape() as tape:
                logits = tf.reshape(pixels, [-1, 8 * 8 * 3]) @ weights
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            found.append(float(loss))
        losses.append(sum(found) / len(found))
    return losses


def labels_and_sums(data: Any) -> list[tuple[int, float]]:
    """Return what identifies each sample, sorted."""
    return sorted(
        (int(label), round(float(tf.reduce_sum(image) * 255)))
        for images, labels in data
        for image, label in zip(images, labels, strict=True)
    )


def expected() -> list[tuple[int, float]]:
    pairs = map(picture, range(SHARDS * SAMPLES))
    return sorted((label, int(pixels.sum())) for pixels, label in pairs)


@pytest.mark.skipif(not HANDLER_PYTHON.exists(), reason="make test-tensorflow makes the handler's environment")
def test_a_model_is_trained_on_what_an_unchanged_handler_makes(start: Callable[..., RunningGateway]) -> None:
    """Tars in a bucket, an AWS handler that makes TFRecords of them, and a training loop: each tar is transformed once."""
    gateway = start(
        "digits", "--lambda", "convert.lambda_handler", "--lambda-python", str(HANDLER_PYTHON),
        "--lambda-dir", str(HANDLERS),
    )  # fmt: skip
    shards = ps.shards(f"s3://{BUCKET}/", format="tfrecord-raw", **connection(gateway))
    data = ps.tensorflow.dataset(shards.shuffle(window=64).batch(16)).map(lambda batch: batch["record"])
    assert labels_and_sums(parsed(data)) == expected()
    losses = trained_loss(parsed(data), epochs=3)
    assert losses[-1] < 0.5 * losses[0]
    assert gateway.transforms_count() == SHARDS


@pytest.fixture
def converted(start: Callable[..., RunningGateway]) -> RunningGateway:
    """Return a gateway with the built-in transform, and labels stored as the text ``[1]``."""
    return start("lists", "--transform", "tar2tfrecord", "--argument", "fields=image=png:pixels,label=cls:int")


def keys(gateway: RunningGateway) -> list[str]:
    with ps.connect(f"s3://{BUCKET}", **connection(gateway)) as store:
        return [info.key for info in store.list()]


def test_files_that_were_downloaded(converted: RunningGateway, tmp_path: Path) -> None:
    """``TFRecordDataset`` reads the files that ``penstock cp`` downloads."""
    with ps.connect(f"s3://{BUCKET}", **connection(converted)) as store:
        for key in keys(converted):
            (tmp_path / key).write_bytes(store.read(key).data)
    files = sorted(str(path) for path in tmp_path.glob("*.tar"))
    assert len(files) == SHARDS
    assert labels_and_sums(parsed(tf.data.TFRecordDataset(files).batch(16))) == expected()


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord stream; TensorFlow's own reader calls ``pread``, which a FIFO does not support."""
    with path.open("rb") as file:
        while head := file.read(12):
            (size_bytes,) = struct.unpack_from("<Q", head)
            record = file.read(size_bytes + 4)
            assert len(record) == size_bytes + 4
            yield record[:-4]


def test_a_fifo(converted: RunningGateway, tmp_path: Path) -> None:
    """A generator reads a FIFO that ``penstock cat`` fills meanwhile."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def fill() -> None:
        with fifo.open("wb") as file:
            for key in keys(converted):
                command = [sys.executable, "-m", "penstock", "cat", f"s3://{BUCKET}/{key}"]
                subprocess.run(command, env=converted.environment, stdout=file, check=True)

    thread = threading.Thread(target=fill)
    thread.start()
    data = tf.data.Dataset.from_generator(lambda: records_of(fifo), output_signature=tf.TensorSpec((), tf.string))
    found = labels_and_sums(parsed(data.batch(16)))
    thread.join()
    assert found == expected()


def test_penstock_reads_and_parses(converted: RunningGateway) -> None:
    """``penstock.tensorflow.dataset`` reads the transformed objects under the names of their sources."""
    shards = ps.shards(f"s3://{BUCKET}/", format="tfrecord-raw", **connection(converted))
    data = ps.tensorflow.dataset(shards.batch(16)).map(lambda batch: batch["record"])
    assert labels_and_sums(parsed(data)) == expected()


def test_the_guide(start: Callable[..., RunningGateway]) -> None:
    """The guide's program reads TFRecords that the gateway makes of tars."""
    gateway = start("digits", "--name", "train", "--transform", "tar2tfrecord(image=png,label=cls:int)")
    program = programs_of(ROOT / "docs/guides/write-a-transform.md", "tensorflow")[-1]
    assert "tf.io.parse_example" in program
    program = program.replace("http://127.0.0.1:9014", gateway.url)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=gateway.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("(16,)") == 2
