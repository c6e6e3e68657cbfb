"""Pipe mode: for each epoch a FIFO, through which the objects of the channel come one after the other.

A thread for each pipe writes epoch after epoch. A failure does not end a FIFO, because an end of file would look like the end
of the epoch. It is kept for ``check()``, and the run ends the program.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.channels.entries import ChannelObject, Entries, EpochEntries, EpochOrder
from penstock.channels.file import Inflating
from penstock.errors import ConfigError, ObjectChangedError, PenstockError, StoreError
from penstock.fetch import PlanItem
from penstock.formats.recordio import MAGIC, PART_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.channels.entries import Entries, Entry
    from penstock.channels.inputs import InputChannel
    from penstock.types import Buffer, Chunk


_F_SETPIPE_SZ = 1031
_SIZE_FILE = Path("/proc/sys/fs/pipe-max-size")
_VECTORS_MAX = 1024  # IOV_MAX of Linux


class ReaderGoneError(Exception):
    """The program closed its end of the FIFO before the end of the epoch; it wants the next one."""


class CancelledFifoError(Exception):
    """The FIFO was cancelled."""


class Fifo:
    """A FIFO that one thread writes. ``cancel`` may be called from any thread.

    Args:
        path: Path of the FIFO. An old FIFO of this name is removed.
        wake_fd: An eventfd that becomes readable when ``cancel`` is called for good.
    """

    def __init__(self, path: Path, wake_fd: int) -> None:
        self.path = path
        self._wake_fd = wake_fd
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._released_fd: int | None = None
        if path.is_fifo():
            path.unlink()
        os.mkfifo(path, 0o600)
        self._path_fd: int | None = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open(self) -> None:
        """Wait for a reader.

        Raises:
            CancelledFifoError: ``cancel`` was called.
        """
        fd = os.open(f"/proc/self/fd/{self._path_fd}", os.O_WRONLY | os.O_CLOEXEC)
        with self._lock:
            self._fd = fd
            if self._is_cancelled:
                raise CancelledFifoError
        os.set_blocking(fd, False)
        with suppress(OSError):  # at the user's limit for all pipes, this one keeps the usual 64 KiB
            fcntl.fcntl(fd, _F_SETPIPE_SZ, pipe_bytes_max())

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write all of `buffers`; wait while the reader is behind.

        Raises:
            ReaderGoneError: The reader has closed the FIFO.
            CancelledFifoError: ``cancel`` was called.
        """
        assert self._fd is not None
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while rest:
            try:
                count = os.writev(self._fd, rest[:_VECTORS_MAX])
            except BlockingIOError:
                self._wait()
                continue
            except BrokenPipeError:
                raise ReaderGoneError from None
            while rest and count >= len(rest[0]):
                count -= len(rest[0])
                rest.pop(0)
            if count:
                rest[0] = rest[0][count:]

    def _wait(self) -> None:
        """Wait until the FIFO has room."""
        poller = select.poll()
        assert self._fd is not None
        poller.register(self._fd, select.POLLOUT)
        poller.register(self._wake_fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd == self._wake_fd:
                raise CancelledFifoError

    def remove(self) -> None:
        """Remove the FIFO from its directory; the reader keeps its open files."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the writer's end, after which the reader finds the end of the file; idempotent."""
        with self._lock:
            for fd in (self._fd, self._released_fd, self._path_fd):
                if fd is not None:
                    os.close(fd)
            self._fd = self._released_fd = self._path_fd = None

    def cancel(self) -> None:
        """Have ``open`` end if it waits; ``write`` ends by the eventfd."""
        with self._lock:
            self._is_cancelled = True
            if self._fd is None and self._released_fd is None and self._path_fd is not None:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                self._released_fd = os.open(f"/proc/self/fd/{self._path_fd}", flags)


@cache
def pipe_bytes_max() -> int:
    """Return the largest size of a pipe that the system lets users choose: 1 MiB, unless an administrator changed it."""
    try:
        return int(_SIZE_FILE.read_text())
    except (OSError, ValueError):
        return 1 << 20


class EpochStream:
    """The bytes of one epoch. The first requests are sent at once.

    Args:
        entries: All entries of the epoch.
        ordered: Those of this pipe, in the order of the epoch; pulled a little ahead of the reads.
        content: Makes the bytes of the pipe from each.

    Attributes:
        entries: All entries of the epoch.
        is_planned: Whether all entries have been pulled, so that the next epoch may begin.

    Cost: that of ``Store.read_parts``.
    """

    def __init__(self, entries: Entries, ordered: Iterator[Entry], *, content: Content) -> None:
        self.entries = entries
        self._store = entries.store
        self._content = content
        self.is_planned = False
        self._waiting: deque[ChannelObject | bytes] = deque()
        self._parts: Iterator[Chunk] = self._store.read_parts(self._requests(ordered))

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._parts:
            yield from self._texts()
            piece = self._waiting[0]
            assert isinstance(piece, ChannelObject)
            yield from self._content.wrap(
                self._pieces(chunk), self._size_of(piece, chunk), self._store.describe(piece.key)
            )
            self._waiting.popleft()
        yield from self._texts()

    def close(self) -> None:
        """Cancel the requests in flight; idempotent, and from any thread."""
        self._parts.close()  # type: ignore[attr-defined]

    def _requests(self, ordered: Iterator[Entry]) -> Iterator[PlanItem]:
        for entry in ordered:
            for piece in entry:
                self._waiting.append(piece)
                if isinstance(piece, ChannelObject):
                    yield PlanItem(
                        piece.key, etag=piece.etag, size_bytes=piece.size_bytes, last_modified_s=piece.modified_s
                    )
        self.is_planned = True

    def _texts(self) -> Iterator[Buffer]:
        """Yield the values that come before the next object."""
        while self._waiting and isinstance(text := self._waiting[0], bytes):
            self._waiting.popleft()
            yield from self._content.wrap_text(text)

    def _pieces(self, chunk: Chunk) -> Iterator[Buffer]:
        """Yield the bytes of the object that `chunk` begins."""
        yield chunk.data
        while not chunk.last:
            chunk = next(self._parts)
            yield chunk.data

    def _size_of(self, piece: ChannelObject, chunk: Chunk) -> int | None:
        """Return the size of the object that `chunk` begins, if the content needs it."""
        if not self._content.needs_size:
            return None
        if chunk.last:
            return len(chunk.data)
        if piece.size_bytes is not None:
            return piece.size_bytes
        info = self._store.stat(piece.key)
        if info.etag != chunk.etag:
            raise ObjectChangedError("the object changed while it was read", url=self._store.describe(piece.key))
        return info.size_bytes


_LENGTH = struct.Struct("<I")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


class Content:
    """Turns the pieces of an object, or a text, into the bytes that the pipes of a channel carry.

    Objects come back to back, each inflated if the channel says that they are gzip. With RecordIO, each is one record.

    Args:
        channel: The channel.

    Attributes:
        needs_size: Whether ``wrap`` has to know the size of an object before its first piece.
    """

    def __init__(self, channel: InputChannel) -> None:
        self._is_gzip = channel.compression == "Gzip"
        self._is_record = channel.record_wrapper == "RecordIO"
        self.needs_size = self._is_record and not self._is_gzip

    def wrap(self, pieces: Iterable[Buffer], size_bytes: int | None, url: str) -> Iterator[Buffer]:
        """Yield the bytes that the pipe carries for an object, in pieces of a bounded size.

        Args:
            pieces: Pieces of the object.
            size_bytes: Size of the object in bytes, if ``needs_size``.
            url: Name of the object in messages.

        Raises:
            ConfigError: The object is too large for one record.
            CorruptShardError: It is not gzip.

        Cost: a record of an inflated object begins with its length, so all of it is held.
        """
        if self._is_gzip:
            pieces = _inflated(pieces, url)
        if not self._is_record:
            yield from pieces
            return
        if size_bytes is None:
            held: list[Buffer] = []
            size_bytes = 0
            for piece in pieces:
                held.append(piece)
                size_bytes += len(piece)
                record_head(size_bytes, url)
            pieces = held
        yield from _record(pieces, size_bytes, url)

    def wrap_text(self, text: bytes) -> Iterator[Buffer]:
        """Yield the bytes that the pipe carries for the value of an attribute, which has no object and no compression."""
        yield from _record([text], len(text), "an attribute") if self._is_record else (text,)


def _inflated(pieces: Iterable[Buffer], url: str) -> Iterator[Buffer]:
    inflating = Inflating(url)
    for piece in pieces:
        yield from inflating.pieces(piece)
    inflating.end()


def _record(pieces: Iterable[Buffer], size_bytes: int, url: str) -> Iterator[Buffer]:
    yield record_head(size_bytes, url)
    yield from pieces
    yield _PADDING[size_bytes % 4]


def record_head(size_bytes: int, url: str) -> bytes:
    """Return the eight bytes before a record of `size_bytes` bytes.

    Raises:
        ConfigError: The record is too large.
    """
    if size_bytes > PART_BYTES_MAX:
        raise ConfigError(
            f"{url} has more than {PART_BYTES_MAX} bytes, the most that one RecordIO record can hold",
            hint="leave out wrapper=RecordIO, or store smaller objects",
        )
    return MAGIC + _LENGTH.pack(size_bytes)


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
        content = Content(channel)
        self._pipes: list[Pipe] = []
        self._epochs = EpochEntries(entries, readers_count=len(orders))
        try:
            for name, order in zip(channel.pipes(), orders, strict=True):
                self._pipes.append(Pipe(self._epochs, path=path.with_name(name), order=order, content=content))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise the error that has occurred in one of the pipes.

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
    two epochs. When the program opens it, the objects are listed again, and if any has changed, it is read again. The next
    FIFO appears before the last bytes of an epoch are followed by its end, so that no reader has to wait for it.

    Args:
        epochs: Objects of the channel in each epoch, in order.
        path: Path of the FIFOs without ``_<epoch>``.
        order: Order and share of the entries that it carries.
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
        """Have the thread end, even if it waits; idempotent."""
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
