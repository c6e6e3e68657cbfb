"""``Batching``: the size of the batches that a pipeline asks for, and where they end."""

from __future__ import annotations

from typing import NamedTuple


class Batching(NamedTuple):
    """The batches that a pipeline asks for.

    Attributes:
        global_size: Number of samples in a batch of all ranks together, at least 1.
        drop_last: Whether an incomplete last batch is left out.
        take_count: Largest number of samples of an epoch; None takes all of them.
    """

    global_size: int
    drop_last: bool
    take_count: int | None
