"""Doors to TensorFlow: its own reader of TFRecords where it can read, and data sets of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import penstock as ps  # before TensorFlow, which brings a libcurl of its own
import penstock.tensorflow
from doors.matrix.data_set import Record
from doors.matrix.door import Door, Job, in_batches
from doors.matrix.plain_doors import RunDoor, pipeline, records
from doors.matrix.streams import record_of_example


class DatasetDoor(Door):
    """``penstock.tensorflow.dataset`` on a loader."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.loader = self.open.enter_context(ps.Loader(pipeline(job), processes=job.workers, cache=job.node_cache))
        spec = {"record": tf.TensorSpec((None,), tf.string)}
        self.dataset = penstock.tensorflow.dataset(self.loader, signature=spec)

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.dataset:
            yield records(batch["record"].numpy())

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class TFRecordMountDoor(Door):
    """``tf.data.TFRecordDataset`` on the files of a mount."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.directory = self.folder()
        self.open.enter_context(ps.mount(job.url, self.directory, cache=job.node_cache, metadata_ttl_s=0.0))

    def epoch(self) -> Iterator[list[Record]]:
        files = tf.data.Dataset.list_files(f"{self.directory}/*.tfrecord", shuffle=False)
        dataset = tf.data.TFRecordDataset(files)
        if self.job.seed is not None:
            dataset = dataset.shuffle(32, seed=self.job.seed)
        yield from in_batches(record_of_example(record.numpy()) for record in dataset)


class TFRecordPipeDoor(RunDoor):
    """``tf.data.Dataset.from_generator`` on a ``PipeReader`` of a channel in Pipe mode."""

    mode = "pipe"
    program = "tensorflow"
