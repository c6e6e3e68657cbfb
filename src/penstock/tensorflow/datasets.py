"""``dataset``: a loader's batches as a ``tf.data.Dataset``, whole batches at a time."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.samples.columns import Ragged
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.loader.options import LoaderArguments
    from penstock.pipeline import Pipeline


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

    Cost: that of a ``Loader``. Without `signature`, reading begins at once, and what was read begins the first epoch.
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
