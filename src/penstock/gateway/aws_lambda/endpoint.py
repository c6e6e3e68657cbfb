"""The address and keys by which handlers reach the gateway process that started them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.authentication import AccessKey, AccessKeys, SignatureAuthenticator
from penstock.gateway.aws_lambda.responses import PendingResponses

if TYPE_CHECKING:
    from collections.abc import Mapping


class InternalEndpoint:
    """Port and keys with which handlers reach the internal endpoint of one gateway process on 127.0.0.1.

    Args:
        port: Port of the internal endpoint on 127.0.0.1.

    Attributes:
        port: Port of the internal endpoint on 127.0.0.1.
        key: Key with which handlers sign ``WriteGetObjectResponse``. It is valid for nothing else.
        responses: Answers that this process expects from its handlers.
        authenticator: Verifies ``WriteGetObjectResponse``.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.key = AccessKey.generate()
        self.responses = PendingResponses()
        self.authenticator = SignatureAuthenticator(AccessKeys([self.key]))

    @property
    def url(self) -> str:
        """URL for clients that put a route in front of the host name; names below localhost must resolve to 127.0.0.1."""
        return f"http://localhost:{self.port}"

    def accept_keys_of(self, environment: Mapping[str, str]) -> None:
        """Accept answers signed with AWS keys of a handler's own environment, which it may need for other services."""
        access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
        if access_key and secret_key:
            key = AccessKey(access_key=access_key, secret_key=secret_key)
            self.authenticator.keys = self.authenticator.keys.with_key(key)
