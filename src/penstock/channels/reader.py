"""``PipeReader``: the samples of a channel in Pipe mode, epoch after epoch, for any program that ``penstock run`` starts."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.channels.pipe_epoch import PipeEpoch
from penstock.channels.pipe_formats import PIPE_FORMATS
from penstock.config import check_number, check_whole
from penstock.errors import ConfigError, DeadlineError
from penstock.pipeline import Pipeline, Sequential
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.channels.pipe_formats import PipeFormat

POLL_S = 0.005
_DEFAULT_BASE = "/opt/ml"


@boundary
class PipeReader:
    """Samples of a channel in Pipe mode. Each iteration is one epoch, the next iteration the next one.

    One process reads a pipe. Workers and ranks of one host each need a pipe of their own, by the channel's options ``copies``
    or ``split``.

    Samples are bytes for ``"recordio"``, ``"tfrecord"`` and ``"lines"`` (without the line break), and for ``"tar"`` dicts of
    the member files of one key, with ``__key__``.

    ``state_dict()`` says how many samples were delivered. A reader that gets this state in a later run leaves the epochs before
    early, and skips the samples; as the order of an epoch follows from the channel's seed alone, it continues exactly.

    ``pipeline()`` makes the samples the source of a ``Loader``, which decodes, shuffles and batches them.

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
        """What the samples and their order depend on: the pipe, its format, and the seed of the channel."""
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

    def open_epoch(self, epoch: int) -> PipeEpoch:
        """Begin an epoch, for a ``Loader``. The epochs before it that were not read are left early.

        Raises:
            ConfigError: The epoch was begun before.
            DeadlineError: Its pipe did not appear in time.
        """
        self.close()
        if epoch < self._next_fifo:
            raise ConfigError(
                f"epoch {epoch} is over: a pipe gives each epoch once, and the next one is {self._next_fifo}",
                hint="load the state into a new run",
            )
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
