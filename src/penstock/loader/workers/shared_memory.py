"""Memory that worker processes and their loader share: slots for rows of arrays, heaps for values of variable length.

Both are anonymous files (``memfd_create``), known only by descriptor: they have no name in /dev/shm, and nothing is left
after however a process ends.

A slot holds the columns of arrays of one batch. Workers write their rows into it, and the training loop gets it without a
copy. Values whose length is known only when they have been made (``bytes``, ``str``, arrays of different shapes) are
written end to end into a heap, which belongs to one worker and one slot; a pickle through a socket would copy them twice
more, in pieces of 200 KB that both sides wait for. The loader copies the values in a heap once, into the lists of the batch;
``bytes`` need this copy in any case. A few small values go with the message instead.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import pickle
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, PenstockError
from penstock.memory.buffers import lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.samples.columns import Layout

_log = logging.getLogger("penstock.loader")
_ALIGN_BYTES = 64  # a cache line: no two columns share one

DESCRIPTORS_HINT = (
    "raise the limit of open files (ulimit -n); each batch that the training loop keeps takes two of them"
)

INLINE_BYTES_MAX = 32 * 1024
"""Size up to which values of variable length go with the message."""

_ARRAY_TYPES = (np.ndarray, np.memmap)
"""Arrays that are data, dtype and shape alone; other subclasses hold more, e.g. a mask, which would be lost."""

ANCHORS_COUNT = 3
ANCHOR_BYTES_MIN = 1024


class SlotLayout:
    """Where each column of arrays lies in a slot.

    Attributes:
        size_bytes: Size of a slot in bytes.
        others: Names of the columns that are lists, and travel beside the slot.

    Args:
        layout: Layout of the batches.
        rows_count: Number of rows of a full batch.
    """

    def __init__(self, layout: Layout, rows_count: int) -> None:
        self.rows_count = rows_count
        self._arrays: list[tuple[str, Any, tuple[int, ...], int, int]] = []
        self.others: list[str] = []
        at = 0
        for name, column in layout.allocate(1).items():
            if not isinstance(column, np.ndarray) or column.dtype.hasobject:
                self.others.append(name)
                continue
            shape = (rows_count, *column.shape[1:])
            count = int(np.prod(shape, dtype=np.int64))
            self._arrays.append((name, column.dtype, shape, count, at))
            at += -(-count * column.dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self.size_bytes = max(at, mmap.PAGESIZE)

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Of each column of arrays, by name, its offset in a slot and the size of a row in bytes."""
        return {
            name: (at, count // shape[0] * dtype.itemsize if shape[0] else 0)
            for name, dtype, shape, count, at in self._arrays
        }

    def arrays(self, buffer: Any) -> dict[str, Any]:
        """The columns of arrays of the slot in `buffer`, each dtype[rows_count, ...]."""
        found = {}
        for name, dtype, shape, count, at in self._arrays:
            found[name] = np.frombuffer(buffer, dtype=dtype, count=count, offset=at).reshape(shape)
        return found


@contextmanager
def _errors_of_memory(size_bytes: int) -> Iterator[None]:
    """Replace an ``OSError``, which whoever talks to another process takes for the end of the connection."""
    try:
        yield
    except OSError as error:
        hint = DESCRIPTORS_HINT if error.errno in (errno.EMFILE, errno.ENFILE) else None
        raise PenstockError(f"no shared memory of {size_bytes} bytes: {error.strerror}", hint=hint) from error


class SharedMemory(NamedTuple):
    """Memory that this process has created, to share it.

    Attributes:
        descriptor: Descriptor of the memory, which whoever has created it closes.
        mapping: The memory, mapped into this process.
    """

    descriptor: int
    mapping: mmap.mmap


def create_memory(size_bytes: int) -> SharedMemory:
    """New shared memory.

    Raises:
        PenstockError: There is no memory, or no descriptor is left.
    """
    with _errors_of_memory(size_bytes):
        descriptor = os.memfd_create("penstock-batch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            return SharedMemory(descriptor, mmap.mmap(descriptor, size_bytes))
        except BaseException:
            os.close(descriptor)
            raise


def map_memory(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Shared memory that another process created. Closes `descriptor`, because the mapping keeps the memory.

    All pages are mapped at once: mapping them one by one, as they are touched, costs ten times as much, in the training
    loop's time.

    Raises:
        PenstockError: There is no memory, or no descriptor is left.
    """
    try:
        with _errors_of_memory(size_bytes):
            return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def unshared_memory(size_bytes: int) -> mmap.mmap:
    """New memory of this process alone, which takes no descriptor.

    Raises:
        PenstockError: There is no memory.
    """
    with _errors_of_memory(size_bytes):
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_forks_count = 0


def _count_fork() -> None:
    global _forks_count
    _forks_count += 1


os.register_at_fork(before=_count_fork)


class Slots:
    """The slots of an epoch. One thread at a time takes slots; they may come back in any thread.

    A child that is forked from this process has the same memory, and may go on with a batch that is dropped here. So a slot
    that was leased before a fork gets other memory before it is used again.

    Attributes:
        layout: Places of the columns in each slot.
        enough_count: Number of slots above which the training loop must be holding some.

    Args:
        layout: Layout of the batches.
        rows_count: Number of rows of a full batch.
        prefetch_count: Number of batches that wait for the training loop.
    """

    def __init__(self, layout: Layout, rows_count: int, *, prefetch_count: int) -> None:
        self.layout = SlotLayout(layout, rows_count)
        # one that is being filled, one that the training loop holds, and one more that it holds while it takes the next
        self.enough_count = prefetch_count + 3
        self._slots: list[SharedMemory] = []
        self._free: deque[int] = deque()  # leases that end append to it, in any thread, so there is no lock
        self._leased_at: dict[int, int] = {}  # of each slot, `_forks_count` when it was last leased

    @property
    def count(self) -> int:
        """Number of slots that have been created."""
        return len(self._slots)

    def take(self) -> int:
        """A free slot, or if there is none, a new one."""
        if self._free:
            slot = self._free.popleft()
            if self._leased_at[slot] != _forks_count:
                inherited, _ = self._slots[slot]
                self._slots[slot] = create_memory(self.layout.size_bytes)
                os.close(inherited)
            return slot
        self._slots.append(create_memory(self.layout.size_bytes))
        if len(self._slots) == self.enough_count + 1:
            _log.warning(
                "the training loop holds on to batches: more than %d slots are in use, and each takes %d bytes of shared "
                "memory",
                self.enough_count,
                self.layout.size_bytes,
            )
        return len(self._slots) - 1

    def memory(self, slot: int) -> SharedMemory:
        """The memory of a slot, to send to another process, which needs it again when it is another one."""
        return self._slots[slot]

    def lease(self, slot: int) -> memoryview:
        """The memory of a slot, to hand out. The slot is free again when the last reference to this memory is gone."""
        self._leased_at[slot] = _forks_count
        return lease(self._slots[slot].mapping, self._free, slot)

    def close(self) -> None:
        """Close the descriptors; idempotent. Memory that is leased stays until its last reference is gone."""
        slots, self._slots = self._slots, []
        for descriptor, _ in slots:
            os.close(descriptor)


# ── values of variable length ──────────────────────────────────────────────────────────────────────────────────────────


class PackedColumn(NamedTuple):
    """Describes the values of one column that lie end to end in a heap.

    Attributes:
        kind: ``"bytes"``, ``"str"``, ``"array"``, or ``"pickle"``: one pickle of all values, followed by its buffers.
        lengths: Length of each value in bytes.
        dtype: Dtype of the arrays; None for other kinds.
        shapes: Shape of each array; empty for other kinds.
    """

    kind: str
    lengths: list[int]
    dtype: np.dtype[Any] | None
    shapes: list[tuple[int, ...]]

    @property
    def size_bytes(self) -> int:
        """Size of all values in bytes."""
        return sum(self.lengths)


def packed(name: str, values: Sequence[Any]) -> tuple[PackedColumn, list[Any]]:
    """Describe the values of a column. Returns the description and the buffers to write end to end.

    Raises:
        ConfigError: The values are not all ``bytes``, all ``str`` or all arrays of one dtype; masked arrays are none.
    """
    kinds = {type(value) for value in values}
    if kinds == {str}:
        encoded = [value.encode("utf-8", "surrogatepass") for value in values]
        return PackedColumn("str", list(map(len, encoded)), None, []), encoded
    if kinds <= {bytes}:
        return PackedColumn("bytes", list(map(len, values)), None, []), list(values)
    if _are_alike(values):
        arrays = [np.ascontiguousarray(value) for value in values]
        lengths, shapes = [array.nbytes for array in arrays], [value.shape for value in values]
        return PackedColumn("array", lengths, arrays[0].dtype, shapes), [
            array.reshape(-1).view("B") for array in arrays
        ]
    raise ConfigError(
        f"field {name!r}: {', '.join(sorted(kind.__name__ for kind in kinds))} cannot be sent from a worker process",
        hint="use numbers, arrays, str or bytes, all of one type; other objects need Loader(processes=0)",
    )


def pickled(outputs: Sequence[Any]) -> tuple[PackedColumn, list[Any]]:
    """As ``packed``, for the outputs of stages, which may be any objects.

    Args:
        outputs: For each sample a list of dicts of values, or a ``RemoteError``.

    Raises:
        ConfigError: A value does not pickle.
    """
    views: list[Any] = []
    try:
        data = pickle.dumps(outputs, protocol=5, buffer_callback=lambda each: views.append(each.raw()))
    except Exception as error:
        raise _unpicklable(outputs, error) from error
    buffers = [data, *views]
    return PackedColumn("pickle", list(map(len, buffers)), None, []), buffers


def _unpicklable(outputs: Sequence[Any], error: Exception) -> ConfigError:
    samples = [values for found in outputs if isinstance(found, list) for values in found]
    name, value = next((item for values in samples for item in values.items() if not _pickles(item[1])), ("?", None))
    return ConfigError(
        f"field {name!r}: {type(value).__name__} cannot be sent from a worker process: {type(error).__name__}: {error}",
        hint="the value must pickle; other objects need Loader(processes=0)",
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
        all(type(value) in _ARRAY_TYPES and value.dtype == first.dtype for value in values)
        and not first.dtype.hasobject
    )


class Anchors:
    """Keeps the last large value of each of the last batches.

    A training loop drops a batch when it has the next one, so every other batch lies at the end of ``malloc``'s memory when
    it is dropped. That end is then given back to the system, and taken again, page by page, for the batch after the next:
    this was half of the time that a training loop spent on taking 3 MB of ``bytes``.
    """

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=ANCHORS_COUNT)

    def keep(self, columns: Iterable[Any]) -> None:
        """Keep the last value of each column of a batch; columns in the order in which they were made."""
        for column in columns:
            last = column[-1] if isinstance(column, list) and column else None
            if isinstance(last, bytes | str) and len(last) >= ANCHOR_BYTES_MIN:
                self._kept.append(last)


def unpacked(columns: Sequence[PackedColumn], memory: mmap.mmap | bytes) -> list[list[Any]]:
    """The values of columns that lie end to end in `memory`, copied."""
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
            found.append(
                [
                    np.frombuffer(bytearray(part), column.dtype).reshape(shape)
                    for part, shape in zip(parts, column.shapes, strict=True)
                ]
            )
        else:
            found.append(parts)
    return found


class Heaps:
    """The heaps of a worker, by slot. A heap grows by being replaced."""

    def __init__(self) -> None:
        self._memories: dict[int, mmap.mmap] = {}

    def write(self, slot: int, buffers: Sequence[Any], size_bytes: int) -> SharedMemory | None:
        """Write buffers end to end into the heap of a slot, whose last batch the loader has copied.

        Returns:
            A heap that replaces the one before; None if that one is large enough. The caller closes its descriptor.
        """
        replaced = None
        memory = self._memories.get(slot)
        if memory is None or len(memory) < size_bytes:
            capacity_bytes = -(-size_bytes * 5 // 4 // mmap.PAGESIZE) * mmap.PAGESIZE
            replaced = create_memory(capacity_bytes)
            memory = self._memories[slot] = replaced.mapping
        at = 0
        for buffer in buffers:
            end = at + len(buffer)
            memory[at:end] = buffer
            at = end
        return replaced
