"""The program that ``penstock run`` starts: reads the channel ``train`` and writes what it found to ``found.json``.

Called as ``channel_program.py MODE FOLDER``; ``FOLDER/job.json`` says where to continue and after how many samples to stop. The
modes are those of ``penstock run``, and ``tensorflow``, which reads TFRecords in Pipe mode by TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import penstock as ps
from doors.matrix.data_set import Record, record_of
from doors.matrix.streams import record_of_example, records_of_tar


def read_pipe(state: Any, samples_max: int | None) -> tuple[list[Record], Any]:
    """Return the records of a pipe, and the position after them."""
    reader = ps.channels.PipeReader("train", format="tar")
    if state is not None:
        reader.load_state_dict(state)
    records = [record_of(sample["__key__"], sample) for sample in islice(reader, samples_max)]
    position = reader.state_dict()
    reader.close()
    return records, position


def read_pipe_by_tensorflow(state: Any, samples_max: int | None) -> tuple[list[Record], Any]:
    """Return the records of a pipe of TFRecords, from a data set of TensorFlow."""
    assert state is None
    assert samples_max is None
    reader = ps.channels.PipeReader("train", format="tfrecord")

    import tensorflow as tf  # after penstock, since it brings a libcurl of its own

    dataset = tf.data.Dataset.from_generator(lambda: iter(reader), output_signature=tf.TensorSpec((), tf.string))
    records = [record_of_example(record.numpy()) for record in dataset]
    return records, None


def read_files(state: Any, samples_max: int | None) -> tuple[list[Record], Any]:
    """Return the records of a directory."""
    assert state is None
    assert samples_max is None
    records = []
    for path in sorted(Path(os.environ["SM_CHANNEL_TRAIN"]).iterdir()):
        with path.open("rb") as file:
            records += records_of_tar(file, name=path.name)
    return records, None


def main(mode: str, folder: Path) -> None:
    """Read the channel."""
    job = json.loads((folder / "job.json").read_text())
    read = {"pipe": read_pipe, "tensorflow": read_pipe_by_tensorflow}.get(mode, read_files)
    records, state = read(**job)
    (folder / "found.json").write_text(json.dumps({"records": records, "state": state}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
