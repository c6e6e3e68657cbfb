"""The address and keys by which handlers reach the gateway process that started them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from penstock.gateway.aws_lambda.responses import PendingResponses


def _new_access_key() -> str:
    return f"PSK{secrets.token_hex(8).upper()}"


def _new_secret_key() -> str:
    return secrets.token_urlsafe(30)


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalEndpoint:
    """The internal endpoint of one gateway process, which listens on 127.0.0.1.

    Attributes:
        port: Its port.
        access_key: ID of the key with which handlers sign ``WriteGetObjectResponse``. It is valid for nothing else.
        secret_key: Its secret.
        responses: Answers that the handlers of this process owe.
    """

    port: int
    access_key: str = field(default_factory=_new_access_key)
    secret_key: str = field(default_factory=_new_secret_key, repr=False)
    responses: PendingResponses = field(default_factory=PendingResponses, repr=False)

    @property
    def url(self) -> str:
        """URL for clients that put a route in front of the host name; names below localhost must resolve to 127.0.0.1."""
        return f"http://localhost:{self.port}"
