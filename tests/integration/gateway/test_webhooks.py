"""Webhooks in MinIO's dialect: called by the gateway, and served by it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.errors import ConfigError
from penstock.gateway.config import AccessPoint, WebhookConfig, WebhookServiceConfig
from penstock.gateway.objects import S3Error
from penstock.gateway.webhooks import PREFIX, ServedTransform, WebhookService, WebhookTransform
from servers.lambda_endpoint import Endpoint, MemoryResult, endpoint

pytestmark = pytest.mark.server


def calling(server: Endpoint, path: str, **settings: Any) -> WebhookTransform:
    """A transform that calls a path of the test's server."""
    webhook = WebhookConfig(url=f"http://127.0.0.1:{server.port}{path}", **settings)
    return WebhookTransform(AccessPoint(name="ap", upstream="memory://", webhook=webhook))


class Shout:
    """A transform that reads its source and writes it in capitals."""

    name = identity = "shout"
    is_deterministic, maps_ranges = True, False
    failure = ""

    def arguments(self, request: Any) -> Mapping[str, str]:
        return dict(request.query)

    async def start(self) -> None:
        return

    async def size_bytes(self, source: Any, arguments: Any) -> int | None:
        return None

    async def run(self, source: Any, request: Any, arguments: Any, output: Any, span: Any = None) -> None:
        if self.failure == "before":
            raise S3Error("NoSuchKey", "It is not there.", status=404)
        output.begin({"Content-Type": "text/plain", "x-amz-meta-key": request.key})
        async for piece in source.read():
            await output.write(piece.upper() + str(dict(arguments)).encode())
        if self.failure == "after":
            raise S3Error("InternalError", "It broke.", status=500)

    async def close(self) -> None:
        return


def serving(server: Endpoint, transform: Any, **settings: Any) -> WebhookService:
    """The gateway's service for other servers, at the test's server."""
    fields = {"token": "t0ken", "source_hosts": (f"127.0.0.1:{server.port}",)} | settings
    served = {"ap": ServedTransform(AccessPoint(name="ap", upstream="memory://", output_bytes_max=1000), transform)}
    service = WebhookService(WebhookServiceConfig(**fields), transforms=served)
    server.routes[PREFIX] = service
    return service


Answering = Callable[[web.BaseRequest, dict[str, Any]], Awaitable[web.StreamResponse]]


async def called(answering: Answering, **settings: Any) -> tuple[MemoryResult, dict[str, Any]]:
    """Run a webhook for one GET, and return the result and the event that it got."""
    events: list[dict[str, Any]] = []

    async with endpoint() as server:

        async def route(request: web.BaseRequest) -> web.StreamResponse:
            events.append(
                json.loads(await request.read()) | {"authorization": request.headers.get("Authorization", "")}
            )
            return await answering(request, events[-1]["getObjectContext"])

        server.routes["/hook"] = route
        transform = calling(server, "/hook", **settings)
        try:
            headers = {"Host": "gateway", "Range": "bytes=0-1", "X-Custom": "1"}
            query = {"width": "3", "lambdaArn": "arn:minio:s3-object-lambda::ap:webhook"}
            result = await server.run(transform, headers=headers, query=query)
        finally:
            await transform.close()
    return result, events[0]


def echo(context: dict[str, Any], **headers: str) -> dict[str, str]:
    """Headers that a webhook must repeat, and others."""
    return {
        "x-amz-request-route": context["outputRoute"],
        "x-amz-request-token": context["outputToken"],
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }


def test_a_webhook_is_called_in_the_dialect_of_minio() -> None:
    """The event has MinIO's form, and the response's forwarded headers and body are the result."""

    async def answer(_: web.BaseRequest, context: dict[str, Any]) -> web.StreamResponse:
        headers = echo(context, x_amz_fwd_status="200", x_amz_fwd_header_Content_Type="text/x", x_amz_meta_a="b")
        return web.Response(body=b"made", headers=headers)

    result, event = asyncio.run(called(answer, token="t0ken"))
    assert (bytes(result.data), result.size_bytes) == (b"made", 4)
    assert result.headers == {"Content-Type": "text/x", "x-amz-meta-a": "b"}
    assert event["protocolVersion"] == ""
    assert event["authorization"] == "Bearer t0ken"
    assert event["userRequest"] == {
        "url": "/ap/folder/a%20b.tar?width=3",
        "headers": {"X-Custom": ["1"]},
    }
    assert event["userIdentity"] == {"type": "IAMUser", "principalId": "AKUSER", "accessKeyId": "AKUSER"}
    assert event["getObjectContext"]["inputS3Url"].startswith("http://127.0.0.1:")


