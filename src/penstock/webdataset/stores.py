"""Stores for URLs: the options of the connection, and one store for each bucket."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import penstock.store.hedged
import penstock.store.limited
import penstock.store.retrying
import penstock.store.s3
import penstock.store.traced
import penstock.transport.engine  # noqa: F401 - workers that are forked would each spend 0.2 s on importing what reads S3
from penstock.compose import check_connect_options, connect, split
from penstock.config import FetchConfig, default_budget_bytes, share_machine
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.store import Store

STORES_MAX = 64
"""Buckets whose stores are kept, with what they know of regions and credentials; the one that was added first goes first."""

WORKER_REQUESTS_MIN = 2
"""Parts of 8 MiB in flight at first in a DataLoader worker: several workers read at the same time, and the samples of the first
shard should not wait for those of the next ones. More are in flight as soon as a worker waits for data and that pays."""


class ShardStores:
    """The stores in which shards lie, one for each bucket. It pickles as its options.

    Args:
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: An option does not exist.
    """

    def __init__(self, **options: Any) -> None:
        check_connect_options("register", options)
        self.options = options
        self._stores: dict[str, Store] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_with, (self.options,)

    def with_options(self, options: dict[str, Any]) -> ShardStores:
        """Return stores with more options, or with others in place of these."""
        return ShardStores(**(self.options | options)) if options else self

    def locate(self, url: str) -> tuple[Store, str]:
        """Return the store of the bucket that a URL names, and the key in it.

        Args:
            url: ``s3://bucket/key``, or the same after ``penstock+``.

        Raises:
            ConfigError: The URL names no object, or an option is not valid.
        """
        root, key = split(url.removeprefix("penstock+"))
        if not key or key.endswith("/"):
            raise ConfigError(f"{url!r} does not name an object", hint="s3://bucket/train-{000000..000099}.tar")
        store = self._stores.get(root)
        if store is None:
            while len(self._stores) >= STORES_MAX:
                del self._stores[next(iter(self._stores))]
            store = self._stores[root] = connect(root, **{"fetch": _fetch_here(), **self.options})
        return store, key


def _fetch_here() -> FetchConfig | None:
    """How a DataLoader worker reads: with its share of the machine's cores and of the bytes that a process may hold."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    if worker is None:
        return None
    share_machine(worker.num_workers)
    return FetchConfig(budget_bytes_max=default_budget_bytes() // worker.num_workers, requests_min=WORKER_REQUESTS_MIN)


def _made_with(options: dict[str, Any]) -> ShardStores:
    return ShardStores(**options)


_default = ShardStores()


def default_stores() -> ShardStores:
    """Return the stores of URLs that are opened without options."""
    return _default


def set_default_stores(stores: ShardStores) -> None:
    """Set the stores of URLs that are opened without options."""
    global _default
    _default = stores
