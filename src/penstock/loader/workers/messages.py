"""Messages between a loader and its workers: pickles over a socket, some with a descriptor of shared memory, or with rows.

Both ends belong to this program: nothing that is unpickled here comes from data.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.errors import ConfigError, PenstockError
from penstock.loader.options import Batching
from penstock.loader.position import IndexPosition, feed_position
from penstock.loader.workers.shared_memory import DESCRIPTORS_HINT, map_memory
from penstock.processes.channel import receive_exactly
from penstock.system.tracebacks import is_full, pickled_with_files
from penstock.version import install_hint

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    from penstock.loader.lanes.feed import Feed
    from penstock.loader.options import BatchPlan
    from penstock.loader.plan.indexed_read_plan import IndexedReadPlan
    from penstock.loader.plan.streamed_read_plan import StreamedReadPlan
    from penstock.loader.position import FeedPosition, Position
    from penstock.loader.statistics import Meter
    from penstock.loader.workers.shared_memory import PackedColumn, SharedMemory
    from penstock.pipeline import Pipeline

_HEAD = struct.Struct("<QQ")
"""Length of the message, and size of the shared memory whose descriptor comes with it, both in bytes; 0 without one."""
CAUSES_MAX = 8

# ── from the loader ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedInput:
    """The input of a worker where an index counts the batches: positions follow from their numbers.

    Attributes:
        read_plan: The rank's plan for reading.
        position: Position to begin at.
        stop: Position that ends the epoch.
        global_size: Number of samples in a batch of all ranks.
    """

    read_plan: IndexedReadPlan
    position: IndexPosition
    stop: int
    global_size: int

    def open(self, epoch: int, *, worker: int, workers_count: int) -> Feed:
        """The samples of the worker's lanes, in their order."""
        return self.read_plan.for_worker(worker, workers_count).feed_between(epoch, self.position.position, self.stop)

    def report(self, position: Position | None) -> None:
        """The loader knows all positions."""

    def remaining_after(self, batches_count: int, reported: FeedPosition | None) -> IndexedInput:
        """The samples that are left to read."""
        del reported
        position = IndexPosition(self.position.position + batches_count * self.global_size)
        return replace(self, position=position)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedInput:
    """The input of a worker that reads whole shards, and reports where its lanes are.

    Attributes:
        read_plan: The rank's plan for reading.
        position: Position to begin at, in the worker's own lanes.
    """

    read_plan: StreamedReadPlan
    position: FeedPosition

    def open(self, epoch: int, *, worker: int, workers_count: int) -> Feed:
        """The samples of the worker's lanes, in their order; the position says which lanes these are."""
        del worker
        own = self.read_plan.for_worker(workers_count)
        return own.begin(epoch, self.position, batching=Batching(1, drop_last=False, take_count=None))[0]

    def report(self, position: Position | None) -> FeedPosition | None:
        """The position of the worker's lanes."""
        return feed_position(position)

    def remaining_after(self, batches_count: int, reported: FeedPosition | None) -> StreamedInput:
        """The samples that are left to read."""
        del batches_count
        return self if reported is None else replace(self, position=reported)


WorkerInput: TypeAlias = IndexedInput | StreamedInput
"""What one worker reads: the lanes that it owns, from a position on."""


class WorkerJob(NamedTuple):
    """The job of a worker process in one epoch. A job is never changed: a restarted worker gets another one.

    Attributes:
        input: Samples that the worker reads.
        pipeline: The pipeline; the resources of its stages (locks, tables) are made in the worker.
        plan: The plan of the batches; the worker makes the transforms itself, and ``batch_size`` is that of the whole rank.
        epoch: Epoch number, from 0.
        first_batch: Number, in the run, of the first batch that the worker fills.
        number: Number of the worker, from 0.
        workers_count: Number of workers of this rank.
        budget_bytes: Byte budget of the worker's process.
        rebatches: Whether the worker makes a list of outputs of each sample, which the loader rebatches.
    """

    input: WorkerInput
    pipeline: Pipeline
    plan: BatchPlan
    epoch: int
    first_batch: int
    number: int
    workers_count: int
    budget_bytes: int
    rebatches: bool

    @property
    def meter(self) -> Meter:
        """Counts the reads of the worker."""
        return self.input.read_plan.reading.meter

    def open(self) -> Feed:
        """The samples of the worker's lanes, in their order."""
        return self.input.open(self.epoch, worker=self.number, workers_count=self.workers_count)

    def remaining_after(self, done_count: int, reported: FeedPosition | None) -> WorkerJob:
        """The work that is left.

        Args:
            done_count: Number of batches of the run that are done.
            reported: The position that the worker reported last; None if it has not reported any.
        """
        rest = self.input.remaining_after(done_count - self.first_batch, reported)
        return self._replace(first_batch=done_count, input=rest)


