"""A small training with Keras, whole or resumed.

``python training.py FOLDER VALIDATES [SAVED...]`` trains from the beginning, or resumes from each of the saved directories of
``BackupAndRestore`` and files of ``ModelCheckpoint`` below ``FOLDER``. For each training, it appends a line of JSON to
``FOLDER/log.jsonl``: what was logged after each execution, by step, and after each epoch. ``python training.py FOLDER
kill=STEP`` goes on from where the last such command was killed, and is killed after this step.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import penstock as ps

keras = tf.keras
EPOCHS = 3


class Remember(keras.layers.Layer):  # type: ignore[misc]
    """Keeps the numbers of the batch that the model was trained on last."""

    def build(self, shape: Any) -> None:
        """Make the variable."""
        self.numbers = self.add_weight(shape=(8,), trainable=False)

    def call(self, x: Any) -> Any:
        """Pass the batch on."""
        self.numbers.assign(tf.pad(x[:, 0], [[0, 8 - tf.shape(x)[0]]], constant_values=-1))
        return x / 50


class Log(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes down what is trained and logged; copies the backups of some steps; kills the process."""

    def __init__(self, folder: Path, *, copies: bool, kill_step: int | None) -> None:
        super().__init__()
        self.folder, self.copies, self.kill_step = folder, copies, kill_step
        self.batches: dict[int, Any] = {}
        self.epochs: dict[int, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log an execution."""
        step = int(self.model.optimizer.iterations)
        self.batches[step] = [self.model.layers[0].numbers.numpy().tolist(), logs]
        if self.copies:
            shutil.copytree(self.folder / "batches", self.folder / f"batches-{step}")
        if step == self.kill_step:
            self.write()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log an epoch."""
        self.epochs[epoch] = logs
        if self.copies:
            shutil.copytree(self.folder / "epochs", self.folder / f"epochs-{epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        """Log the training."""
        self.write()

    def write(self) -> None:
        """Append what was logged."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({"batches": self.batches, "epochs": self.epochs}) + "\n")


def train(folder: Path, *, validates: bool, saved: str | None, kill_step: int | None) -> None:
    """Train with every way to save, from the beginning or from what was saved."""
    keras.utils.set_random_seed(7)
    layers = [Remember(), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    at_once = 2 if validates else 1
    metrics = ["mae"] if validates else None
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics, steps_per_execution=at_once)
    every = keras.callbacks.BackupAndRestore(folder / "batches", save_freq=1 if kill_step is None else 3)
    epochs = keras.callbacks.BackupAndRestore(folder / "epochs")
    callbacks: list[Any] = [every, epochs] if kill_step is None else [every]
    if saved is None and kill_step is None:
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}-{{batch}}.keras", save_freq=at_once))
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.weights.h5", save_weights_only=True))
    shards = ps.shards(f"{folder}/data/")
    validation = ps.tensorflow.dataset(shards.decode(ps.Integer("cls")).batch(8)).map(pair) if validates else None
    with ps.Loader(shards.shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8)) as loader:
        checkpoint = ps.tensorflow.LoaderCheckpoint(loader)
        if validates:
            model.evaluate(validation, steps=1, verbose=0)
        if saved is not None and (folder / saved).is_dir():
            callbacks = [keras.callbacks.BackupAndRestore(folder / saved)]
        elif saved is not None:
            checkpoint.load_weights(model, f"{folder}/{saved}")
            callbacks = []
        callbacks += [checkpoint, Log(folder, copies=saved is None and kill_step is None, kill_step=kill_step)]
        model.fit(
            checkpoint.dataset().map(pair).prefetch(3),
            validation_data=validation, validation_steps=4 if validates else None,
            epochs=EPOCHS, callbacks=callbacks, shuffle=False, verbose=0,
        )  # fmt: skip


def pair(batch: Any) -> tuple[Any, Any]:
    """Input and target of a batch."""
    numbers = tf.cast(batch["cls"], tf.float32)[:, None]
    return numbers, numbers / 25


if __name__ == "__main__":
    folder, how, *all_saved = sys.argv[1:]
    kill_step = int(how.removeprefix("kill=")) if how.startswith("kill=") else None
    for saved in all_saved or [None]:
        train(Path(folder), validates=how == "validates", saved=saved, kill_step=kill_step)
