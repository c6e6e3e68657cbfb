"""What packing and converting are alike in: look, plan, save, run, each a step that can be looked at."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from penstock.pack.destination import Destination
    from penstock.pack.plan import Plan
    from penstock.pipeline.sources import ConnectionOptions
    from penstock.store import Store


class Job:
    """One piece of work at one destination. A context manager that closes its stores.

    Attributes:
        destination: Where the shards go.
        made: The plan, once there is one.

    Args:
        connection: To the destination.
    """

    destination: Destination

    def __init__(self, connection: ConnectionOptions) -> None:
        self._connection = connection
        self._stack = ExitStack()
        self._stores: list[Store] = []
        self.made: Plan | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def save(self) -> None:
        """Write the plan down, where it is new; before that, drop what it replaces, and what a killed run was sending."""
        assert self.made is not None
        self.destination.save(self.made)