class FillRows(NamedTuple):
    """Fill these rows of a batch with the next samples of your lanes.

    Attributes:
        batch_index: Number of the batch in the run, from 0.
        rows: int64[n] as bytes, which pickle faster than an array.
        slot: Slot of the batch; None if the columns are not known yet, and ``UseSlot`` follows.
    """

    batch_index: int
    rows: bytes
    slot: int | None


class UseSlot(NamedTuple):
    """Write the rows of a batch into this slot."""

    batch_index: int
    slot: int


class AddSlot(NamedTuple):
    """The memory of a slot, which comes with the message."""

    slot: int


class FixLayout(NamedTuple):
    """The values that fix the columns of all batches: those of the first sample that any worker reported."""

    values: Mapping[str, Any]


class FindSamples(NamedTuple):
    """Read until these lanes are known to have the wanted number of samples, or have ended; answered by ``SamplesFound``.

    Attributes:
        counts: Number of samples, from the beginning of the epoch, by lane.
    """

    counts: Mapping[int, int]


class EndJob(NamedTuple):
    """There are no more rows to fill; answered by ``JobEnded``."""


# ── from a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class FirstSample(NamedTuple):
    """The first sample of a worker has been decoded; answered by ``FixLayout``."""

    values: Mapping[str, Any]


class LaneReport(NamedTuple):
    """A worker's knowledge of one of its lanes.

    Attributes:
        samples_count: Number of samples, from the beginning of the epoch, that are known to be there.
        is_ended: Whether the lane has no more samples.
        error: Error that keeps the worker from finding more.
    """

    samples_count: int
    is_ended: bool
    error: RemoteError | None


class SamplesFound(NamedTuple):
    """A worker's knowledge of its lanes.

    Attributes:
        lanes: Report of each lane, by number.
    """

    lanes: Mapping[int, LaneReport]


class DroppedSample(NamedTuple):
    """A sample that a worker has dropped, for the loader to count.

    Attributes:
        source: Number of the source in a mix.
        stage: Name of the stage that dropped it.
        error: Error of the sample; None if the stage drops samples without one.
        max_errors: Number of samples that the stage may drop in an epoch.
        epoch: Epoch number, from 0.
    """

    source: int
    stage: str
    error: RemoteError | None
    max_errors: int
    epoch: int


class RowsDone(NamedTuple):
    """The rows that a worker was to fill in a batch are written. A new heap for the batch's slot comes with the message.

    Attributes:
        batch_index: Number of the batch in the run, from 0.
        labels: ``__key__`` and ``__shard__`` of every row, including dropped ones.
        names: Names of the columns that travel beside the slot.
        columns: Descriptions of the values of each of these columns.
        inline: The values themselves, if they are few; None if they are in the worker's heap of this slot.
        dropped: Rows, among those of the worker, whose sample was dropped.
        position: Position of the worker's lanes after its rows; None if an index tells.
        sums: Counters of the worker since its job began, by name.
        dropped_samples: Samples dropped since the last of these messages.
        parts: For each column of arrays whose rows follow the message, because no memory is shared: its offset in a slot, and
            the size of a row in bytes. The values that are neither there nor `inline` follow them.
    """

    batch_index: int
    labels: Mapping[str, list[str]]
    names: list[str]
    columns: list[PackedColumn]
    inline: bytes | None
    dropped: list[int]
    position: FeedPosition | None
    sums: Mapping[str, float]
    dropped_samples: list[DroppedSample]
    parts: list[tuple[int, int]]


class JobTaken(NamedTuple):
    """The worker has read its job; only a worker that shares no memory says so."""


class JobEnded(NamedTuple):
    """The worker has ended its job and waits for another."""


class WorkerFailed(NamedTuple):
    """The worker ends with this error."""

    error: RemoteError


