"""A webhook in MinIO's dialect as a transform: its response to an event is the result.

Source: the server of MinIO, ``cmd/object-lambda-handlers.go``.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.events import arguments_of, required_headers, seen_request
from penstock.gateway.aws_lambda.forwarded import webhook_head
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.config import AccessPoint, WebhookConfig
    from penstock.gateway.objects import GatewayRequest, ResultWriter, Source
    from penstock.types import ByteRange, ObjectInfo

CONNECTIONS_MAX = 64
CONNECT_S_MAX = 10.0


class WebhookTransform:
    """Calls a webhook, and takes its response; implements ``Transform``.

    Redirects are not followed, and proxies of the environment are not used: the configured address is the only one that is
    called.

    Args:
        access_point: The access point, with a webhook.

    Raises:
        ConfigError: The access point has no webhook, or its URL is not ``http://`` or ``https://``.
    """

    maps_ranges = False

    def __init__(self, access_point: AccessPoint) -> None:
        config = access_point.webhook
        if config is None:
            raise ConfigError(f"the access point {access_point.name!r} has no webhook")
        try:
            url = URL(config.url)
        except ValueError as error:
            raise ConfigError(f"the webhook's URL {config.url!r} is not valid: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"the webhook's URL {config.url!r} must begin with http:// or https://")
        self.name = f"webhook:{url.host}"
        parts = [config.url, access_point.version, sorted(access_point.renamed_suffixes.items())]
        self.identity = f"webhook:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
        self.is_deterministic = access_point.deterministic is not False
        self._access_point = access_point
        self._config: WebhookConfig = config
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Do nothing: a webhook may come up after the gateway."""

    def arguments(self, request: GatewayRequest) -> Mapping[str, str]:
        """Return the query, the caller and the headers that the webhook gets, and the bucket, which is in the event's URL."""
        return arguments_of(request, self._config.varies_by, epoch=self._access_point.epoch) | {
            "bucket": request.bucket
        }

    async def size_bytes(self, source: ObjectInfo, arguments: Mapping[str, str]) -> int | None:
        """Return None: only the webhook knows."""
        return None

    async def run(
        self,
        source: Source,
        request: GatewayRequest,
        arguments: Mapping[str, str],
        output: ResultWriter,
        span: ByteRange | None = None,
    ) -> None:
        """Call the webhook and take its response.

        Raises:
            S3Error: The webhook cannot be reached, takes too long, answers with an error, or does not follow the dialect.
        """
        event = webhook_event(source, seen_request(request, self._config.varies_by))
        headers = {"Accept-Encoding": "identity"}
        if authorization := authorization_of(self._config.token):
            headers["Authorization"] = authorization
        try:
            call = self._opened().post(self._url, json=event, headers=headers, allow_redirects=False)
            async with call as response:
                await _take(response, event["getObjectContext"], output)
        except TimeoutError as error:
            raise S3Error("LambdaTimeout", f"The webhook took longer than {self._config.time_s_max:g} s.") from error
        except aiohttp.ClientPayloadError as error:
            raise S3Error("LambdaInvalidResponse", "The webhook's response ended early.") from error
        except aiohttp.ClientError as error:
            raise S3Error("LambdaInvocationFailed", "The webhook cannot be reached.") from error

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=self._config.time_s_max, sock_connect=CONNECT_S_MAX)
            connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=limit, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def webhook_event(source: Source, request: GatewayRequest) -> dict[str, dict[str, object]]:
    """Return the event in MinIO's form for a GET, of which `request` has only what ``seen_request`` leaves."""
    url = URL.build(path=f"/{request.bucket}/{request.key}", query=sorted(request.query.items()))
    return {
        "protocolVersion": "",  # type: ignore[dict-item]
        "getObjectContext": {
            "outputRoute": secrets.token_hex(8),
            "outputToken": secrets.token_hex(32),
            "inputS3Url": source.signed_url(required_headers(request)),
        },
        "userIdentity": {
            "type": "IAMUser",
            "principalId": request.caller.access_key,
            "accessKeyId": request.caller.access_key,
        },
        "userRequest": {
            "url": str(url),
            "headers": {name: [value] for name, value in request.headers.items()},
        },
    }


async def _take(response: aiohttp.ClientResponse, context: Mapping[str, object], output: ResultWriter) -> None:
    """Copy a response into the result."""
    head = webhook_head(response.headers, status=response.status)
    if response.headers.get("x-amz-request-route") != context["outputRoute"]:
        raise S3Error("InvalidRequest", "The webhook's response does not repeat the request route of the event.")
    token = response.headers.get("x-amz-request-token", "").encode("utf-8", "surrogateescape")
    if not secrets.compare_digest(token, str(context["outputToken"]).encode()):
        raise S3Error(
            "InvalidTokenId", "The webhook's response does not repeat the request token of the event.", status=403
        )
    if head.is_error:
        raise head.error()
    if head.status != 200:
        message = f"The webhook answered a request for the whole object with status {head.status}."
        raise S3Error("LambdaInvalidResponse", message)
    is_chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    if head.size_bytes is None and not is_chunked:
        message = "The webhook's response has neither a length nor chunks, so its end cannot be recognized."
        raise S3Error("LambdaInvalidResponse", message)
    output.begin(head.headers, size_bytes=None if is_chunked else head.size_bytes)
    async for piece in response.content.iter_any():
        await output.write(piece)


def authorization_of(token: str) -> str:
    """Return the header's value for a token: ``Bearer TOKEN``, or the token itself if it has two words; empty for none."""
    return token if not token or len(token.split()) == 2 else f"Bearer {token}"