WRONG = {
    "route": ({"x_amz_request_route": "other"}, {}, "InvalidRequest", 400),
    "token": ({"x_amz_request_token": "other"}, {}, "InvalidTokenId", 403),
    "status_text": ({"x_amz_fwd_status": "OK"}, {}, "LambdaFunctionStatusError", 400),
    "error": (
        {"x_amz_fwd_status": "404", "x_amz_fwd_error_code": "NoSuchKey", "x_amz_fwd_error_message": "gone"},
        {},
        "NoSuchKey",
        404,
    ),
    "error_without_message": (
        {"x_amz_fwd_status": "404", "x_amz_fwd_error_code": "NoSuchKey"},
        {},
        "InvalidRequest",
        404,
    ),
    "plain_status": ({}, {"status": 503}, "InvalidRequest", 503),
    "redirect": ({"Location": "http://127.0.0.1:1/"}, {"status": 302}, "LambdaInvalidResponse", 400),
    "own_range": ({}, {"status": 206}, "LambdaInvalidResponse", 400),
}


@pytest.mark.parametrize("name", WRONG)
def test_responses_that_are_no_results(name: str) -> None:
    """Errors of a webhook reach the client; what does not follow the dialect is an error of its own."""
    headers, settings, code, status = WRONG[name]

    async def answer(_: web.BaseRequest, context: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b"made", headers=echo(context, **headers), **settings)

    with pytest.raises(S3Error) as caught:
        asyncio.run(called(answer))
    assert (caught.value.code, caught.value.status) == (code, status)


def test_a_response_that_is_cut_off_is_no_result() -> None:
    """A webhook that dies while it sends makes the run fail, and so does one whose end cannot be recognized."""

    async def cut(request: web.BaseRequest, context: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers=echo(context))
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"part")
        assert request.transport is not None
        request.transport.close()
        return response

    async def endless(request: web.BaseRequest, context: dict[str, Any]) -> web.StreamResponse:
        lines = "".join(f"{name}: {value}\r\n" for name, value in echo(context).items())
        assert request.transport is not None
        request.transport.write(f"HTTP/1.1 200 OK\r\n{lines}\r\npart".encode())
        request.transport.close()
        return web.StreamResponse()

    for answer in (cut, endless):
        with pytest.raises(S3Error, match="LambdaInvalidResponse"):
            asyncio.run(called(answer))


