"""The loader's end of a connection to a worker on another machine: the rows that it sends land in the loader's own slots.

A worker of this machine writes its rows into memory that it shares with the loader. A worker elsewhere makes them in memory of
its own, and sends them after its ``RowsDone``. Here, a thread for each worker has the kernel write them from the socket into
the rows of the slot, without a copy in between, and passes the message on. To its loader, this channel is like that of a
worker of this machine: slots are added and used, and heaps come with a message. Neither takes a descriptor here.

The workers send no more than the loader has assigned, which is a few batches, so that nothing is held beyond the slots.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import PenstockError, ProtocolError
from penstock.loader.workers.messages import (
    AddSlot,
    FillRows,
    FindSamples,
    FixLayout,
    JobTaken,
    MessageChannel,
    RemoteError,
    RowsDone,
    SamplesFound,
    UseSlot,
    WorkerFailed,
)
from penstock.loader.workers.shared_memory import unshared_memory
from penstock.processes.channel import receive_exactly

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from penstock.loader.workers.shared_memory import SharedMemory

SCATTERED_BYTES_MIN = 2048
"""Size of a row from which the kernel writes each row to its place. Smaller rows are received together, and copied."""
BUFFERS_MAX = 512  # half of what one system call takes
SILENCE_S_MAX = 4
"""Seconds after which the connection to a machine that does not answer ends: one that lost its power sends no end."""
START_S_MAX = 60
"""The same until a worker has its job: a process that still imports its modules does not read, and a large job waits."""


class _Assigned(NamedTuple):
    rows: NDArray[np.int64]
    slot: int | None


class LandingChannel:
    """The loader's end; it has the methods of a ``MessageChannel``, whose other end the worker has.

    Args:
        end: A connected TCP socket; it is closed with the channel.

    Attributes:
        is_waiting: Whether the worker owes an answer.
        heard_s: When it last sent something or, if it owed nothing, was last asked; by ``time.monotonic``.
    """

    def __init__(self, end: socket.socket) -> None:
        keep_alive(end)
        self._socket = end
        self._channel = MessageChannel(end)
        self._messages: deque[tuple[Any, mmap.mmap | None] | None] = deque()
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._changed = threading.Condition()  # what follows is written under it
        self._assigned: dict[int, _Assigned] = {}
        self._memories: dict[int, mmap.mmap] = {}
        self._heaps: dict[int, mmap.mmap] = {}
        self._owed_count = 0
        self._ended = False
        self._is_receiving = False
        self.heard_s = time.monotonic()
        self._thread = threading.Thread(target=self._receive_all, name="penstock-landing", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Descriptor that is readable when there is a message, or the end."""
        return self._ready

    @property
    def is_waiting(self) -> bool:
        """Whether the worker owes an answer."""
        return self._owed_count > 0

    @property
    def is_ended(self) -> bool:
        """Whether nothing more arrives."""
        return not self._thread.is_alive()

    def send(self, message: NamedTuple, *, memory: SharedMemory | None = None) -> None:
        """Send a message; those about memory are for this end.

        Raises:
            OSError: The other end is gone.
        """
        with self._changed:
            match message:
                case AddSlot(slot):
                    assert memory is not None
                    self._memories[slot] = memory.mapping
                    return
                case UseSlot(batch_index, slot):
                    if batch_index in self._assigned:  # a worker without rows in it may have reported it already
                        self._assigned[batch_index] = self._assigned[batch_index]._replace(slot=slot)
                        self._changed.notify_all()
                    return
                case FillRows(batch_index, rows, slot):
                    self._assigned[batch_index] = _Assigned(np.frombuffer(rows, np.int64), slot)
                    self._owe(1)
                case FindSamples():
                    self._owe(1)
                case FixLayout():
                    self.heard_s = time.monotonic()  # the worker had to wait for it
        self._channel.send(message)

    def send_raw(self, data: bytes) -> None:
        """Send a job, which has been pickled: slots and heaps are made anew for it.

        Raises:
            OSError: The other end is gone.
        """
        with self._changed:
            self._assigned, self._memories, self._heaps = {}, {}, {}
            _bound_silence(self._socket, START_S_MAX)
        self._channel.send_raw(data)

    def receive(self) -> tuple[Any, mmap.mmap | None]:
        """The next message, and a new heap. Blocks.

        Raises:
            EOFError: The other end is gone, or the exception of a signal interrupted the last call.
        """
        if self._is_receiving:
            raise EOFError
        self._is_receiving = True
        os.eventfd_read(self._ready)
        found = self._messages.popleft()
        self._is_receiving = False
        if found is None:
            raise EOFError
        return found

    def end(self) -> None:
        """Send nothing more; the receiver gets what has arrived, and then the end."""
        self._channel.end()

    def close(self) -> None:
        """Close this end, and wait until nothing lands any more; idempotent."""
        if self._ready < 0:
            return
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._channel.end()
        if threading.current_thread() is not self._thread:  # where the finaliser of a loader may run
            self._thread.join()
        self._channel.close()
        os.close(self._ready)
        self._ready = -1

    # ── the thread ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive_all(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                heap = None
                if isinstance(message, JobTaken):
                    _bound_silence(self._socket, SILENCE_S_MAX)
                    continue
                if isinstance(message, RowsDone):
                    heap = self._land(message)
                with self._changed:
                    self._owe(-isinstance(message, RowsDone | SamplesFound))
                self._hand_on((message, heap))
        except (EOFError, OSError):
            pass
        except PenstockError as error:  # no memory
            self._hand_on((WorkerFailed(RemoteError.of(error)), None))
        except Exception as error:  # e.g. a value of a class that only the worker's machine has
            unread = ProtocolError(f"what a worker sent cannot be read here: {type(error).__name__}: {error}")
            self._hand_on((WorkerFailed(RemoteError.of(unread)), None))
        self._hand_on(None)

    def _hand_on(self, found: tuple[Any, mmap.mmap | None] | None) -> None:
        self._messages.append(found)
        if self._ready >= 0:  # a finaliser may have closed this end in this thread
            os.eventfd_write(self._ready, 1)

    def _owe(self, count: int) -> None:
        if count < 0 or not self._owed_count:
            self.heard_s = time.monotonic()
        self._owed_count += count

    def _land(self, done: RowsDone) -> mmap.mmap | None:
        """Receive the rows and values that follow a message. Returns the heap, if it is a new one."""
        with self._changed:
            if done.columns or done.parts:  # the slot may be known a moment later than the columns
                self._changed.wait_for(lambda: self._ended or self._assigned[done.batch_index].slot is not None)
            if self._ended:
                raise EOFError
            rows, slot = self._assigned.pop(done.batch_index)
            memory = None if slot is None else self._memories[slot]
        if memory is not None:
            for offset, row_bytes in done.parts:
                if row_bytes:
                    self._land_rows(memory, rows, offset, row_bytes)
        size_bytes = sum(column.size_bytes for column in done.columns) if done.inline is None else 0
        if not size_bytes:
            return None
        assert slot is not None
        replaced, heap = None, self._heaps.get(slot)
        if heap is None or len(heap) < size_bytes:
            replaced = heap = self._heaps[slot] = unshared_memory(size_bytes * 5 // 4)
        receive_into(self._socket, [memoryview(heap)[:size_bytes]])
        return replaced

    def _land_rows(self, memory: mmap.mmap, rows: NDArray[np.int64], offset: int, row_bytes: int) -> None:
        """Receive some rows of one column, which begins at `offset` of the slot."""
        first, last, count = int(rows[0]), int(rows[-1]), len(rows)
        view = memoryview(memory)[offset : offset + (last + 1) * row_bytes]
        if last - first + 1 == count:
            receive_into(self._socket, [view[first * row_bytes :]])
        elif row_bytes >= SCATTERED_BYTES_MIN:
            places = [view[row * row_bytes : (row + 1) * row_bytes] for row in rows.tolist()]
            for at in range(0, count, BUFFERS_MAX):
                receive_into(self._socket, places[at : at + BUFFERS_MAX])
        else:
            data = receive_exactly(self._socket, count * row_bytes)
            if data is None:
                raise EOFError
            column = np.frombuffer(view, np.uint8).reshape(-1, row_bytes)
            column[rows] = np.frombuffer(data, np.uint8).reshape(-1, row_bytes)


def receive_into(end: socket.socket, places: list[memoryview]) -> None:
    """Receive until all of these places, of bytes, are full; at most ``BUFFERS_MAX`` of them.

    Raises:
        EOFError: The other end has closed the connection.
    """
    while places:
        count, _, _, _ = end.recvmsg_into(places, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        done = 0
        while done < len(places) and count >= len(places[done]):
            count -= len(places[done])
            done += 1
        places = places[done:]
        if count:
            places[0] = places[0][count:]


def keep_alive(end: socket.socket) -> None:
    """Send small messages at once, and end the connection when the other machine is silent for ``SILENCE_S_MAX`` seconds."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S_MAX // 2)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S_MAX - SILENCE_S_MAX // 2)
    _bound_silence(end, SILENCE_S_MAX)


def _bound_silence(end: socket.socket, seconds: int) -> None:
    """End the connection when the other machine has not taken what was sent to it for so long."""
    with suppress(OSError):  # it has ended
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
