"""Cross-origin requests of web pages (CORS): which origins may read, and what their browsers may send. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*\Z")
_EXPOSED = "ETag, Content-Range, Accept-Ranges, x-amz-request-id, x-amz-id-2, x-amz-mp-parts-count"
_AGE_S_MAX = 3000


def cors_headers(headers: Mapping[str, str], origins: tuple[str, ...]) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin read the answer; empty if there is no such page.

    Args:
        headers: Headers of the request.
        origins: Allowed origins, e.g. ``https://example.org``; ``*`` allows all.
    """
    origin = headers.get("Origin")
    if origin is None or not _is_allowed(origin, origins):
        return {}
    return {
        "Access-Control-Allow-Origin": "*" if "*" in origins else origin,
        "Access-Control-Expose-Headers": _EXPOSED,
        "Vary": "Origin, Access-Control-Request-Headers, Access-Control-Request-Method",
    }


def preflight_headers(headers: Mapping[str, str], origins: tuple[str, ...]) -> dict[str, str]:
    """Return the headers of the answer to a preflight request.

    Raises:
        S3Error: The request is not a preflight request, or the origin, the method or a header is not allowed.
    """
    method = headers.get("Access-Control-Request-Method")
    if "Origin" not in headers or method is None:
        raise S3Error("BadRequest", "Insufficient information. Origin request header needed.")
    found = cors_headers(headers, origins)
    wanted = headers.get("Access-Control-Request-Headers", "").strip()
    if not found or method not in _METHODS or (wanted and not _FIELD_NAMES.match(wanted)):
        raise S3Error("AccessForbidden", "CORSResponse: This CORS request is not allowed by this gateway.")
    found["Access-Control-Allow-Methods"] = ", ".join(_METHODS)
    if wanted:
        found["Access-Control-Allow-Headers"] = wanted
    found["Access-Control-Max-Age"] = str(_AGE_S_MAX)
    return found


def refuse_foreign_pages(method: str, headers: Mapping[str, str], origins: tuple[str, ...]) -> None:
    """Refuse a request that a page of another origin sends to change something.

    Browsers send some requests without asking first, and the answer comes too late to prevent them. This matters for a gateway
    on loopback that needs no key.

    Raises:
        S3Error: The origin is not allowed.
    """
    origin = headers.get("Origin")
    if origin is not None and method not in ("GET", "HEAD", "OPTIONS") and not _is_allowed(origin, origins):
        raise S3Error("AccessDenied", "Pages of this origin must not change objects.")


def _is_allowed(origin: str, origins: tuple[str, ...]) -> bool:
    return "*" in origins or origin in origins
