"""``SequentialLaneReader``: the samples of a lane that a reader gives from the first to the last, as it does for a pipe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.formats import as_columns
from penstock.loader.lanes.segments import ParsedSamples

if TYPE_CHECKING:
    from penstock.loader.lanes.segments import ReadOptions
    from penstock.pipeline import SequentialReader


@dataclass(frozen=True, slots=True)
class ReaderSegment:
    """All samples of an epoch of a reader; a ``LaneSegment``."""

    url: str
    source: int = 0
    index: int = 0
    format: str | None = None
    etag: str | None = None


class SequentialLaneReader:
    """Reads the samples of one epoch, and passes over the first of them; a ``PieceReader``.

    Args:
        reader: Gives the samples.
        epoch: Epoch number, from 0.
        skip_count: Number of samples to pass over.
        reading: How lanes read.

    Raises:
        ConfigError: The reader has begun this epoch before.
    """

    def __init__(self, reader: SequentialReader, *, epoch: int, skip_count: int, reading: ReadOptions) -> None:
        self._segment = ReaderSegment(reader.name)
        self._skip_count = skip_count
        self._read_count = 0
        self._reading = reading
        self._epoch = reader.open_epoch(epoch)

    def read(self) -> list[ParsedSamples] | None:
        """The samples that arrive next, perhaps none; None at the end. Blocks for them.

        Raises:
            DataError: They are not of the reader's format.
        """
        meter, began_s = self._reading.meter, time.perf_counter()
        samples = self._epoch.read()
        meter.store_s += time.perf_counter() - began_s
        if samples is None:
            return None
        first = self._read_count
        self._read_count += len(samples)
        if first < self._skip_count:
            samples = samples[self._skip_count - first :]
            first = self._skip_count
        if not samples:
            return []
        size_bytes = sum(value.nbytes for sample in samples for value in sample.fields.values())
        meter.bytes += size_bytes
        columns = as_columns(samples) if self._reading.copies else None
        if columns is not None:
            return [ParsedSamples(columns, self._segment, first, 0)]
        return [ParsedSamples(samples, self._segment, first, size_bytes)]

    def close(self) -> None:
        """Leave the epoch; from any thread, idempotent."""
        self._epoch.close()
