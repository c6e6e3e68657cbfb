"""``LoaderCheckpoint``: ``model.fit`` on a loader, so that a run that was killed resumes at the very next batch.

Keras saves neither the position in the data nor the metrics of an epoch, and it begins an epoch that was interrupted again.
This callback puts an object into the model that is saved and loaded with it, so the position is in the very file that has the
weights, whichever callback writes it and whenever the process is killed.

tf.data reads ahead of the training, so the position is the one after as many batches as were trained, not the loader's.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

from penstock.errors import ConfigError
from penstock.tensorflow.datasets import Epochs, dataset_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.loader import Loader


class LoaderCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow is not installed where types are checked
    """Saves a loader's state in every file to which the model is saved, and restores it when training resumes.

    Train on ``dataset()``, and put this callback behind ``BackupAndRestore`` and ``ModelCheckpoint`` in ``callbacks``. After a
    restart, ``fit`` trains on the batches that were not trained yet and logs the losses of a run that was not interrupted.
    The state of dropout and other random layers, which Keras does not save, is saved, too.

    Args:
        loader: The loader of this process. It must know its length, so shards need an index.

    Raises:
        TypeError: `loader` does not know its length, so that nobody knows when an epoch that is resumed is over.
        ConfigError: When training begins: ``fit`` does not read whole epochs of ``dataset()``, or does not begin with the epoch
            of the state, or the state is from other data or another batch size.

    Cost: one ``state_dict()`` of the loader per batch. Nothing is read in order to be skipped.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._batches_per_epoch = len(loader)
        self._epochs = Epochs(loader, keeps_states=True)
        self._state = _State(self._now)
        self._epoch = 0  # of Keras
        self._first = 0  # number in the epoch of the first batch that this process trains on
        self._trained_count = 0  # batches of the epoch that were trained
        self._is_in_batch = False
        self._logs: dict[str, Any] = {}

    def dataset(self, *, signature: Mapping[str, tf.TensorSpec] | None = None) -> tf.data.Dataset:
        """Return the ``tf.data.Dataset`` of the loader's batches, as ``penstock.tensorflow.dataset`` does.

        Args:
            signature: Dtype and shape of each column. The default is those of the first batch, with any batch size.
        """
        return dataset_of(self._epochs, signature=signature, batches_count=self._batches_per_epoch)

    def load_weights(self, model: Any, filepath: str) -> None:
        """Load what ``ModelCheckpoint`` saved, ``.keras`` or ``.weights.h5``; ``fit`` then resumes from there.

        Args:
            model: A model that is built and compiled.
            filepath: A file that was saved while this callback was in use.

        Raises:
            ValueError: The file was saved without this callback, or from another model.
        """
        self.set_model(model)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(filepath)

    def set_model(self, model: Any) -> None:
        """Have the loader's state saved and loaded with the model."""
        super().set_model(model)
        model.loader_checkpoint = self._state

    def on_train_begin(self, logs: Any = None) -> None:
        """Have the training begin with the epoch of the state, if it resumes."""
        steps, at_once, count = self.params["steps"], self.model.steps_per_execution, self._batches_per_epoch
        if steps != count or count % at_once:
            text = f"fit reads {steps} batches per epoch, {at_once} at once, and the loader has {count}"
            raise ConfigError(text, hint="train on checkpoint.dataset().map(...); steps_per_execution must divide it")
        if self._state.loaded is not None:
            # What BackupAndRestore set is wrong if the process was killed between its two files, or for the second time.
            self.model._initial_epoch = self._state.loaded[0]["epoch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restore the loader's state, if training resumes."""
        self._epoch, self._first, self._trained_count, self._logs = epoch, 0, 0, {}
        if self._state.loaded is None:
            return
        (position, values), self._state.loaded = self._state.loaded, None
        expected = {"epoch": epoch, "batches_per_epoch": self._batches_per_epoch}
        if found := {name: position[name] for name, value in expected.items() if position[name] != value}:
            hint = "put LoaderCheckpoint behind BackupAndRestore in callbacks=, and keep data and batch size"
            raise ConfigError(f"the state that was loaded has {found}, and fit begins with {expected}", hint=hint)
        self.model._initial_epoch = 0
        self._epochs.load_state_dict(position["loader"])
        self._first = self._trained_count = position["batches"]
        generators, metrics = self._unsaved_variables()
        if self._first and len(generators) + len(metrics) < len(values):
            text = "this epoch's metrics start anew; model.evaluate(validation_data, steps=1) before fit creates them"
            warnings.warn(text, stacklevel=2)
        for variable, value in zip([*generators, *(metrics if self._first else ())], values, strict=False):
            variable.assign(value)
        if self._first == self._batches_per_epoch:
            self._logs = {name: np.asarray(value).tolist() for name, value in self.model.get_metrics_result().items()}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the batches, and end an epoch that is shorter because it was resumed."""
        if self._first + batch >= self._batches_per_epoch:
            raise StopIteration  # by which Keras's epochs end, too; a data set that ends early would shorten later epochs
        self._epochs.state_after(batch)  # forgets those before it
        # Other callbacks may save behind this batch before they call on_train_batch_end here.
        self._trained_count, self._is_in_batch = self._first + batch + self.model.steps_per_execution, True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note that the batch is over, so that a later save is one of the end of the epoch if it was the last."""
        self._is_in_batch = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the metrics of an epoch that was saved behind its last batch, so that this process trained on none of it."""
        logs.update(self._logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the model as it was."""
        del self.model.loader_checkpoint

    def _now(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the position of the training, and the values of the model's variables that Keras does not save."""
        is_over = self._trained_count == self._batches_per_epoch and not self._is_in_batch
        epoch, batches_count = (self._epoch + 1, 0) if is_over else (self._epoch, self._trained_count)
        position = {"epoch": epoch, "batches": batches_count, "batches_per_epoch": self._batches_per_epoch}
        loader_state = self._epochs.state_after(self._trained_count - self._first)
        generators, metrics = self._unsaved_variables()
        return {**position, "loader": loader_state}, [*generators, *metrics]

    def _unsaved_variables(self) -> tuple[list[Any], list[Any]]:
        """Return the states of the random generators, and those of the metrics."""
        weights = set(map(id, self.model.weights))
        return [each for each in self.model.variables if id(each) not in weights], self.model.metrics_variables


class _State(tf.keras.Operation):  # type: ignore[misc]
    """What Keras saves and loads with the model. It is no layer, so the model has the same layers as without it.

    Args:
        now: Returns what is saved: a dict for JSON, and variables.

    Attributes:
        loaded: Position and values of the variables that were loaded and not restored yet; None if there are none.
    """

    def __init__(self, now: Callable[[], tuple[dict[str, Any], list[Any]]]) -> None:
        super().__init__()
        self._now = now
        self.loaded: tuple[dict[str, Any], list[Any]] | None = None

    def save_own_variables(self, store: Any) -> None:
        """Write to a Keras file; Keras calls it."""
        position, variables = self._now()
        store["position"] = np.frombuffer(json.dumps(position).encode(), np.uint8)
        for number, variable in enumerate(variables):
            store[str(number)] = variable

    def load_own_variables(self, store: Any) -> None:
        """Read from a Keras file; Keras calls it."""
        if "position" not in store:
            raise ConfigError("it was saved without LoaderCheckpoint, so it has no loader's state")
        values = [store[str(number)] for number in range(len(store) - 1)]
        self.loaded = (json.loads(np.asarray(store["position"]).tobytes()), values)
