"""The stores of a run: one for each URL, closed with the run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from penstock import compose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store import Store


class RunStores:
    """The stores of a run, one for each URL. A context manager that closes them. All threads may use it.

    Args:
        options: Options of ``penstock.connect``.

    Attributes:
        options: The same.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._stores.values():
            store.close()

    def open(self, root_url: str) -> Store:
        """Return the store at a URL; each call returns the same one."""
        with self._lock:
            if root_url not in self._stores:
                self._stores[root_url] = compose.connect(root_url, **self.options)
            return self._stores[root_url]
