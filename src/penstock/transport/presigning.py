"""AWS Signature Version 4 in a query: URLs that anybody can use for a limited time. Pure: no clock, no socket.

Source: Amazon S3 API reference, "Authenticating requests: using query parameters".
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.errors import ConfigError
from penstock.transport.signing import signing_key

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPIRES_S_MAX = 7 * 24 * 3600
"""Longest life of a presigned URL in seconds; S3 refuses more."""

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"


def presigned_url(
    method: str,
    url: str,
    *,
    access_key: str,
    secret_key: str,
    session_token: str | None = None,
    region: str,
    service: str = "s3",
    now_s: float,
    expires_s: int,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Return `url` with a signature in its query.

    Args:
        method: HTTP method that the URL permits.
        url: ``http(s)://host/path`` without a query; the path is percent-encoded as S3 does.
        access_key: ID of the access key.
        secret_key: Secret key.
        session_token: Session token of temporary keys; None for permanent ones.
        region: Region to sign for.
        service: ``"s3"`` or ``"s3-object-lambda"``.
        now_s: Time from which the URL is valid, in seconds since 1970.
        expires_s: Seconds for which the URL is valid, from 1 to 604 800.
        query: Further parameters of the query, which the signature covers.
        headers: Headers that must be sent with the request as they are, besides ``Host``.

    Raises:
        ConfigError: `expires_s` is out of bounds, or `url` has a query.
    """
    if not 1 <= expires_s <= EXPIRES_S_MAX:
        raise ConfigError(f"expires_s={expires_s} must be from 1 to {EXPIRES_S_MAX} seconds (7 days)")
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if scheme not in ("http", "https") or not host or "?" in url or "#" in url:
        raise ConfigError("a URL to sign must be http(s)://host/path without a query")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    values = {"host": host} | {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
    names = ";".join(sorted(values))
    parameters = dict(query or {}) | {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if session_token is not None:
        parameters["X-Amz-Security-Token"] = session_token
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in parameters.items())
    signed_query = "&".join(f"{name}={value}" for name, value in pairs)
    lines = "".join(f"{name}:{values[name]}\n" for name in sorted(values))
    canonical = f"{method}\n/{path}\n{signed_query}\n{lines}\n{names}\n{UNSIGNED_PAYLOAD}"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = signing_key(secret_key, scope)
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return f"{scheme}://{host}/{path}?{signed_query}&X-Amz-Signature={signature}"
