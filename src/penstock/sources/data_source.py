"""``DataSource``: one source of a pipeline, and what an index knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.index import IndexPlace, ShardRow
    from penstock.pipeline import SequentialReader
    from penstock.sources.readers import SampleReader
    from penstock.sources.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One source of a pipeline.

    Attributes:
        shards: Shards, or objects, in an order that their URLs fix.
        rows: Rows of an index, one for each shard; empty unless an index knows all shards.
        place: Place of this index; None if there is no index, and for objects.
        objects: Samples that are objects of their own and need no index; None for shards.
        indexed_count: Number of shards that an index knows.
        outdated_count: Number of shards that an index knows in another version only.
        reader: Gives the samples of a source that cannot be listed; None for shards and objects.
    """

    shards: Sequence[Shard]
    rows: Sequence[ShardRow] = ()
    place: IndexPlace | None = None
    objects: SampleReader | None = None
    indexed_count: int = 0
    outdated_count: int = 0
    reader: SequentialReader | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether the number of samples is known without reading them."""
        return self.objects is not None or (self.reader is None and self.indexed_count == len(self.shards))

    @property
    def counts(self) -> Sequence[int]:
        """Number of samples in each shard; an object is one sample."""
        return [1] * len(self.objects) if self.objects is not None else [row.samples_count for row in self.rows]

    @property
    def samples_count(self) -> int:
        """Number of samples that are known so far."""
        return len(self.objects) if self.objects is not None else sum(row.samples_count for row in self.rows)

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample as stored, in bytes; 0 for objects."""
        return sum(row.size_bytes for row in self.rows) / max(1, self.samples_count)