def test_a_webhook_that_is_slow_or_absent() -> None:
    """The time limit holds, and a refused connection is a clear error."""

    async def hang(_: web.BaseRequest, __: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(S3Error, match="LambdaTimeout"):
        asyncio.run(called(hang, time_s_max=0.2))

    async def absent() -> None:
        async with endpoint() as server:
            server.port, port = 1, server.port
            transform = calling(server, "/hook")
            server.port = port
            try:
                with pytest.raises(S3Error, match="LambdaInvocationFailed"):
                    await server.run(transform)
            finally:
                await transform.close()

    asyncio.run(absent())


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nowhere", "http://", "http://[", ""])
def test_urls_that_are_no_webhooks(url: str) -> None:
    """Only http and https are called."""
    with pytest.raises(ConfigError):
        WebhookTransform(AccessPoint(name="ap", upstream="memory://", webhook=WebhookConfig(url=url)))


def test_both_sides_understand_each_other() -> None:
    """A gateway that calls a webhook gets the result of a gateway that serves one."""

    async def run() -> None:
        async with endpoint() as server:
            service = serving(server, Shout())
            transform = calling(server, "/-/webhook/ap", token="t0ken")
            try:
                result = await server.run(transform, query={"width": "3"})
                assert bytes(result.data) == b"HELLO WORLD{'width': '3'}"
                assert result.headers == {"Content-Type": "text/plain", "x-amz-meta-key": ""}
            finally:
                await transform.close()
                await service.close()

    asyncio.run(run())


async def posted(
    transform: Any, *, event: Any = None, authorization: str = "Bearer t0ken", path: str = "ap", **settings: Any
) -> Any:
    """Post an event to the service; returns status, headers and body."""
    async with endpoint() as server:
        service = serving(server, transform, **settings)
        url = f"http://127.0.0.1:{server.port}/bucket/a%20b.tar?X-Amz-Signature=1"
        context = {"outputRoute": "r", "outputToken": "t", "inputS3Url": url}
        event = event or {
            "getObjectContext": context,
            "userRequest": {"url": "/bucket/a%20b.tar?x=1&lambdaArn=arn", "headers": {}},
        }
        body = event if isinstance(event, bytes) else json.dumps(event).encode()
        try:
            async with aiohttp.ClientSession() as session:
                target = f"http://127.0.0.1:{server.port}{PREFIX}{path}"
                async with session.post(
                    target, data=io.BytesIO(body), headers={"Authorization": authorization}
                ) as answer:
                    return answer.status, dict(answer.headers), await answer.read()
        finally:
            await service.close()


def test_the_service_echoes_and_forwards() -> None:
    """A response repeats route and token, and its headers are forwarded ones."""
    status, headers, body = asyncio.run(posted(Shout()))
    assert (status, body) == (200, b"HELLO WORLD{'x': '1'}")
    assert headers["x-amz-request-route"] == "r"
    assert headers["x-amz-request-token"] == "t"
    assert headers["x-amz-fwd-status"] == "200"
    assert headers["x-amz-fwd-header-Content-Type"] == "text/plain"
    assert headers["x-amz-meta-key"] == "a b.tar"
    assert headers["Transfer-Encoding"] == "chunked"


def test_errors_of_a_served_transform() -> None:
    """An error before the first byte is described; one after it breaks the connection off."""
    shout = Shout()
    shout.failure = "before"
    status, headers, _ = asyncio.run(posted(shout))
    assert status == 404
    assert headers["x-amz-fwd-status"] == "404"
    assert headers["x-amz-fwd-error-code"] == "NoSuchKey"
    assert headers["x-amz-request-token"] == "t"
    shout.failure = "after"
    with pytest.raises(aiohttp.ClientError):
        asyncio.run(posted(shout))


REFUSED = {
    "no_token": ({"authorization": ""}, 403),
    "wrong_token": ({"authorization": "Bearer other"}, 403),
    "token_not_configured": ({"token": "", "authorization": "Bearer "}, 403),
    "unknown_access_point": ({"path": "other"}, 404),
    "no_json": ({"event": b"{"}, 400),
    "no_event": ({"event": b"[1]"}, 400),
    "deep": ({"event": b"[" * 100_000}, 400),
    "too_long": ({"event": b" " * (2 << 20)}, 413),
    "header_injection": (
        {"event": {"getObjectContext": {"outputRoute": "r\r\nX: y", "outputToken": "t", "inputS3Url": "http://x/"}}},
        400,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name: str) -> None:
    """Callers without the token and malformed events get no further."""
    settings, status = REFUSED[name]
    assert asyncio.run(posted(Shout(), **settings))[0] == status


FOREIGN = [
    "http://169.254.169.254/latest/meta-data",
    "http://127.0.0.1:1/x",
    "http://localhost/x",
    "file:///etc/passwd",
    "http://127.0.0.1@evil.example/x",
    "http://user:pass@127.0.0.1/x",
    "http://127.0.0.1.evil.example/x",
    "http://[::1]/x",
    "http://[",
    "//127.0.0.1/x",
    "",
]


@pytest.mark.parametrize("url", FOREIGN, ids=range(len(FOREIGN)))
def test_sources_elsewhere_are_refused(url: str) -> None:
    """The service reads only from hosts of the configuration."""
    event = {"getObjectContext": {"outputRoute": "r", "outputToken": "t", "inputS3Url": url}}
    assert asyncio.run(posted(Shout(), event=event))[0] in (400, 403)


def test_a_head_says_that_the_service_is_alive() -> None:
    """MinIO asks with HEAD before it calls a webhook."""

    async def run() -> None:
        async with endpoint() as server, aiohttp.ClientSession() as session:
            serving(server, Shout())
            async with session.head(f"http://127.0.0.1:{server.port}{PREFIX}ap") as answer:
                assert answer.status == 200

    asyncio.run(run())


def test_two_words_are_sent_as_they_are() -> None:
    """A token of two words is the whole header."""
    assert asyncio.run(posted(Shout(), token="Basic abc", authorization="Basic abc"))[0] == 200
