"""A training loop of one's own on a loader and ``MultiWorkerMirroredStrategy``, on one worker or several.

``python loop.py FOLDER STEP`` resumes from the checkpoint of a step, and with step 0 trains from the beginning and saves each
step. It appends a line of JSON to ``FOLDER/RANK.jsonl``: the keys, the losses, and the number of samples of an epoch of a
``tf.data.Dataset`` that the strategy distributes. ``TF_CONFIG`` says the workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import penstock as ps

folder, first = Path(sys.argv[1]), int(sys.argv[2])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, ranks_count = strategy.cluster_resolver.task_id or 0, strategy.num_replicas_in_sync


class Position(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The loader's state as a part of a checkpoint."""

    def __init__(self, loader: ps.Loader) -> None:
        self.loader = loader

    def serialize(self) -> str:
        """Return it as text."""
        return json.dumps(self.loader.state_dict())

    def deserialize(self, text: str) -> None:
        """Continue where it was saved."""
        self.loader.load_state_dict(json.loads(text))


with strategy.scope():
    tf.keras.utils.set_random_seed(7)
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)


@tf.function
def train_step(numbers: Any) -> Any:
    """Train on the batch of this worker; the mean loss of all."""

    def of_worker(numbers: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(numbers, training=True)[:, 0] - numbers / 25) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return strategy.reduce("MEAN", strategy.run(of_worker, args=(numbers,)), axis=None)


pipeline = ps.shards(f"{folder}/data/").shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8, drop_last=True)
with ps.Loader(pipeline, rank=rank, world_size=ranks_count) as loader:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, position=Position(loader))
    if first:
        checkpoint.read(f"{folder}/0-{first}").assert_consumed()  # of rank 0: with an index, all ranks have one state
    keys, losses = [], []
    for _ in loader.epochs(2):
        for batch in loader:
            losses.append(float(train_step(tf.constant(batch["cls"], tf.float32)[:, None])))
            keys.append(batch["__key__"])
            if not first:
                checkpoint.write(f"{folder}/{rank}-{len(keys)}")  # all workers write: variables are read together
dataset = ps.tensorflow.dataset(pipeline, rank=rank, world_size=ranks_count)
batches = map(
    strategy.experimental_local_results,
    strategy.experimental_distribute_dataset(dataset.map(lambda batch: batch["cls"])),
)
count = sum(len(numbers) for (numbers,) in batches)
with (folder / f"{rank}.jsonl").open("a") as file:
    file.write(json.dumps([keys, losses, count]) + "\n")
