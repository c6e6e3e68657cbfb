"""A channel in Pipe mode and TensorFlow: what reads a FIFO, and what does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import penstock as ps
from penstock.channels import InputChannel, PipeReader
from penstock.channels.entries import Entries, open_source
from penstock.channels.environment import input_data_config
from penstock.channels.pipe import open_pipe_channel


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A base directory whose channel ``train`` is a pipe of two shards."""
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / "shards" / f"{shard}.tfrecord")) as writer:
            for number in range(100):
                writer.write(b"%d-%d" % (shard, number))
    channel = InputChannel(name="train", url=str(tmp_path / "shards"), mode="Pipe")
    for folder in ("config", "data"):
        (tmp_path / "base" / "input" / folder).mkdir(parents=True)
    config = tmp_path / "base" / "input" / "config" / "inputdataconfig.json"
    config.write_text(json.dumps(input_data_config([channel])))
    with ps.connect(tmp_path / "shards") as store:
        entries = Entries(open_source(channel, lambda _: store))
        opened = open_pipe_channel(channel, entries, path=tmp_path / "base" / "input" / "data" / "train")
        yield tmp_path / "base"
        opened.close()


def test_a_data_set_of_a_reader(base: Path) -> None:
    """``from_generator`` on a ``PipeReader`` gives every record, and each iteration is the next epoch."""
    reader = PipeReader("train", format="tfrecord", base=base)
    records = tf.data.Dataset.from_generator(lambda: iter(reader), output_signature=tf.TensorSpec((), tf.string))
    expected = [b"%d-%d" % (shard, number) for shard in range(2) for number in range(100)]
    for _ in range(3):
        assert [record.numpy() for record in records] == expected


def test_tfrecord_dataset_cannot_read_a_fifo(base: Path) -> None:
    """``TFRecordDataset`` reads at offsets, which a FIFO refuses; when it no longer does, the documentation may change."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="Illegal seek"):
        list(tf.data.TFRecordDataset(str(base / "input" / "data" / "train_0")))
