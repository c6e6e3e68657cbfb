"""``POST /-/webhook/NAME``: the gateway's own transforms, served as webhooks for MinIO, RustFS and others."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from penstock.errors import PenstockError
from penstock.gateway.aws_lambda.events import is_for_handler
from penstock.gateway.objects import Caller, GatewayRequest, S3Error
from penstock.gateway.webhooks.authorization import is_authorized
from penstock.gateway.webhooks.streamed_result import StreamedResult
from penstock.gateway.webhooks.url_source import UrlSource, allowed_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.config import AccessPoint, WebhookServiceConfig
    from penstock.gateway.objects import Transform

PREFIX = "/-/webhook/"
EVENT_BYTES_MAX = 1 << 20
CALLS_MAX = 256
IDLE_S_MAX = 60.0
LOG = logging.getLogger("penstock.gateway.webhooks")


class ServedTransform(NamedTuple):
    """A transform that is served as a webhook."""

    access_point: AccessPoint
    transform: Transform


class WebhookEvent(NamedTuple):
    """The parts of an event that the service uses."""

    route: str
    token: str
    input_url: str
    request: GatewayRequest


class WebhookService:
    """Answers events of other servers with results of this gateway's transforms, which it streams and does not keep.

    Args:
        config: Token, and hosts from which sources may be read.
        transforms: The transforms by name of their access points.
    """

    def __init__(self, config: WebhookServiceConfig, *, transforms: Mapping[str, ServedTransform]) -> None:
        self._config = config
        self._transforms = dict(transforms)
        self._calls = 0
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one event. A HEAD, by which MinIO asks whether the webhook is alive, needs no token."""
        if request.method == "HEAD":
            return web.Response()
        result: StreamedResult | None = None
        self._calls += 1
        try:
            served = self._checked(request)
            event = await _event_of(request, served.access_point.name)
            result = StreamedResult(
                request,
                route=event.route,
                token=event.token,
                output_bytes_max=served.access_point.output_bytes_max,
            )
            url = allowed_url(event.input_url, self._config.source_hosts)
            async with asyncio.timeout(served.access_point.time_s_max):
                await self._run(served.transform, url, event.request, result)
            return await result.finish()
        except TimeoutError:
            refusal = S3Error("LambdaTimeout", "The transformation took too long.", status=400)
        except S3Error as error:
            refusal = error
        except PenstockError as error:
            LOG.warning("%s %s", request.path, error)
            refusal = S3Error("InternalError", "The transformation failed.", status=500)
        except aiohttp.ClientError as error:
            LOG.warning("%s The source cannot be read: %s", request.path, type(error).__name__)
            refusal = S3Error("InvalidRequest", "The source at inputS3Url cannot be read.", status=400)
        finally:
            self._calls -= 1
        if result is None:
            return web.Response(status=refusal.status, text=refusal.message)
        return result.refuse(refusal)

    async def close(self) -> None:
        """Close the connections to the servers of sources; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _checked(self, request: web.BaseRequest) -> ServedTransform:
        """Return the transform that an authorized request names."""
        if not is_authorized(request.headers.get("Authorization", ""), self._config.token):
            raise S3Error("AccessDenied", "The header Authorization is missing or wrong.", status=403)
        served = self._transforms.get(request.path.removeprefix(PREFIX))
        if served is None:
            raise S3Error("NoSuchWebhook", "No access point with a transform has this name.", status=404)
        if request.method != "POST":
            raise S3Error("MethodNotAllowed", "Webhooks take POST and HEAD.", status=405)
        if self._calls > CALLS_MAX:
            raise S3Error("SlowDown", f"{CALLS_MAX} calls are being answered.", status=503)
        return served

    async def _run(self, transform: Transform, url: URL, request: GatewayRequest, result: StreamedResult) -> None:
        if self._session is None:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=IDLE_S_MAX)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(timeout=limit, auto_decompress=False, cookie_jar=jar)
        source = UrlSource(self._session, url, key=request.key)
        await source.open(size_bytes_max=self._config.source_bytes_max)
        await transform.run(source, request, transform.arguments(request), result)


async def _event_of(request: web.BaseRequest, bucket: str) -> WebhookEvent:
    """Parse the event in a request's body. Raises ``S3Error`` if it is malformed or too long."""
    refusal = S3Error("InvalidRequest", "The body is not an event of an object lambda.", status=400)
    body = b""
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > EVENT_BYTES_MAX:
            raise S3Error("EntityTooLarge", f"The event has more than {EVENT_BYTES_MAX} bytes.", status=413)
    try:
        event = json.loads(body)
        context, user = event["getObjectContext"], event.get("userRequest") or {}
        route, token, input_url = context["outputRoute"], context["outputToken"], context["inputS3Url"]
        texts = (route, token, input_url, user.get("url", ""))
        if not all(isinstance(text, str) for text in texts) or not _is_line(route + token):
            raise refusal
        return WebhookEvent(route, token, input_url, _request_of(request, bucket, input_url, user, event))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refusal from error


def _request_of(request: web.BaseRequest, bucket: str, input_url: str, user: Any, event: Any) -> GatewayRequest:
    """Return the request of the other server's client, with what the event says about it."""
    url = URL(user.get("url", ""))
    headers: CIMultiDict[str] = CIMultiDict()
    for name, values in (user.get("headers") or {}).items():
        headers[str(name)] = ",".join(map(str, values)) if isinstance(values, list) else str(values)
    caller = str((event.get("userIdentity") or {}).get("accessKeyId", ""))
    return GatewayRequest(
        method="GET",
        bucket=bucket,
        key=URL(input_url, encoded=True).path.removeprefix("/").partition("/")[2],
        query={name: value for name, value in url.query.items() if is_for_handler(name)},
        headers=headers,
        caller=Caller(caller, False),
        url=f"{URL(input_url, encoded=True).origin()}{url.raw_path}",
        remote=request.remote or "",
        request_id=str(event.get("xAmzRequestId", "")) or "webhook",
    )


def _is_line(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()
