"""Keras's and TensorFlow's checkpoints through a bucket: uploaded from a directory, read on a mount or downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import penstock as ps
from mounting import needs_fuse

keras = tf.keras

pytestmark = [
    pytest.mark.timeout(110, method="thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Keras's use of NumPy
]

INPUTS = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def new_model() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    model.fit(INPUTS, TARGETS, epochs=epochs, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def assert_equal(found: Any, expected: Any) -> None:
    pairs = list(zip(found.get_weights(), expected.get_weights(), strict=True))
    assert all(np.array_equal(one, other) for one, other in pairs)


def test_tensorflow_has_no_s3_of_its_own(url: str) -> None:
    """The reason for everything below: no build of TensorFlow from PyPI opens s3:// paths, and Keras relies on it."""
    with pytest.raises(tf.errors.UnimplementedError, match="s3"):
        tf.io.gfile.exists(f"{url}/model.keras")
    with pytest.raises(tf.errors.UnimplementedError, match="s3"):
        new_model().save(f"{url}/model.keras")


@needs_fuse
def test_a_keras_model_is_loaded_from_a_mount(url: str, mounted: Callable[[], Path], tmp_path: Path) -> None:
    """model.save to a local file that is copied to the store; load_model on the mount, with the optimizer's state."""
    model = fit(new_model(), 2)
    model.save(tmp_path / "model.keras")
    with (tmp_path / "model.keras").open("rb") as source, ps.open(f"{url}/model.keras", "wb") as target:
        shutil.copyfileobj(source, target)
    loaded = keras.models.load_model(mounted() / "model.keras")
    assert_equal(loaded, model)
    assert_equal(fit(loaded, 1), fit(model, 1))


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a run in the middle of an epoch, as a kill does."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise KeyboardInterrupt


class Upload(keras.callbacks.Callback):  # type: ignore[misc]
    """Uploads a directory after each epoch, to a URL of its own: what docs/guides/tensorflow.md shows."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__()
        self.path, self.url = path, url

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        ps.upload_directory(self.path, f"{self.url}/{epoch:06}")


def download_newest(url: str, path: Path) -> None:
    with ps.connect(url) as store:
        whole = [info.key for info in store.list() if info.key.endswith("/training_metadata.json")]
    if whole:
        ps.download_directory(f"{url}/{whole[-1].split('/')[0]}", path)


def test_backup_and_restore_goes_through_the_store(url: str, tmp_path: Path) -> None:
    """A run that is interrupted goes on elsewhere from the newest whole backup, and ends with the same weights."""
    expected = fit(new_model(), 5)
    here = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        fit(new_model(), 5, keras.callbacks.BackupAndRestore(here), Upload(here, url), Interrupt(3))
    with ps.connect(url) as store:  # an upload that was killed lacks what is written last
        store.copy("000002/latest.weights.h5", "000009/latest.weights.h5")
    download_newest(url, tmp_path / "there")
    model = new_model()
    fit(model, 5, keras.callbacks.BackupAndRestore(tmp_path / "there"))
    assert_equal(model, expected)
    assert int(model.optimizer.iterations) == 20


@needs_fuse
@pytest.mark.parametrize("by_mount", [True, False])
def test_checkpoints_of_tensorflow(url: str, mounted: Callable[[], Path], tmp_path: Path, by_mount: bool) -> None:
    """tf.train.CheckpointManager's directory is uploaded; its newest checkpoint restores from a mount or a download."""
    variables = {"w": tf.Variable([1.0, 2.0]), "step": tf.Variable(7, dtype=tf.int64)}
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**variables), str(tmp_path / "local"), max_to_keep=1)
    manager.save()
    ps.upload_directory(tmp_path / "local", f"{url}/7")
    if by_mount:
        folder = mounted() / "7"
    else:
        folder = tmp_path / "fetched"
        ps.download_directory(f"{url}/7", folder)
    restored = {"w": tf.Variable([0.0, 0.0]), "step": tf.Variable(0, dtype=tf.int64)}
    newest = tf.train.latest_checkpoint(str(folder))
    tf.train.Checkpoint(**restored).restore(newest).assert_consumed()
    assert restored["w"].numpy().tolist() == [1.0, 2.0]
    assert int(restored["step"]) == 7


@needs_fuse
def test_a_saved_model_is_loaded_from_a_mount(url: str, mounted: Callable[[], Path], tmp_path: Path) -> None:
    """What tf.saved_model.save wrote loads on the mount and computes the same."""
    module = tf.Module()
    module.w = tf.Variable([1.0, 2.0, 3.0, 4.0])
    module.f = tf.function(lambda x: x * module.w, input_signature=[tf.TensorSpec((None, 4), tf.float32)])
    tf.saved_model.save(module, str(tmp_path / "saved"))
    ps.upload_directory(tmp_path / "saved", f"{url}/saved")
    loaded = tf.saved_model.load(str(mounted() / "saved"))
    assert np.array_equal(loaded.f(INPUTS), module.f(INPUTS))
