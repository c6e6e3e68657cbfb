"""The internal endpoint of one process, on a loopback port of its own: sources by signed URLs, and ``WriteGetObjectResponse``.

Handlers and transforms in other processes read their source here, by URLs that this gateway's internal key has signed for one
object and a limited time. The upstream's keys stay in this process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.compose import split
from penstock.errors import ConfigError
from penstock.gateway.authentication.keys import AccessKeys
from penstock.gateway.authentication.presigning import presign
from penstock.gateway.authentication.verifying import SignatureAuthenticator
from penstock.gateway.aws_lambda import PATH, InternalEndpoint, WriteGetObjectResponse
from penstock.gateway.config import GatewayLimits
from penstock.gateway.http.front import Front
from penstock.gateway.serving.listening import listen
from penstock.gateway.serving.tables import AccessPointTable
from penstock.store.presigning import presigned_get
from penstock.store.s3_requests import encoded_key

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from penstock.gateway.authentication.keys import AccessKey
    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import Bucket, ObjectHead
    from penstock.store.base import Store

_GRACE_S = 60
_EXPIRES_S_MAX = 7 * 86400
_STALL_S_MAX = 86400.0


class InternalFront:
    """The internal endpoint. Its port is open from the beginning, so that URLs can be made before it answers.

    Args:
        key: The key that signs and verifies URLs; all processes of a gateway share it.

    Attributes:
        endpoint: Port and keys of this endpoint, for handlers.
    """

    def __init__(self, key: AccessKey) -> None:
        self._key = key
        self._socket: socket.socket = listen("127.0.0.1", 0, count=1)[0]
        self.port = int(self._socket.getsockname()[1])
        self.endpoint = InternalEndpoint(self.port)
        self._front: Front | None = None

    async def start(self, sources: Mapping[str, Bucket]) -> None:
        """Answer requests.

        Args:
            sources: Buckets with the untransformed objects, by the names of the access points.
        """
        # A handler may work for as long as it is allowed to before it goes on reading.
        limits = GatewayLimits(stall_s_max=_STALL_S_MAX, bytes_per_s_min=0)
        self._front = Front(
            AccessPointTable(sources),
            SignatureAuthenticator(AccessKeys([self._key])),
            limits=limits,
            extra_routes={PATH: WriteGetObjectResponse(self.endpoint)},
        )
        await self._front.start([self._socket])

    def sign(
        self, method: str, name: str, *, query: Mapping[str, str], headers: Mapping[str, str], expires_s: int
    ) -> str:
        """Return a signed URL of this endpoint.

        Args:
            method: HTTP method that the URL permits.
            name: Name of the access point, or the name, a slash and a key.
            query: Parameters of the query, which the signature covers.
            headers: Headers that must be sent with the request.
            expires_s: Seconds for which it is valid.
        """
        url = f"http://127.0.0.1:{self.port}/{encoded_key(name)}"
        return presign(url, self._key, method=method, expires_s=expires_s, query=query, headers=headers)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._front is not None:
            await self._front.close()
        self._socket.close()


class InternalLinks:
    """How other processes reach the sources of one access point. Implements ``SourceLinks``.

    Args:
        point: The access point.
        store: Store of the sources.
        internal: The internal endpoint of this process.
    """

    def __init__(self, point: AccessPoint, store: Store, *, internal: InternalFront) -> None:
        self._name = point.name
        self._path = point.upstream if "://" not in point.upstream else ""
        self._is_s3 = point.upstream.startswith("s3://")
        self._store = store
        self._internal = internal
        reader = point.handler or point.webhook or point
        self._expires_s = min(math.ceil(reader.time_s_max) + _GRACE_S, _EXPIRES_S_MAX)

    def worker_url(self, key: str, head: ObjectHead) -> tuple[str, str]:
        """Return the path of a directory, a URL that the upstream's keys signed, or one at the internal endpoint."""
        if self._path:
            return self._path, key
        if self._is_s3:
            try:
                return split(presigned_get(self._store, key, expires_s=self._expires_s))
            except ConfigError:  # objects encrypted with a customer's key cannot be read by a URL alone
                pass
        return split(self.signed_url(key, head, {}))

    def signed_url(self, key: str, head: ObjectHead, headers: Mapping[str, str]) -> str:
        """Return a URL at the internal endpoint."""
        del head
        return self.sign("GET", key, query={}, headers=headers)

    def sign(self, method: str, key: str, *, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        """Return a URL of an object, or with an empty key of the bucket, at the internal endpoint."""
        name = f"{self._name}/{key}" if key else self._name
        return self._internal.sign(method, name, query=query, headers=headers, expires_s=self._expires_s)
