"""The stores of a file system: one for each bucket or directory, connected to when it is first used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock import forks
from penstock.compose import connect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.base import Store

_NOT_ONLY_S3 = ("transport", "retry", "hedge", "fetch", "cache", "requests_max")
"""Options of ``connect`` that mean something for every store."""


class StoreTable:
    """Stores by URL.

    Args:
        options: Arguments of ``connect``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock; the stores themselves can be used in a forked child."""
        self._lock = threading.Lock()

    def get(self, url: str) -> Store:
        """Return the store of a URL."""
        store = self._stores.get(url)
        if store is None:
            with self._lock:
                store = self._stores.get(url)
                if store is None:
                    store = self._stores[url] = connect(url, **self._options_for(url))
        return store

    def _options_for(self, url: str) -> dict[str, Any]:
        if url.startswith("s3://"):
            return self._options
        return {name: value for name, value in self._options.items() if name in _NOT_ONLY_S3}

    def close(self) -> None:
        """Close all stores; ``get`` connects again. Idempotent."""
        with self._lock:
            stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()
