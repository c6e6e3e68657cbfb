"""``PipeEpoch``: the samples of one epoch of a pipe, as they arrive."""

from __future__ import annotations

import os
import select
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.channels.pipe_formats import PipeRecords
    from penstock.formats import Sample

READ_BYTES = 1 << 20
"""Bytes asked for at a time: the largest pipe that users may have."""


class PipeEpoch:
    """The samples of one epoch of a pipe; a ``SequentialEpoch``. One thread reads; any thread may close.

    A read waits for the pipe and for an eventfd, so that ``close`` ends it although no byte arrives.

    Args:
        fd: The pipe, open for reading; it is closed at the end.
        records: The format of the pipe.
        name: Name of the pipe, for messages.
    """

    def __init__(self, fd: int, records: PipeRecords, *, name: str) -> None:
        self._fd = fd
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._reading = threading.Lock()
        self._waking = threading.RLock()
        self._is_closing = self._is_over = False
        self._records = records
        self._name = name
        self._blocks = records.blocks(self._chunks(), name)
        self._count = 0  # samples of the blocks before

    def read(self) -> Sequence[Sample] | None:
        """The samples that arrive next, perhaps none; None at the end. Blocks for them.

        Raises:
            CorruptShardError: The pipe is not of its format.
            ClosedError: The epoch was closed.
        """
        block = self._next()
        if block is None:
            return None
        first, self._count = self._count, self._count + len(block)
        return self._records.samples(block, first)

    def values(self) -> Iterator[Any]:
        """Iterate over the samples as bytes or dicts; closing the epoch ends the iteration.

        Raises:
            CorruptShardError: The pipe is not of its format.
        """
        return chain.from_iterable(map(self._records.values, iter(self._next_or_end, None)))

    def close(self) -> None:
        """Leave the epoch, and have a ``read`` that blocks in another thread return; idempotent."""
        with self._waking:
            self._is_closing = True
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        self._release_if_idle()

    def _next(self) -> Sequence[Any] | None:
        if self._is_over:
            return None
        try:
            with self._reading:
                self._check_open()
                block = next(self._blocks, None)
        except BaseException:
            self.close()
            raise
        if block is None:
            self._is_over = True
            self.close()
        elif self._is_closing:  # while this thread was reading, so that it has to release
            self._release_if_idle()
        return block

    def _next_or_end(self) -> Sequence[Any] | None:
        try:
            return self._next()
        except ClosedError:
            return None

    def _chunks(self) -> Iterator[bytes]:
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            self._check_open()
            if self._fd in ready:
                data = os.read(self._fd, READ_BYTES)
                if not data:
                    return
                yield data

    def _check_open(self) -> None:
        if self._is_closing:
            raise ClosedError(f"{self._name} was closed")

    def _release_if_idle(self) -> None:
        """Close the descriptors, unless a thread is reading: that thread does it then.

        It never waits, since the garbage collector may close a loader in the thread that reads for it.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            with self._waking:
                fds = self._fd, self._wake_fd
                self._fd = self._wake_fd = -1
                for fd in fds:
                    if fd >= 0:
                        os.close(fd)
        finally:
            self._reading.release()
