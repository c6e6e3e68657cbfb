"""``PipeReader``: the samples of a channel in Pipe mode, epoch after epoch, for any program that ``penstock run`` starts."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import check_number, check_whole
from penstock.errors import ConfigError, DeadlineError
from penstock.formats import parser_of
from penstock.formats.parsing import feed_in_pieces
from penstock.formats.tar_joined import ArchiveSplitter
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.formats import Sample

PipeFormat: TypeAlias = Literal["recordio", "tfrecord", "tar", "lines"]

READ_BYTES = 1 << 20
"""Bytes asked for at a time: the largest pipe that users may have."""

POLL_S = 0.005
_DEFAULT_BASE = "/opt/ml"
_RECORDS = {"recordio": "recordio-raw", "tfrecord": "tfrecord-raw"}
_FORMATS = ("recordio", "tfrecord", "tar", "lines")


@boundary
class PipeReader:
    """Samples of a channel in Pipe mode. Each iteration is one epoch, the next iteration the next one.

    One process reads a pipe. Workers and ranks of one host each need a pipe of their own, by the channel's options ``copies``
    or ``split``.

    Samples are bytes for ``"recordio"``, ``"tfrecord"`` and ``"lines"`` (without the line break), and for ``"tar"`` dicts of
    the member files of one key, with ``__key__``.

    ``state_dict()`` says how many samples were delivered. A reader that gets this state in a later run leaves the epochs before
    early, and skips the samples; as the order of an epoch follows from the channel's seed alone, it continues exactly.

    TensorFlow's ``TFRecordDataset`` cannot read a FIFO, because it reads at offsets; ``tf.data.Dataset.from_generator`` on a
    reader of ``"tfrecord"`` takes its place.

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
        if format not in _FORMATS:
            raise ConfigError(f"format={format!r} must be one of {', '.join(map(repr, _FORMATS))}")
        if copy is not None:
            check_whole("copy", copy, 0)
        check_number("wait_s_max", wait_s_max, 0)
        folder = Path(os.environ.get("SAGEMAKER_BASE_DIR", _DEFAULT_BASE) if base is None else base)
        self._format = format
        self._path = folder / "input" / "data" / _pipe_of(folder, channel, copy)
        self._wait_s_max = wait_s_max
        self._delivered_count = 0
        self._skipped_count = 0
        self._next_fifo = 0
        self._fd: int | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.close()
        return self._samples()

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last delivered sample."""
        return {"epoch": self.epoch, "samples": self._delivered_count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of an earlier run; call it before the first iteration.

        Raises:
            ConfigError: The state is not one, or this reader has passed its epoch.
        """
        epoch, samples = state.get("epoch"), state.get("samples")
        check_whole("epoch", epoch, 0)
        check_whole("samples", samples, 0)
        assert epoch is not None
        assert samples is not None
        if epoch < self._next_fifo:
            raise ConfigError(
                f"epoch {epoch} is over: a pipe gives each epoch once, and the next one is {self._next_fifo}",
                hint="load the state into a new run",
            )
        self.epoch, self._skipped_count, self._delivered_count = epoch, samples, samples

    def close(self) -> None:
        """Leave the current epoch, if it is not over; the next iteration reads the next one. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._delivered_count = 0

    def _samples(self) -> Iterator[Any]:
        while self._next_fifo < self.epoch:  # epochs that were read before a restart
            os.close(self._open())
        fd = self._fd = self._open()
        skip, self._skipped_count = self._skipped_count, 0
        for sample in _samples_of(fd, self._format, str(self._path)):
            if skip:
                skip -= 1
                continue
            self._delivered_count += 1
            yield sample
            if self._fd != fd:
                return  # closed meanwhile
        self._fd = None
        os.close(fd)
        self._end_epoch()

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


def _chunks(fd: int) -> Iterator[bytes]:
    while data := os.read(fd, READ_BYTES):
        yield data


def _lines(fd: int) -> Iterator[bytes]:
    rest = b""
    for data in _chunks(fd):
        first, newline, more = data.partition(b"\n")
        if not newline:
            rest += data
            continue
        yield rest + first
        *lines, rest = more.split(b"\n")
        yield from lines
    if rest:
        yield rest


def _records(fd: int, format_name: str, shard: str) -> Iterator[bytes]:
    parser = parser_of(_RECORDS[format_name], shard=shard)
    for data in _chunks(fd):
        for samples in feed_in_pieces(parser, data):
            yield from map(_record_of, samples)
    if parser.offset_bytes:  # an epoch without an object is no shard
        yield from map(_record_of, parser.finish())


def _members(fd: int, shard: str) -> Iterator[dict[str, Any]]:
    splitter = ArchiveSplitter()
    parser = parser_of("tar", shard=shard)
    for data in _chunks(fd):
        for piece, is_end in splitter.feed(data):
            yield from map(_dict_of, parser.feed(piece))
            if is_end:
                yield from map(_dict_of, parser.finish())
                parser = parser_of("tar", shard=shard)
    if held := splitter.finish():
        yield from map(_dict_of, parser.feed(held))
    if parser.offset_bytes:
        yield from map(_dict_of, parser.finish())


def _samples_of(fd: int, format_name: str, shard: str) -> Iterator[Any]:
    if format_name == "lines":
        return _lines(fd)
    return _members(fd, shard) if format_name == "tar" else _records(fd, format_name, shard)


def _record_of(sample: Sample) -> bytes:
    return bytes(sample.fields["record"])


def _dict_of(sample: Sample) -> dict[str, Any]:
    return {"__key__": sample.key, **{name: bytes(value) for name, value in sample.fields.items()}}
