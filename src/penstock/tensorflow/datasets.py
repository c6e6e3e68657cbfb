"""The interface to TensorFlow: ``dataset``, a loader's batches as a ``tf.data.Dataset``, and ``LoaderCheckpoint``.

No other part of penstock imports TensorFlow. Whole batches are passed to it at a time.

``LoaderCheckpoint`` lets ``model.fit`` on a loader resume at the very next batch after it was killed. Keras saves neither the
position in the data nor the metrics of an epoch, and it begins an interrupted epoch again. This callback puts an
object into the model that is saved and loaded with it, so the position is in the very file that has the weights, whichever
callback writes it and whenever the process is killed. tf.data reads ahead of the training, so the saved position is not that
of the loader, but the position after the batches that were trained.
"""

from __future__ import annotations

import itertools
import json
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.samples.columns import Ragged
from penstock.system.lazy import needing
from penstock.system.tracebacks import boundary

with needing("tensorflow", "penstock.tensorflow needs TensorFlow. Hint: pip install tensorflow, or tensorflow-cpu"):
    import tensorflow as tf  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.loader.options import LoaderArguments
    from penstock.pipeline import Pipeline

__all__ = ["LoaderCheckpoint", "dataset", "signature_of"]


@boundary
def dataset(
    source: Pipeline | Loader,
    *,
    signature: Mapping[str, tf.TensorSpec] | None = None,
    **options: Unpack[LoaderArguments],
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of dicts of tensors, one element per batch, in the ``Loader``'s order.

    Each iteration is one whole epoch, and the next iteration is the next epoch, even if one ends early. A ``Loader`` whose
    state was loaded first gives the rest of its epoch; ``model.fit`` resumes with ``LoaderCheckpoint``. Batches are passed to
    TensorFlow as arrays, not sample by sample: numbers unchanged, text and bytes as ``tf.string[B]``, ragged columns as
    ``tf.RaggedTensor``. Raw TFRecords are a column too:
    ``.map(lambda batch: tf.io.parse_example(batch["record"], features))``.

    Args:
        source: A pipeline that ends with ``.batch(n)``, or a ``Loader``. The caller closes a loader, and may use its
            ``statistics()`` and ``state_dict()``.
        signature: Dtype and shape of each column. The default is those of the first batch, with any batch size.
        **options: The same options as for ``Loader``, if `source` is a pipeline.

    Returns:
        A data set. Its ``element_spec`` is the signature, such as
        ``{"jpg": uint8[None, H, W, 3], "cls": int64[None], "__key__": string[None]}``. Its cardinality is known if the loader
        knows its length. It prefetches by itself; a further ``.prefetch()`` only makes a saved state run ahead.

    Raises:
        ConfigError: A column cannot become a tensor, there is no batch to take the signature from, or options are given with
            a ``Loader``.

    Cost: that of a ``Loader``. Without `signature`, reading begins immediately, and the first batch begins the first epoch.
    """
    if isinstance(source, Loader):
        if options:
            raise ConfigError(f"{', '.join(options)}: the loader exists already", hint="pass them to ps.Loader")
        loader = source
    else:
        loader = Loader(source, **options)
    # A caller's loader may continue inside an epoch, and without a signature, nothing is read before the first iteration.
    batches_count = _length_of(loader) if loader is not source and signature is None else None
    made = dataset_of(Epochs(loader), signature=signature, batches_count=batches_count)
    if "world_size" in options:  # else experimental_distribute_dataset would divide the part of this rank once more
        policy = tf.data.Options()
        policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        made = made.with_options(policy)
    return made


def dataset_of(
    epochs: Epochs, *, signature: Mapping[str, tf.TensorSpec] | None, batches_count: int | None
) -> tf.data.Dataset:
    """Return the data set of these epochs, which says that each has so many batches, unless it is None."""
    if signature is None:
        signature = signature_of(epochs.first_batch())
    made = tf.data.Dataset.from_generator(_flat(epochs, signature), output_signature=dict(signature))
    if batches_count is not None:
        made = made.apply(tf.data.experimental.assert_cardinality(batches_count))
    return made


def signature_of(batch: Mapping[str, Any]) -> dict[str, tf.TensorSpec]:
    """Return the element spec of batches like this one: dtype and shape of each column, with any batch size.

    Raises:
        ConfigError: The batch is not a dict, or a column is neither an array, nor ragged, nor a list of ``str`` or ``bytes``.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"a batch is {type(batch).__name__}, not a dict of columns", hint="let collate= return a dict"
        )
    signature = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            shape = (None, None, *column.data.shape[1:])
            signature[name] = tf.RaggedTensorSpec(shape, column.data.dtype, ragged_rank=1, row_splits_dtype=tf.int64)
        elif isinstance(column, np.ndarray) and column.dtype != object:
            signature[name] = tf.TensorSpec((None, *column.shape[1:]), column.dtype)
        elif all(isinstance(value, str | bytes) for value in column):
            signature[name] = tf.TensorSpec((None,), tf.string)
        else:
            raise ConfigError(
                f"the column {name!r} holds {type(column[0]).__name__} objects, which tensors cannot hold",
                hint="turn them into arrays, numbers or text in .map(), or leave them out",
            )
    return signature


