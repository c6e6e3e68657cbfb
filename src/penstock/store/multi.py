"""``MultiStore``: several stores as one, so that objects in many prefixes or buckets are read ahead as one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.store.base import Store
from penstock.types import Get, Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.types import Key, Operation, Sink, Transfer


class MultiStore(Store):
    """Reads several stores; a key is the number of its store, a slash, and the key there.

    Reading stores one after the other waits for a first byte at each change of store. With two prefixes in random order that
    is every other object: 60 objects a second at 30 ms, instead of 2 700.

    Args:
        stores: At least one store; the first one's ``fetch_config`` holds for all. Closing the ``MultiStore`` closes them.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.fetch_config = self.stores[0].fetch_config

    def __repr__(self) -> str:
        return f"MultiStore({', '.join(map(repr, self.stores))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiStore, (self.stores,)

    def add(self, store: Store) -> None:
        """Add a store, which gets the next number. Other threads may use those that are there."""
        self.stores = (*self.stores, store)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start a ``Get`` or ``Head`` in the store that the key names; see ``Store.submit``.

        Raises:
            ConfigError: `operation` is of another kind.
        """
        if not isinstance(operation, Get | Head):
            raise ConfigError(
                f"{type(operation).__name__} is not supported by several stores together, which can only be read"
            )
        number, _, key = operation.key.partition("/")
        return self.stores[int(number)].submit(type(operation)(key, *operation[1:]), sink)

    def describe(self, key: Key) -> str:
        """Return the URL of `key` in the store that it names."""
        number, _, key = key.partition("/")
        return self.stores[int(number)].describe(key)

    def close(self) -> None:
        """Close all; idempotent."""
        for store in self.stores:
            store.close()
