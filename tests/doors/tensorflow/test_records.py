from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

import penstock as ps

FEATURES = {
    "x": tf.io.FixedLenFeature([3], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
    "name": tf.io.FixedLenFeature([], tf.string),
}


def write_records(folder: Path, *, samples: int, shards: int) -> None:
    """TFRecord shards of ``tf.train.Example``, as TensorFlow itself writes them."""
    for index in range(shards):
        with tf.io.TFRecordWriter(str(folder / f"part-{index:03d}.tfrecord")) as writer:
            for number in range(index, samples, shards):
                feature = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, 0.5, -1])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                    "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n%d" % number])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def rows(batches: Any) -> list[tuple[list[float], int, bytes]]:
    return sorted(
        row
        for batch in batches
        for row in zip(batch["x"].numpy().tolist(), batch["label"].numpy().tolist(), batch["name"].numpy(), strict=True)
    )


def test_raw_records_go_to_parse_example(tmp_path: Path) -> None:
    """A batch of raw TFRecords is a string tensor that tf.io.parse_example takes; the same samples as TensorFlow's."""
    write_records(tmp_path, samples=50, shards=3)
    made = ps.tensorflow.dataset(ps.shards(f"{tmp_path}/", format="tfrecord-raw").shuffle(window=16).batch(8))
    assert made.element_spec["record"] == tf.TensorSpec((None,), tf.string)
    ours = made.map(lambda batch: tf.io.parse_example(batch["record"], FEATURES))
    files = sorted(str(path) for path in tmp_path.iterdir())
    theirs = tf.data.TFRecordDataset(files).batch(8).map(lambda records: tf.io.parse_example(records, FEATURES))
    assert rows(ours) == rows(theirs)


def test_examples_parsed_here_are_tensorflows(tmp_path: Path) -> None:
    """Parsed without TensorFlow into columns, features have the values that tf.io.parse_example gives."""
    write_records(tmp_path, samples=20, shards=2)
    made = ps.tensorflow.dataset(
        ps.shards(f"{tmp_path}/").decode(ps.Numpy("x"), ps.Integer("label"), ps.Bytes("name")).batch(8)
    )
    files = sorted(str(path) for path in tmp_path.iterdir())
    theirs = tf.data.TFRecordDataset(files).batch(8).map(lambda records: tf.io.parse_example(records, FEATURES))
    assert rows(made) == rows(theirs)
