"""Presigned URLs of objects in S3: whoever has one can read the object for a limited time, without keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.store.base import Store, innermost
from penstock.store.s3 import S3Store
from penstock.store.s3_requests import encoded_key
from penstock.transport import presigned_url

if TYPE_CHECKING:
    from penstock.types import Key


def presigned_get(store: Store, key: Key, *, expires_s: int = 3600) -> str:
    """Return a URL with which anybody can read one object, by any number of requests, whole or by ranges.

    ``split`` and ``connect`` of ``penstock.compose`` take the URL apart and read it: the key keeps the query. The URL ends
    sooner than `expires_s` if the store's keys are temporary and expire.

    Args:
        store: Store of the object, with or without its wrappers; the innermost one must be an ``S3Store``.
        key: Key of the object.
        expires_s: Seconds for which the URL is valid, from 1 to 604 800.

    Returns:
        The URL, which is a secret. If the store is anonymous, the URL is not signed.

    Raises:
        ConfigError: The store is not S3, has objects that are encrypted with a customer's key (every request would have to
            carry that key), or `key` or `expires_s` is not valid.
        CredentialsError: No keys were found.

    Cost: no request; if the keys are not known yet, it waits until they are found.
    """
    core = innermost(store)
    if not isinstance(core, S3Store):
        raise ConfigError(f"{type(core).__name__} has no presigned URLs; only S3 has")
    if core.options.sse_customer_key is not None:
        raise ConfigError("objects that are encrypted with a customer's key (SSE-C) cannot be read by a URL alone",
                          hint="every request must carry the key; read them with the store itself")  # fmt: skip
    endpoint = core.endpoint
    if not endpoint.bucket:
        raise ConfigError("a presigned URL names one object, and this store has no bucket")
    url = endpoint.base_url + encoded_key(endpoint.prefix + key)
    query = {
        name.lower(): value for name, value in (line.split(": ", 1) for line in core.options.headers())
    }  # S3 takes its own headers from the query, too
    if core.provider is None:
        return url + ("?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else "")
    credentials = core.provider.now() or core.provider.resolve()
    return presigned_url(
        "GET",
        url,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        session_token=credentials.session_token,
        region=endpoint.region,
        service=endpoint.service,
        now_s=time.time() + endpoint.clock_offset_s,
        expires_s=expires_s,
        query=query,
    )
