"""Where a store's keys live, as cached entries name it: the same object has the same name through every wrapper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.redaction import stored_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.base import Store
    from penstock.types import Key


def core_of(store: Store) -> Any:
    """The store inside all wrappers."""
    core: Any = store
    while hasattr(core, "inner"):
        core = core.inner
    return core


def scope_of(store: Store, namespace: str) -> tuple[tuple[str, ...], Callable[[Key], str]]:
    """Fields of every identity (namespace, endpoint, bucket), and how a key is named in the identities of its entries.

    ``connect("s3://bucket")`` and ``connect("s3://bucket/train/")`` share entries: the prefix goes before the key. Any other
    store is named by the URL that it gives its keys.
    """
    core = core_of(store)
    endpoint = getattr(core, "endpoint", None)
    if endpoint is not None:
        return (namespace, endpoint.endpoint_url or "aws", endpoint.bucket), endpoint.prefix.__add__
    return (namespace, "", core.describe("")), stored_key if has_queries(core) else str


def has_queries(core: object) -> bool:
    """Whether the store's keys may end with a URL's query."""
    return bool(getattr(core, "keys_have_queries", False))
