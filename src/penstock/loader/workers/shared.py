"""Values whose length is known only when they are there, from a worker process to its loader: ``bytes``, ``str``, arrays.

They go end to end into a heap, a ``memfd`` of one worker for one slot; a pickle through a socket would copy them twice
more, in pieces of 200 KB that both sides wait for. The loader makes from it the values that a batch holds in lists: one
copy, which ``bytes`` ask for in any case. Short ones go with the message.
"""

from __future__ import annotations

import itertools
import mmap
import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.loader.workers.slots import made

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INLINE_BYTES_MAX = 32 * 1024
"""Up to which values go with the message."""

ANCHORS_COUNT = 3
ANCHOR_BYTES_MIN = 1024


class PackedColumn(NamedTuple):
    """Values of one column, end to end.

    Attributes:
        kind: ``"bytes"``, ``"str"``, ``"array"``, or ``"pickle"``: all in one, and what arrays in it hold behind it.
        lengths: Of each, in bytes.
        dtype: Of arrays.
        shapes: Of arrays, one each.
    """

    kind: str
    lengths: list[int]
    dtype: str
    shapes: list[tuple[int, ...]]

    @property
    def size_bytes(self) -> int:
        """Of all."""
        return sum(self.lengths)


def packed(name: str, values: Sequence[Any]) -> tuple[PackedColumn, list[Any]]:
    """A column, and the buffers to be written one behind the other.

    Raises:
        ConfigError: values that are not all ``bytes``, all ``str`` or all arrays of one dtype.
    """
    kinds = {type(value) for value in values}
    if kinds == {str}:
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        return PackedColumn("str", list(map(len, encoded)), "", []), encoded
    if kinds <= {bytes}:
        return PackedColumn("bytes", list(map(len, values)), "", []), list(values)
    if _are_alike(values):
        arrays = [np.ascontiguousarray(value) for value in values]
        lengths, shapes = [array.nbytes for array in arrays], [value.shape for value in values]
        return PackedColumn("array", lengths, arrays[0].dtype.str, shapes), [
            array.reshape(-1).view("B") for array in arrays
        ]
    raise ConfigError(
        f"field {name!r}: {', '.join(sorted(kind.__name__ for kind in kinds))} cannot cross from a worker process",
        hint="numbers, arrays, str and bytes do, all of one type; other objects only with Loader(processes=0)",
    )


def pickled(outs: Sequence[Any]) -> tuple[PackedColumn, list[Any]]:
    """What came out of some samples, as ``packed``: any objects.

    Args:
        outs: By sample: a list of dicts of values, or what failed.

    Raises:
        ConfigError: a value that does not pickle.
    """
    views: list[Any] = []
    try:
        data = pickle.dumps(outs, protocol=5, buffer_callback=lambda each: views.append(each.raw()))
    except Exception as error:
        raise _unpicklable(outs, error) from error
    buffers = [data, *views]
    return PackedColumn("pickle", list(map(len, buffers)), "", []), buffers


def _unpicklable(outs: Sequence[Any], error: Exception) -> ConfigError:
    samples = [values for found in outs if isinstance(found, list) for values in found]
    name, value = next((item for values in samples for item in values.items() if not _pickles(item[1])), ("?", None))
    return ConfigError(
        f"field {name!r}: {type(value).__name__} cannot cross from a worker process: {type(error).__name__}: {error}",
        hint="what pickles does; other objects only with Loader(processes=0)",
    )


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _are_alike(values: Sequence[Any]) -> bool:
    first = values[0]
    return (
        isinstance(first, np.ndarray)
        and not first.dtype.hasobject
        and all(isinstance(value, np.ndarray) and value.dtype == first.dtype for value in values)
    )


class Anchors:
    """Keeps the last large value of each of the last batches.

    A loop drops a batch when it has the next one, so that every other one lies at the end of ``malloc``'s memory when it is
    dropped. That end is given back to the system then, and got anew, page by page, for the batch after: half of all the
    time that a training loop spent on taking 3 MB of ``bytes``.
    """

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=ANCHORS_COUNT)

    def keep(self, columns: Iterable[Any]) -> None:
        """Of a batch, in the order in which its columns were made."""
        for column in columns:
            last = column[-1] if isinstance(column, list) and column else None
            if isinstance(last, bytes | str) and len(last) >= ANCHOR_BYTES_MIN:
                self._kept.append(last)


def unpacked(columns: Sequence[PackedColumn], memory: mmap.mmap | bytes) -> list[list[Any]]:
    """The values of columns that lie behind each other, in memory of their own."""
    found: list[list[Any]] = []
    at = 0
    for column in columns:
        ends = list(itertools.accumulate(column.lengths, initial=at))
        if column.kind == "pickle":
            view = memoryview(memory)
            data, *buffers = [view[start:end] for start, end in itertools.pairwise(ends)]
            found.append(pickle.loads(data, buffers=list(map(bytearray, buffers))))
            at = ends[-1]
            continue
        parts = [memory[start:end] for start, end in itertools.pairwise(ends)]  # a slice of an mmap is bytes, a copy
        at = ends[-1]
        if column.kind == "str":
            found.append([str(part, "utf-8", "surrogatepass") for part in parts])
        elif column.kind == "array":
            dtype = np.dtype(column.dtype)
            found.append(
                [
                    np.frombuffer(bytearray(part), dtype).reshape(shape)
                    for part, shape in zip(parts, column.shapes, strict=True)
                ]
            )
        else:
            found.append(parts)
    return found


class Heaps:
    """A worker's heaps, by slot; each grows by being replaced."""

    def __init__(self) -> None:
        self._memories: dict[int, mmap.mmap] = {}

    def write(self, slot: int, buffers: Sequence[Any], size_bytes: int) -> tuple[int, int] | None:
        """Put buffers end to end into the heap of a slot, which the loader is done with.

        Returns:
            Descriptor and size of a heap that replaces the one before, if there is one; the caller closes it.
        """
        replaced = None
        memory = self._memories.get(slot)
        if memory is None or len(memory) < size_bytes:
            capacity_bytes = -(-size_bytes * 5 // 4 // mmap.PAGESIZE) * mmap.PAGESIZE
            descriptor, memory = made(capacity_bytes)
            self._memories[slot] = memory
            replaced = descriptor, capacity_bytes
        at = 0
        for buffer in buffers:
            end = at + len(buffer)
            memory[at:end] = buffer
            at = end
        return replaced
