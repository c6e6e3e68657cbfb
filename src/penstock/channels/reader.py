"""``PipeReader``: the samples of a channel in Pipe mode, epoch after epoch, for any program that ``penstock run`` starts."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from penstock.config import check_number, check_whole
from penstock.errors import ClosedError, ConfigError, DeadlineError
from penstock.formats import Sample, parser_of
from penstock.formats.parsing import feed_in_pieces
from penstock.formats.tar import ArchiveSplitter
from penstock.pipeline import Pipeline, Sequential
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


PipeFormat: TypeAlias = Literal["recordio", "tfrecord", "tar", "lines"]

LINES_MAX = 8192
"""Number of lines that are made samples together: a sample takes some 500 bytes, and a chunk may have a million lines."""


class PipeRecords(NamedTuple):
    """The functions that parse the bytes of a pipe.

    Attributes:
        blocks: Yields the items that each chunk of an epoch completes, perhaps none. Its other argument names the pipe in
            messages. It raises ``CorruptShardError`` if the bytes are not of this format.
        values: Returns the items of a block as the reader's own loop gives them.
        samples: Returns the items of a block as a pipeline reads them, given the number of the first of them in the epoch.
    """

    blocks: Callable[[Iterable[bytes], str], Iterator[Sequence[Any]]]
    values: Callable[[Sequence[Any]], Iterable[Any]]
    samples: Callable[[Sequence[Any], int], Sequence[Sample]]


def _line_blocks(chunks: Iterable[bytes], _: str) -> Iterator[Sequence[bytes]]:
    """Yield the lines that each chunk completes, without their breaks."""
    rest = b""
    for data in chunks:
        first, newline, more = data.partition(b"\n")
        if not newline:
            rest += data
            continue
        *lines, end = more.split(b"\n")
        lines.insert(0, rest + first)
        for at in range(0, len(lines), LINES_MAX):
            yield lines[at : at + LINES_MAX]
        rest = end
    if rest:
        yield [rest]


def _line_samples(block: Sequence[bytes], first: int) -> Sequence[Sample]:
    """Return samples with the field ``line``; the key is the number of the line in twelve digits."""
    return [Sample(f"{number:012d}", {"line": memoryview(line)}, number) for number, line in enumerate(block, first)]


def _record_blocks(format_name: str, chunks: Iterable[bytes], name: str) -> Iterator[Sequence[Sample]]:
    """Yield samples whose fields are slices of the chunk."""
    parser = parser_of(format_name, shard=name)
    for data in chunks:
        yield from feed_in_pieces(parser, data)
    if parser.offset_bytes:  # an epoch without an object is no shard
        yield parser.finish()


def _tar_blocks(chunks: Iterable[bytes], name: str) -> Iterator[Sequence[Sample]]:
    splitter = ArchiveSplitter()
    parser = parser_of("tar", shard=name)
    for data in chunks:
        for piece, is_end in splitter.feed(data):
            yield parser.feed(piece)
            if is_end:
                yield parser.finish()
                parser = parser_of("tar", shard=name)
    if held := splitter.finish():
        yield parser.feed(held)
    if parser.offset_bytes:
        yield parser.finish()


def _record_of(sample: Sample) -> bytes:
    return bytes(sample.fields["record"])


def _dict_of(sample: Sample) -> dict[str, Any]:
    return {"__key__": sample.key, **{name: bytes(value) for name, value in sample.fields.items()}}


def _parsed(block: Sequence[Sample], _: int) -> Sequence[Sample]:
    return block


PIPE_FORMATS = {
    "recordio": PipeRecords(partial(_record_blocks, "recordio-raw"), partial(map, _record_of), _parsed),
    "tfrecord": PipeRecords(partial(_record_blocks, "tfrecord-raw"), partial(map, _record_of), _parsed),
    "tar": PipeRecords(_tar_blocks, partial(map, _dict_of), _parsed),
    "lines": PipeRecords(_line_blocks, lambda block: block, _line_samples),
}


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


POLL_S = 0.005
_DEFAULT_BASE = "/opt/ml"


@boundary
class PipeReader:
    """Samples of a channel in Pipe mode. Each iteration is one epoch, the next iteration the next one.

    One process reads a pipe. Workers and ranks of one host each need a pipe of their own, by the channel's options ``copies``
    or ``split``.

    Samples are bytes for ``"recordio"``, ``"tfrecord"`` and ``"lines"`` (without the line break), and for ``"tar"`` dicts of
    the member files of one key, with ``__key__``.

    ``state_dict()`` says how many samples were delivered. A reader that gets this state in a later run passes over the earlier
    epochs, and skips the samples; as the order of an epoch follows only from the channel's seed, it continues exactly.

    ``pipeline()`` makes the samples the source of a ``Loader``, which decodes, shuffles and batches them.

    TensorFlow's ``TFRecordDataset`` cannot read a FIFO, because it reads at offsets; ``tf.data.Dataset.from_generator`` on a
    reader of ``"tfrecord"`` replaces it.

    Args:
        channel: Name of the channel.
        format: Format of the stream.
        copy: Number of the pipe of a channel with ``copies`` or ``split``; None takes ``LOCAL_RANK``, or 0.
        base: Base directory of the run; None takes ``SAGEMAKER_BASE_DIR``, or ``/opt/ml``.
        wait_s_max: Longest time to wait for the pipe of an epoch, in seconds.

    Attributes:
        epoch: The epoch that the next iteration reads, or the current one reads, from 0.

    Raises:
        ConfigError: The run has no such channel, it is not in Pipe mode, or an argument is not valid.
    """

    def __init__(
        self,
        channel: str,
        *,
        format: PipeFormat = "recordio",  # noqa: A002 - the name that users expect
        copy: int | None = None,
        base: str | os.PathLike[str] | None = None,
        wait_s_max: float = 120.0,
    ) -> None:
        if format not in PIPE_FORMATS:
            raise ConfigError(f"format={format!r} must be one of {', '.join(map(repr, PIPE_FORMATS))}")
        if copy is not None:
            check_whole("copy", copy, 0)
        check_number("wait_s_max", wait_s_max, 0)
        folder = Path(os.environ.get("SAGEMAKER_BASE_DIR", _DEFAULT_BASE) if base is None else base)
        self._channel = channel
        self._format = format
        self._pipe = _pipe_of(folder, channel, copy)
        self._path = folder / "input" / "data" / self._pipe
        self._seed = _seed_of(folder, self._pipe)
        self._wait_s_max = wait_s_max
        self._delivered_count = 0
        self._skipped_count = 0
        self._next_fifo = 0
        self._current: PipeEpoch | None = None
        self.epoch = 0

    @property
    def name(self) -> str:
        """Name of the pipe, ``pipe:train``; in a pipeline, the samples have it as their ``__shard__``."""
        return f"pipe:{self._pipe}"

    @property
    def identity(self) -> str:
        """Everything on which the samples and their order depend: the pipe, its format, and the seed of the channel."""
        return f"{self.name} format={self._format} seed={self._seed}"

    def __repr__(self) -> str:
        return f"PipeReader({self._channel!r}, format={self._format!r})"

    def pipeline(self) -> Pipeline:
        """Return a pipeline over the samples: ``PipeReader("train", format="tar").pipeline().decode(...).batch(32)``.

        Its ``Loader`` reads an epoch of the pipe in each of its epochs, in the order of the pipe; ``.shuffle(window)`` permutes
        the samples within runs of ``window`` samples. The state of the ``Loader`` continues inside an epoch, in a new run with
        the same seed: the samples before it are read and passed over, and are not decoded.

        The fields are ``record`` for ``"recordio"`` and ``"tfrecord"``, ``line`` for ``"lines"``, and the members of a sample
        for ``"tar"``. The samples cannot be counted, so the ``Loader`` has no length. It reads in one process, as the only
        rank, and decodes in threads; ``mix``, ``join`` of its samples, ``peek``, ``explain`` and random access are refused.
        """
        return Pipeline(Sequential(self))

    def __iter__(self) -> Iterator[Any]:
        self.close()
        return self._samples()

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last delivered sample."""
        return {"epoch": self.epoch, "samples": self._delivered_count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of an earlier run; call it before the first iteration.

        Raises:
            ConfigError: The state is not valid, or this reader has passed its epoch.
        """
        epoch, samples = state.get("epoch"), state.get("samples")
        check_whole("epoch", epoch, 0)
        check_whole("samples", samples, 0)
        assert epoch is not None
        assert samples is not None
        self._check_ahead(epoch)
        self.epoch, self._skipped_count, self._delivered_count = epoch, samples, samples

    def open_epoch(self, epoch: int) -> PipeEpoch:
        """Begin an epoch, for a ``Loader``. The epochs before it that were not read are left early.

        Raises:
            ConfigError: The epoch was begun before.
            DeadlineError: The epoch's pipe did not appear in time.
        """
        self.close()
        self._check_ahead(epoch)
        while self._next_fifo < epoch:
            os.close(self._open())
        self.epoch, self._delivered_count, self._skipped_count = epoch, 0, 0
        self._current = PipeEpoch(self._open(), PIPE_FORMATS[self._format], name=str(self._path))
        return self._current

    def close(self) -> None:
        """Leave the current epoch, if it is not over; the next iteration reads the next one. Idempotent."""
        current, self._current = self._current, None
        if current is not None:
            current.close()
            self.epoch += 1
            self._delivered_count = 0

    def _check_ahead(self, epoch: int) -> None:
        if epoch < self._next_fifo:
            raise ConfigError(
                f"epoch {epoch} is over: a pipe gives each epoch once, and the next one is {self._next_fifo}",
                hint="load the state into a new run",
            )

    def _samples(self) -> Iterator[Any]:
        skip, delivered = self._skipped_count, self._delivered_count
        current = self.open_epoch(self.epoch)
        self._delivered_count = delivered
        for value in current.values():
            if skip:
                skip -= 1
                continue
            self._delivered_count += 1
            yield value
            if self._current is not current:
                return  # closed meanwhile
        self.close()

    def _open(self) -> int:
        """Open the FIFO of the next epoch, and wait for it.

        Raises:
            DeadlineError: It did not appear in time.
        """
        path = self._path.with_name(f"{self._path.name}_{self._next_fifo}")
        deadline_s = time.monotonic() + self._wait_s_max
        while True:
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._next_fifo += 1
                return fd
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"{path} did not appear in {self._wait_s_max:g} s", hint="has another process read it?"
                )
            time.sleep(POLL_S)


def _pipe_of(base: Path, channel: str, copy: int | None) -> str:
    """Return the name of the pipe to read.

    Raises:
        ConfigError: There is none.
    """
    file = base / "input" / "config" / "inputdataconfig.json"
    try:
        channels = json.loads(file.read_text())
    except OSError as error:
        hint = "penstock run starts programs with channels"
        raise ConfigError(f"there is no {file}: this program has no channels", hint=hint) from error
    name = channel
    if copy is not None or f"{channel}-0" in channels:
        name = f"{channel}-{int(os.environ.get('LOCAL_RANK', '0')) if copy is None else copy}"
    if name not in channels:
        raise ConfigError(
            f"there is no channel {name!r}", hint=f"the channels are {', '.join(sorted(channels)) or 'none'}"
        )
    mode = channels[name].get("TrainingInputMode")
    if mode != "Pipe":
        raise ConfigError(f"channel {name!r} is in {mode} mode: its data are files", hint="mode=pipe")
    return name


def _seed_of(base: Path, pipe: str) -> int | None:
    """Return the seed that the run has recorded for a pipe; None if it has none, or another program started this one."""
    try:
        seeds = json.loads((base / "input" / "config" / "penstock.json").read_text())["pipe_seeds"]
    except (OSError, ValueError, KeyError):
        return None
    seed: int | None = seeds.get(pipe)
    return seed
