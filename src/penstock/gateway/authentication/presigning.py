"""Presigned URLs at the gateway's own endpoint, for handlers that read the source of a transform without a key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.transport import presigned_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.authentication.keys import AccessKey


def presign(
    url: str,
    key: AccessKey,
    *,
    method: str = "GET",
    region: str = "us-east-1",
    service: str = "s3",
    expires_s: int = 3600,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Return `url` with a signature of `key`, which every process that has the key verifies.

    Args:
        url: ``http(s)://host[:port]/path`` of the gateway without a query; the path is percent-encoded.
        key: Key to sign with: the gateway's internal one (``AccessKey.generate``), or a client's.
        method: HTTP method that the URL permits.
        region: Region to sign for; the gateway must accept it.
        service: ``"s3"`` or ``"s3-object-lambda"``.
        expires_s: Seconds for which the URL is valid, from 1 to 604 800.
        query: Further parameters of the query, which the signature covers.
        headers: Headers that must be sent with the request as they are, besides ``Host``.

    Raises:
        ConfigError: `expires_s` is out of bounds, or `url` has a query.
    """
    return presigned_url(
        method,
        url,
        access_key=key.access_key,
        secret_key=key.secret_key,
        region=region,
        service=service,
        now_s=time.time(),
        expires_s=expires_s,
        query=query,
        headers=headers,
    )