def _length_of(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


class Epochs:
    """Makes each iteration a separate epoch. The first batch, if it was read for the signature, is not lost.

    Args:
        loader: The loader that is iterated.
        keeps_states: Whether to remember the loader's state after each batch, until ``state_after`` is called. TensorFlow
            reads ahead, so the loader itself is further than the training.
    """

    def __init__(self, loader: Loader, *, keeps_states: bool = False) -> None:
        self._loader = loader
        self._keeps_states = keeps_states
        self._states = deque([(0, loader.state_dict())])  # after how many batches of the last iteration
        self._begun: tuple[dict[str, Any], Iterator[dict[str, Any]]] | None = None
        self._epoch = -1  # of the last iteration
        self._lock = threading.Lock()  # TensorFlow may still read ahead in an iteration that was left

    def first_batch(self) -> dict[str, Any]:
        """Read the first batch of the first epoch, which the first iteration then begins with."""
        batches = self._next_epoch()
        first = next(batches, None)
        if first is None:
            raise ConfigError("there is no batch to take dtypes and shapes from", hint="pass signature=")
        self._begun = (self._loader.state_dict(), itertools.chain([first], batches))
        return first

    def __iter__(self) -> Iterator[dict[str, Any]]:
        states = deque([(0, self._states[-1][1])])
        with self._lock:
            begun, self._begun = self._begun, None
            if begun is not None and begun[0] != self._loader.state_dict():  # another state was loaded meanwhile
                begun, self._epoch = None, -1
            batches = self._next_epoch() if begun is None else begun[1]
            self._states = states
        for count in itertools.count(1):
            with self._lock:
                batch = next(batches, None)
                if batch is not None and self._keeps_states:
                    states.append((count, self._loader.state_dict()))
            if batch is None:
                return
            yield batch

    def state_after(self, count: int) -> dict[str, Any]:
        """Return the loader's state after so many batches of the last iteration, and forget those before it."""
        states = self._states
        while len(states) > 1 and states[0][0] < count:
            states.popleft()
        return states[0][1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved in the next iteration."""
        self._loader.load_state_dict(state)
        self._states = deque([(0, state)])
        self._begun, self._epoch = None, -1

    def _next_epoch(self) -> Iterator[dict[str, Any]]:
        for _ in range(2):  # a state that was loaded may be from the end of an epoch, of which nothing is left
            if self._loader.epoch == self._epoch:  # it was left early
                self._loader.restart(epoch=self._epoch + 1)
            self._epoch = self._loader.epoch
            batches = iter(self._loader)
            for first in batches:
                return itertools.chain([first], batches)
        return iter(())


def _flat(epochs: Epochs, signature: Mapping[str, tf.TensorSpec]) -> Callable[[], Iterator[dict[str, Any]]]:
    """Return the function that ``from_generator`` needs."""
    strings = [name for name, spec in signature.items() if spec.dtype == tf.string]
    ragged = [name for name, spec in signature.items() if isinstance(spec, tf.RaggedTensorSpec)]

    def batches() -> Iterator[dict[str, Any]]:
        for batch in epochs:
            given = {name: batch[name] for name in signature}
            for name in strings:
                given[name] = np.array(given[name], dtype=object)  # one conversion of all, in C
            for name in ragged:
                given[name] = tf.RaggedTensor.from_row_splits(*given[name], validate=False)
            yield given

    return batches


class LoaderCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow is not installed where types are checked
    """Saves a loader's state in every file to which the model is saved, and restores it when training resumes.

    Train on ``dataset()``, and put this callback behind ``BackupAndRestore`` and ``ModelCheckpoint`` in ``callbacks``. After a
    restart, ``fit`` trains on the batches that were not trained yet and logs the losses of a run that was not interrupted.
    The state of dropout and other random layers, which Keras does not save, is saved, too.

    Args:
        loader: The loader of this process. It must know its length, so shards need an index.

    Raises:
        TypeError: `loader` does not know its length, so the end of a resumed epoch is unknown.
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
        """Load a file of ``ModelCheckpoint``, ``.keras`` or ``.weights.h5``; ``fit`` then resumes from there.

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
    """The object that Keras saves and loads with the model. It is no layer, so the model has the same layers as without it.

    Args:
        now: Returns the state to save: a dict for JSON, and variables.

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
