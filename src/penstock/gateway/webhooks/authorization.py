"""The ``Authorization`` header of MinIO's webhooks."""

from __future__ import annotations

import hmac

TOKEN_WORDS = 2


def authorization_of(token: str) -> str:
    """Return the header's value for a token: ``Bearer TOKEN``, or the token itself if it has two words; empty for none."""
    return token if not token or len(token.split()) == TOKEN_WORDS else f"Bearer {token}"


def is_authorized(header: str, token: str) -> bool:
    """Whether a header contains the token, compared in constant time; always False if `token` is empty."""
    expected = authorization_of(token).encode("utf-8", "surrogateescape")
    return bool(token) and hmac.compare_digest(header.encode("utf-8", "surrogateescape"), expected)
