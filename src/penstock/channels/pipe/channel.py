"""The pipes of a channel: a thread for each, which writes epoch after epoch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from penstock.channels.entries import Entries, EpochEntries, EpochOrder
from penstock.channels.pipe.content import content_of
from penstock.channels.pipe.epoch import EpochStream
from penstock.channels.pipe.fifo import CancelledFifoError, Fifo, ReaderGoneError
from penstock.errors import PenstockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.channels.inputs import InputChannel
    from penstock.channels.pipe.content import Content
    from penstock.types import Buffer

GATHERED_BYTES = 64 << 10
"""Small pieces are written together up to this size: a system call for each small object would cost more than its bytes."""

GATHERED_COUNT = 64
END_S_MAX = 30.0


class PipeChannel:
    """A channel in Pipe mode; see ``RunningChannel``.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order, shared by its pipes.
        path: Path in the directory of the channels; the FIFOs are beside it.
        orders: The order of each of its pipes.

    Cost: one thread for each pipe, and what ``Store.read_parts`` costs for each.
    """

    def __init__(self, channel: InputChannel, entries: Entries, *, path: Path, orders: Sequence[EpochOrder]) -> None:
        self.path = path
        content = content_of(channel)
        self._pipes: list[Pipe] = []
        self._epochs = EpochEntries(entries, readers_count=len(orders))
        try:
            for name, order in zip(channel.pipes(), orders, strict=True):
                self._pipes.append(Pipe(self._epochs, path=path.with_name(name), order=order, content=content))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise what has gone wrong in one of the pipes.

        Raises:
            PenstockError: The data cannot be read.
        """
        for pipe in self._pipes:
            if pipe.failure is not None:
                raise pipe.failure

    def warnings(self) -> list[str]:
        """Return an empty list: a pipe that cannot be filled ends the run, with its error."""
        return []

    def close(self) -> None:
        """End all pipes and remove their FIFOs; idempotent."""
        for pipe in self._pipes:
            pipe.cancel()
        self._epochs.close()
        for pipe in self._pipes:
            pipe.close()


class Pipe:
    """One pipe: the FIFOs ``<path>_<epoch>``, one after the other.

    When all of an epoch has been requested, the reading of the next one begins, so that the network does not rest between
    two epochs. When the program opens it, the objects are listed again, and if any has changed, it is read anew. The next
    FIFO appears before the last bytes of an epoch are followed by its end, so that no reader has to wait for it.

    Args:
        epochs: Objects of the channel in each epoch, in order.
        path: Path of the FIFOs without ``_<epoch>``.
        order: Which entries it carries, and in which order.
        content: Makes the bytes of the pipe from each entry.

    Attributes:
        failure: Why it stopped; None while nothing is wrong.
    """

    def __init__(self, epochs: EpochEntries, *, path: Path, order: EpochOrder, content: Content) -> None:
        self.failure: PenstockError | None = None
        self._epochs = epochs
        self._path = path
        self._order = order
        self._content = content
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._streams: dict[int, EpochStream] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fifo = self._make_fifo(0)
        self._thread = threading.Thread(target=self._run, name=f"pipe {path.name}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Have the thread end, whatever it waits for; idempotent."""
        with self._lock:
            if self._is_cancelled:
                return
            self._is_cancelled = True
            os.eventfd_write(self._wake_fd, 1)
            streams = list(self._streams.values())
            self._fifo.cancel()
        for stream in streams:
            stream.close()

    def close(self) -> None:
        """End the thread and remove the FIFO; idempotent."""
        self.cancel()
        if self._wake_fd < 0:
            return
        self._thread.join(END_S_MAX)
        self._fifo.remove()
        self._fifo.close()
        if not self._thread.is_alive():
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _make_fifo(self, epoch: int) -> Fifo:
        return Fifo(self._path.with_name(f"{self._path.name}_{epoch}"), self._wake_fd)

    def _run(self) -> None:
        epoch = 0
        try:
            while True:
                self._write_epoch(epoch)
                epoch += 1
        except CancelledFifoError:
            pass
        except PenstockError as error:
            if not self._is_cancelled:  # closing a stream is an error to the thread that reads it
                self.failure = error
        except OSError as error:
            self.failure = StoreError(f"{self._path.name}_{epoch}: {error}")
        except Exception as error:  # a defect must end the run, and not only this thread
            self.failure = StoreError(f"{self._path.name}_{epoch}: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
        finally:
            for stream in self._streams.values():
                stream.close()

    def _write_epoch(self, epoch: int) -> None:
        """Write one epoch, and make the FIFO of the next one."""
        stream = self._stream(epoch, self._epochs.latest)
        fifo = self._fifo
        fifo.open()
        stream = self._stream(epoch, self._epochs.begin(epoch))
        try:
            gathered: list[Buffer] = []
            gathered_bytes = 0
            for piece in stream:
                if stream.is_planned and epoch + 1 not in self._streams:
                    self._stream(epoch + 1, self._epochs.latest)
                gathered.append(piece)
                gathered_bytes += len(piece)
                if gathered_bytes >= GATHERED_BYTES or len(gathered) >= GATHERED_COUNT:
                    fifo.write(gathered)
                    gathered, gathered_bytes = [], 0
            fifo.write(gathered)
        except ReaderGoneError:
            pass
        stream.close()
        self._epochs.leave(epoch)
        with self._lock:
            self._streams.pop(epoch, None)
            if self._is_cancelled:
                raise CancelledFifoError
            self._fifo = self._make_fifo(epoch + 1)
        fifo.remove()
        fifo.close()

    def _stream(self, epoch: int, entries: Entries) -> EpochStream:
        """Return the stream of an epoch, which may have begun already; one of other entries is given up."""
        with self._lock:
            if self._is_cancelled:
                raise CancelledFifoError
            begun = self._streams.get(epoch)
        if begun is not None and begun.entries is entries:
            return begun
        if begun is not None:
            begun.close()
        stream = EpochStream(entries, self._order.entries(entries, epoch=epoch), content=self._content)
        with self._lock:
            self._streams[epoch] = stream
            if self._is_cancelled:
                raise CancelledFifoError
        return stream


def open_pipe_channel(
    channel: InputChannel, entries: Entries, *, path: Path, host_rank: int = 0, hosts_count: int = 1
) -> PipeChannel:
    """Begin a channel in Pipe mode.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order.
        path: Path in the directory of the channels.
        host_rank: Number of this host, from 0.
        hosts_count: Number of hosts.

    Raises:
        StoreError: There is no object, or the store cannot be listed.

    Cost: waits for the first page of the listing.
    """
    entries.get(0)
    orders = pipe_orders(channel, host_rank=host_rank, hosts_count=hosts_count)
    return PipeChannel(channel, entries, path=path, orders=orders)


def pipe_orders(channel: InputChannel, *, host_rank: int, hosts_count: int) -> list[EpochOrder]:
    """Return the order of each pipe of a channel on one host.

    Copies have seeds of their own, in the order of hosts and copies from the channel's seed on; they share nothing out but
    what the hosts share. Parts of a split have one seed, and share everything out.
    """
    is_sharded = channel.distribution == "ShardedByS3Key"
    part, parts_count = (host_rank, hosts_count) if is_sharded else (0, 1)
    if channel.copies:
        first = (channel.shuffle_seed or 0) + (0 if is_sharded else host_rank * channel.copies)
        return [EpochOrder(seed=first + copy, part=part, parts_count=parts_count) for copy in range(channel.copies)]
    count = channel.split or 1
    return [
        EpochOrder(seed=channel.shuffle_seed, part=part * count + number, parts_count=parts_count * count)
        for number in range(count)
    ]
