"""The paths under ``/-/``: health, readiness, metrics, and the status page with its data.

Health and readiness reveal nothing, so everyone may read them. The other pages are for this machine alone, unless
``status = "metrics"`` opens the metrics, which contain no keys of objects, or ``status = "everyone"`` opens the status page as
well. Behind a reverse proxy on this machine every client has a local address, so forwarded requests do not count as local. A
web page that rebinds its host name to 127.0.0.1 is recognized by the ``Host`` header.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiohttp import web

from penstock.gateway.serving.checks import is_loopback
from penstock.gateway.serving.prometheus import CONTENT_TYPE, render
from penstock.gateway.serving.status import make_view
from penstock.gateway.serving.status_page import PRIVATE_HEADERS, page_headers, render_page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.serving.snapshots import Peers

_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
_PORT: Final = re.compile(r":[0-9]*\Z")
_TEXT = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}


class StatusRoutes:
    """Answers the paths under ``/-/``.

    Args:
        config: The configuration.
        peers: All processes of the gateway.
        started_s: When the gateway was started, in seconds since 1970.

    Attributes:
        state: ``"starting"``, ``"serving"`` or ``"draining"``.
    """

    def __init__(self, config: GatewayConfig, *, peers: Peers, started_s: float) -> None:
        self._config = config
        self._peers = peers
        self._started_s = started_s
        self.state = "starting"

    def by_path(self) -> dict[str, Callable[[BaseRequest], Awaitable[StreamResponse]]]:
        """Return the handlers as ``Front`` takes them; unknown paths below ``/-/`` are answered as well."""
        return {
            "/-/health": self._health,
            "/-/ready": self._ready,
            "/-/metrics": self._metrics,
            "/-/": self._status,
        }

    async def _health(self, request: BaseRequest) -> StreamResponse:
        return _refused_method(request) or web.Response(text="ok\n", headers=_TEXT)

    async def _ready(self, request: BaseRequest) -> StreamResponse:
        is_ready = self.state == "serving"
        return _refused_method(request) or web.Response(
            status=200 if is_ready else 503, text=f"{self.state}\n", headers=_TEXT
        )

    async def _metrics(self, request: BaseRequest) -> StreamResponse:
        refusal = self._refusal(request, open_to=("metrics", "everyone"))
        if refusal is not None:
            return refusal
        try:
            totals = await self._peers.totals()
        except TimeoutError:
            return _answer(503, "The processes of this gateway did not answer in time.")
        return web.Response(body=render(totals), headers={**PRIVATE_HEADERS, "Content-Type": CONTENT_TYPE})

    async def _status(self, request: BaseRequest) -> StreamResponse:
        path = request.path
        if path not in ("/-/", "/-/status.json"):
            return _answer(404, "There is no such page.")
        refusal = self._refusal(request, open_to=("everyone",))
        if refusal is not None:
            return refusal
        try:
            totals = await self._peers.totals()
        except TimeoutError:
            return _answer(503, "The processes of this gateway did not answer in time.")
        view = make_view(self._config, totals, state=self.state, started_s=self._started_s)
        if path == "/-/status.json":
            return web.json_response(view.as_json(), headers=PRIVATE_HEADERS)
        return web.Response(body=render_page(view), headers=page_headers())

    def _refusal(self, request: BaseRequest, *, open_to: tuple[str, ...]) -> StreamResponse | None:
        if self._config.status in open_to or _is_local(request):
            return _refused_method(request)
        return _answer(403, f'Only this machine may see this page, unless the gateway has status = "{open_to[0]}".')


def _is_local(request: BaseRequest) -> bool:
    """Return whether a request comes from this machine, and from nobody beyond it."""
    host = _PORT.sub("", request.headers.get("Host", ""))
    return (
        is_loopback(request.remote or "")
        and is_loopback(host)
        and not any(name in request.headers for name in _FORWARDED)
    )


def _refused_method(request: BaseRequest) -> StreamResponse | None:
    if request.method in ("GET", "HEAD"):
        return None
    return _answer(405, "This page can only be read.", Allow="GET, HEAD")


def _answer(status: int, text: str, **headers: str) -> StreamResponse:
    return web.Response(status=status, text=f"{text}\n", headers={**_TEXT, **headers})
