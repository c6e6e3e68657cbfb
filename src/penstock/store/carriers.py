"""How the requests of a store travel: encrypted, or over plain connections of the process's event loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.store.base import innermost
from penstock.store.http import HttpStore
from penstock.store.s3 import S3Store

if TYPE_CHECKING:
    from penstock.config import TransportConfig
    from penstock.store.base import Store


def is_read_by_tls(store: Store) -> bool:
    """Whether what is read of a store arrives encrypted."""
    return _url_of(innermost(store)).startswith("https:")


def plain_transport_of(store: Store) -> TransportConfig | None:
    """Return the configuration of a store's plain HTTP connections; None for a store that has none, or encrypts them."""
    core = innermost(store)
    return core.transport if isinstance(core, S3Store | HttpStore) and _url_of(core).startswith("http:") else None


def _url_of(core: Store) -> str:
    return str(core.endpoint.base_url if isinstance(core, S3Store) else core.describe(""))
