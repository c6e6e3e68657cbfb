"""The same training with Keras, resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import penstock as ps
from loading import index_beside, pipeline, write_counted
from penstock.testing.s3_server import free_ports

SCRIPT = Path(__file__).with_name("training.py")
BATCHES = 12


def run(folder: Path, *arguments: str) -> int:
    """Train in a process; its exit status."""
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def logs(folder: Path) -> list[dict[str, Any]]:
    """What each training logged."""
    return list(map(json.loads, (folder / "log.jsonl").read_text().splitlines()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["trains", "validates"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, how: str) -> None:
    """From every kind of checkpoint inside and at the end of epochs, another process trains and logs the same."""
    assert write_counted(tmp_path / "data", (30, 4, 40, 1, 18)) == 93
    index_beside(tmp_path / "data")
    run(tmp_path, how)
    ends = {"batches-2": 2, "batches-12": 12, "batches-16": 16, "epochs-0": 12, "epochs-1": 24}
    ends |= {"2-4.keras": 16, "1.weights.h5": 12}
    run(tmp_path, how, *ends)
    whole, *resumed = logs(tmp_path)
    assert len(whole["epochs"]) == 3
    for (saved, step), found in zip(ends.items(), resumed, strict=True):
        epoch = 0 if saved == "batches-12" else step // BATCHES  # saved before the end of the epoch is logged
        assert found["batches"] == {key: value for key, value in whole["batches"].items() if int(key) > step}, saved
        assert found["epochs"] == {key: value for key, value in whole["epochs"].items() if int(key) >= epoch}, saved


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_twice_resumes(tmp_path: Path) -> None:
    """SIGKILL in the middle of two epochs: the same command goes on from the last backup, which is some batches old."""
    write_counted(tmp_path / "data", (30, 4, 40, 1, 18))
    index_beside(tmp_path / "data")
    run(tmp_path, "trains")
    statuses = [run(tmp_path, f"kill={step}") for step in (17, 26, -1)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    whole, *parts = logs(tmp_path)
    assert [min(map(int, part["batches"])) for part in parts] == [1, 16, 25]
    for part in parts:
        assert part["batches"] == {key: whole["batches"][key] for key in part["batches"]}
        assert part["epochs"] == {key: whole["epochs"][key] for key in part["epochs"]}
    assert parts[-1]["epochs"].keys() == {"1", "2"}  # the backup is from the last batch of epoch 1, before its end


@pytest.mark.timeout(300)
def test_a_loop_on_two_workers_resumes(tmp_path: Path) -> None:
    """With MultiWorkerMirroredStrategy, from inside and the end of an epoch; and its data sets lose no sample."""
    write_counted(tmp_path / "data", (30, 4, 40, 1, 26))
    index_beside(tmp_path / "data")
    for step in (0, 3, 6):
        task = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}}
        workers = []
        for rank in range(2):
            settings = {**os.environ, "TF_CONFIG": json.dumps({**task, "task": {"type": "worker", "index": rank}})}
            command = [sys.executable, str(SCRIPT.with_name("loop.py")), str(tmp_path), str(step)]
            workers.append(subprocess.Popen(command, env=settings, stderr=subprocess.PIPE))
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
        assert all(worker.returncode == 0 for worker in workers), errors[0][-3000:].decode()
    for rank in range(2):
        whole, inside, end = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        assert len(whole[0]) == 12
        assert inside == [whole[0][3:], whole[1][3:], 48]
        assert end == [whole[0][6:], whole[1][6:], 48]


def new_model() -> Any:
    """A model that is built and compiled."""
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def fit(loader: ps.Loader, *before: Any, after: Any = (), model: Any = None, **options: Any) -> Any:
    """Train with a new callback, between others."""
    checkpoint = ps.tensorflow.LoaderCheckpoint(loader)
    pairs = checkpoint.dataset().map(lambda batch: (tf.cast(batch["cls"], tf.float32)[:, None] / 20, batch["cls"]))
    callbacks = [*before, checkpoint, *after]
    return (model or new_model()).fit(pairs, epochs=2, verbose=0, shuffle=False, callbacks=callbacks, **options)


def interrupt(batch: int, logs: Any) -> None:
    """End the training in the middle of an epoch."""
    if batch == 1:
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Your input ran out of data")  # Keras's
def test_what_cannot_be_resumed_is_refused(folder: Path) -> None:
    """Mistakes are errors when the training begins, and metrics that cannot be restored are a warning."""

    def backup() -> Any:
        return tf.keras.callbacks.BackupAndRestore(folder / "backup", save_freq=1, delete_checkpoint=False)

    with ps.Loader(pipeline(folder), index="stream") as loader, pytest.raises(TypeError, match="penstock index"):
        ps.tensorflow.LoaderCheckpoint(loader)
    index_beside(folder)
    with ps.Loader(pipeline(folder)) as loader:
        with pytest.raises(ps.ConfigError, match="fit reads 2 batches per epoch, 1 at once, and the loader has 3"):
            fit(loader, steps_per_epoch=2)
        model = new_model()
        model.steps_per_execution = 2
        with pytest.raises(ps.ConfigError, match="3 batches per epoch, 2 at once"):
            fit(loader, model=model)
        new_model().fit(np.zeros((3, 1)), np.zeros(3), verbose=0, callbacks=[backup()])
        with pytest.raises(ValueError, match="saved without LoaderCheckpoint"):
            fit(loader, backup())
        shutil.rmtree(folder / "backup")
        with pytest.raises(KeyboardInterrupt):
            fit(loader, backup(), after=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
        with (
            ps.Loader(pipeline(folder, batch=4)) as other,
            pytest.raises(ps.ConfigError, match="'batches_per_epoch': 3"),
        ):
            fit(other, backup())
        metadata = folder / "backup/training_metadata.json"
        metadata.write_text('{"epoch": 1, "batch": 0}')  # as if the process had been killed between two files
        with pytest.raises(ps.ConfigError, match="behind BackupAndRestore"):
            fit(loader, after=[backup()])
        with pytest.warns(UserWarning, match="metrics start anew"):
            assert len(fit(loader, backup()).history["loss"]) == 2
