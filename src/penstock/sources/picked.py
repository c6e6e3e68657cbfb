"""``PickedReader``: the samples of indexed shards that a pipeline picks by number, in the order in which it names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.sources.indexed_reader import IndexedReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.fetch import PlanItem
    from penstock.index import Lookup
    from penstock.sources.readers import NumberedSample, SampleStream


class PickedReader:
    """A ``SampleReader`` over some samples of shards. Its numbers count what was picked.

    Args:
        known: The shards and their index.
        numbers: Numbers of the samples in all shards together; a number may occur more than once.
        fields: Members to read; None: all.

    Raises:
        ConfigError: A number is out of range, or the format of the shards does not allow reading from the middle.
    """

    def __init__(self, known: Lookup, numbers: Sequence[int], *, fields: frozenset[str] | None) -> None:
        self._reader = IndexedReader(known, fields=fields)
        self._numbers = np.array(numbers, np.int64)
        self._listed = [f"{each.shard.url}\n{each.if_match}" for each in known.shards]
        self.store = self._reader.store
        lowest, highest = int(self._numbers.min()), int(self._numbers.max())
        if lowest < 0 or highest >= len(self._reader):
            raise ConfigError(f"pick() names samples {lowest} to {highest} of {len(self._reader)}")

    def __len__(self) -> int:
        return len(self._numbers)

    def read_batch(self, numbers: Sequence[int]) -> Iterator[NumberedSample]:
        """Read some samples, in the order that is fastest to read; none of them twice."""
        return self._reader.read_batch(self._numbers[list(numbers)].tolist())

    def stream(self, numbers: Iterable[int], *, threads_count: int | None = None) -> SampleStream:
        """Return a stream of samples in the order of `numbers`."""
        return self._reader.stream((int(self._numbers[number]) for number in numbers), threads_count=threads_count)

    def requests(self, number: int) -> Sequence[PlanItem]:
        """Return what a stream requests for a sample."""
        return self._reader.requests(int(self._numbers[number]))

    def iter_keys(self) -> Iterator[str]:
        """Iterate over what identifies the samples: the versions of their shards, and their numbers."""
        yield from self._listed
        yield from map(str, self._numbers.tolist())

    def find(self, key: str) -> int | None:
        """Return None: samples that were picked are not looked up by key."""
        del key
        return None

    def close(self) -> None:
        """Close the stores; idempotent."""
        self._reader.close()