class RemoteError(NamedTuple):
    """An error on its way to another process.

    Attributes:
        pickled: The error, or if it does not pickle, a ``PenstockError`` with its type and text.
        text: Type and text of the error, for a process that lacks its class.
        notes: Notes of the error, which pickling may lose.
        trace: Traceback as text, if the environment asks for whole tracebacks; otherwise "".
        cause: The ``__cause__`` of the error.
    """

    pickled: bytes
    text: str
    notes: list[str]
    trace: str
    cause: RemoteError | None

    @classmethod
    def of(cls, error: BaseException, *, causes_max: int = CAUSES_MAX) -> RemoteError:
        """`error` with its notes, up to `causes_max` causes, and its traceback."""
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(PenstockError(text))
        cause = error.__cause__
        sent_cause = cls.of(cause, causes_max=causes_max - 1) if cause is not None and causes_max else None
        has_trace = causes_max == CAUSES_MAX and is_full()
        trace = "".join(traceback.format_exception(error)) if has_trace else ""
        return cls(pickled, text, list(getattr(error, "__notes__", ())), trace, sent_cause)

    def revived(self, where: str = "") -> BaseException:
        """The error as if it had been raised in this process; a note says `where` it was raised."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = PenstockError(self.text)
        known = set(getattr(error, "__notes__", ()))
        for note in self.notes:
            if note not in known:
                error.add_note(note)
        if where:
            error.add_note(f"in {where}:\n{self.trace}" if self.trace else f"in {where}")
        if self.cause is not None:
            error.__cause__ = self.cause.revived()
        return error


_KINDS = (
    FillRows,
    UseSlot,
    AddSlot,
    FixLayout,
    FindSamples,
    EndJob,
    FirstSample,
    SamplesFound,
    RowsDone,
    JobTaken,
    JobEnded,
    WorkerFailed,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
"""A message crosses as the number of its class and its fields: pickling the class itself takes five times as long."""

# ── the socket ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class MessageChannel:
    """One end of the connection. ``send`` may be called from any thread, ``receive`` from one.

    Args:
        end: A connected stream socket; it is closed with the channel.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.RLock()  # a finaliser may run inside `send`, and send from there
        self._is_receiving = False

    def fileno(self) -> int:
        """Descriptor of the socket, to wait for."""
        return self._socket.fileno()

    @property
    def shares_memory(self) -> bool:
        """Whether both ends are on one machine, so that memory can be sent by its descriptor."""
        return self._socket.family == socket.AF_UNIX

    def send(self, message: NamedTuple, *, memory: SharedMemory | None = None, data: Sequence[Any] = ()) -> None:
        """Send one of the messages of this module.

        Args:
            message: The message.
            memory: Shared memory to send with it.
            data: Buffers to send after it, which whoever receives the message reads from the socket.

        Raises:
            OSError: The other end is gone.
        """
        numbered = (_NUMBERS[type(message)], *message)
        with self._lock:
            self.send_raw(pickle.dumps(numbered, protocol=pickle.HIGHEST_PROTOCOL), memory=memory)
            for buffer in data:
                self._socket.sendall(buffer)

    def send_raw(self, data: bytes, *, memory: SharedMemory | None = None) -> None:
        """Send a message that has been pickled, which may be anything but a tuple.

        Raises:
            OSError: The other end is gone.
        """
        head = _HEAD.pack(len(data), 0 if memory is None else len(memory.mapping))
        with self._lock:
            if memory is not None:
                socket.send_fds(self._socket, [head], [memory.descriptor])
                self._socket.sendall(data)
            else:
                self._socket.sendall(head + data)  # one call, because the training loop waits for it

    def receive(self) -> tuple[Any, mmap.mmap | None]:
        """The next message, and the shared memory that came with it. Blocks.

        Raises:
            EOFError, OSError: The other end is gone, or the exception of a signal interrupted the last call.
            PenstockError: The memory did not arrive: the kernel drops a descriptor if this process may not open another file.
                Or unpickling raised an ``OSError`` or an ``EOFError``; it may raise anything else, too.
        """
        if self._is_receiving:
            raise EOFError
        self._is_receiving = True
        head = b""
        descriptors: list[int] = []
        try:
            while len(head) < _HEAD.size:
                part, more, _, _ = socket.recv_fds(self._socket, _HEAD.size - len(head), 1)
                if not part:
                    raise EOFError
                head += part
                descriptors += more
            length, size_bytes = _HEAD.unpack(head)
            data = receive_exactly(self._socket, length)
            if data is None:
                raise EOFError
            self._is_receiving = False
            if size_bytes and not descriptors:
                raise PenstockError("shared memory did not arrive: too many open files", hint=DESCRIPTORS_HINT)
            try:
                message = pickle.loads(data)
            except (EOFError, OSError) as error:  # of the user's modules; it is not the end of the connection
                raise PenstockError(f"a message cannot be unpickled: {type(error).__name__}: {error}") from error
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        if type(message) is tuple:
            message = _KINDS[message[0]](*message[1:])
        return message, map_memory(descriptors[0], size_bytes) if descriptors else None

    def end(self) -> None:
        """Send nothing more: the receiver of either end gets the messages that were sent, and then the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end and wake a thread that receives from it; idempotent."""
        self.end()
        self._socket.close()


def pickled_by_value(message: Any) -> bytes:
    """A pickle that contains functions of the main module, lambdas and closures themselves, not only their names.

    Raises:
        ConfigError: Cloudpickle is not installed, or the message cannot be pickled.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise ConfigError(
            "processes= sends the pipeline's functions to its workers by cloudpickle, which is not installed",
            hint=install_hint("processes"),
        ) from None
    main = sys.modules.get("__mp_main__")  # in a process that `spawn` or `forkserver` started: no worker can import it
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    try:
        data = pickled_with_files(cloudpickle, message)
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be sent to worker processes: {type(error).__name__}: {error}",
            hint="functions cannot hold locks, open files or connections; create those inside the function",
        ) from error
    return data
