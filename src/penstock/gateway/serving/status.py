"""The paths under ``/-/``: health, readiness, metrics, and the status page with its data.

The page shows texts: values by name and tables by name. It loads nothing but its own data, and shows everything without its
script as well, which renders the same texts.

Health and readiness reveal nothing, so everyone may read them. The other pages are only for this machine, unless
``status = "metrics"`` opens the metrics, which contain no keys of objects, or ``status = "everyone"`` opens the status page as
well. Behind a reverse proxy on this machine every client has a local address, so forwarded requests do not count as local. A
web page that rebinds its host name to 127.0.0.1 is recognized by the ``Host`` header.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from aiohttp import web

from penstock.gateway.serving.checks import is_loopback
from penstock.gateway.serving.journal import SECONDS_MAX
from penstock.gateway.serving.prometheus import CONTENT_TYPE, render
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiohttp.web import BaseRequest, StreamResponse

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.serving.readiness import Readiness
    from penstock.gateway.serving.snapshots import Peers, Snapshot, Totals


LIVE_MAX = 100
ERRORS_MAX = 30
RATE_SECONDS = 10
CHART_WIDTH, CHART_HEIGHT = 600, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """Everything that the page shows.

    Attributes:
        values: Texts by name.
        tables: Rows of texts by name.
        chart: Points of the line of bytes sent in each of the last 60 seconds, as SVG spells them.
    """

    values: dict[str, str]
    tables: dict[str, list[list[str]]]
    chart: str


def make_view(config: GatewayConfig, totals: Totals, *, state: str, started_s: float) -> StatusView:
    """Return the texts and tables of the page.

    Args:
        config: The configuration.
        totals: Sums over all processes.
        state: ``"serving"`` or ``"draining"``.
        started_s: When the gateway was started, in seconds since 1970.
    """
    now_s = time.time()
    by_second = _by_second(totals.snapshots)
    last = [by_second.get(int(now_s) - back, (0.0, 0.0)) for back in range(1, SECONDS_MAX + 1)]
    recent = last[:RATE_SECONDS]
    hit, fetched = (
        totals.counter("penstock_cache_hit_bytes_total"),
        totals.counter("penstock_cache_fetched_bytes_total"),
    )
    failed = sum(
        value
        for (name, labels), value in totals.counters.items()
        if name == "penstock_gateway_requests_total" and dict(labels).get("status", "").startswith("5")
    )
    values = {
        "state": state,
        "version": __version__,
        "uptime": duration_text(now_s - started_s),
        "processes": _processes(config, totals),
        "in_flight": f"{sum(len(each['live']) for each in totals.snapshots)}",
        "requests": f"{totals.counter('penstock_gateway_requests_total'):,.0f}",
        "requests_rate": f"{sum(each[0] for each in recent) / RATE_SECONDS:,.1f}/s",
        "throughput": f"{format_bytes(sum(each[1] for each in recent) / RATE_SECONDS)}/s",
        "sent": format_bytes(totals.counter("penstock_gateway_sent_bytes_total")),
        "failed": f"{failed:,.0f}",
        "cache_used": _of(totals.gauge("penstock_cache_used_bytes"), totals.gauge("penstock_cache_max_bytes")),
        "cache_hits": f"{100 * hit / (hit + fetched):.0f} %" if hit + fetched else "-",
        "budget": _of(totals.gauge("penstock_budget_used_bytes"), totals.gauge("penstock_budget_max_bytes")),
        "runs": f"{totals.gauge('penstock_gateway_result_runs_in_flight'):,.0f}",
        "memory": format_bytes(totals.gauge("penstock_gateway_memory_bytes")),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)),
    }
    tables = {
        "access_points": [_access_point_row(point, totals) for point in config.access_points],
        "live": _live_rows(totals.snapshots),
        "errors": _error_rows(totals.snapshots),
    }
    if config.directory:
        tables["access_points"].append(["(folders)", config.directory, "as they are", "-", "-"])
    return StatusView(values=values, tables=tables, chart=_chart([each[1] for each in reversed(last)]))


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: ``"2 d 3 h"``, ``"41 s"``."""
    whole = max(0, int(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def _processes(config: GatewayConfig, totals: Totals) -> str:
    text = f"{len(totals.snapshots)} of {config.workers}"
    return f"{text}, {totals.restarts} restarted" if totals.restarts else text


def _of(used: float, limit: float) -> str:
    return f"{format_bytes(used)} of {format_bytes(limit)}" if limit else "-"


def _by_second(snapshots: Iterable[Snapshot]) -> dict[int, tuple[float, float]]:
    """Return requests and bytes sent by second, over all processes."""
    found: dict[int, tuple[float, float]] = {}
    for snapshot in snapshots:
        for second, requests, sent in snapshot["seconds"]:
            before = found.get(int(second), (0.0, 0.0))
            found[int(second)] = before[0] + requests, before[1] + sent
    return found


def _chart(values: list[float]) -> str:
    top = max(1.0, *values)
    step = CHART_WIDTH / (len(values) - 1)
    points = (f"{index * step:.1f},{CHART_HEIGHT * (1 - value / top):.1f}" for index, value in enumerate(values))
    return " ".join(points)


def _access_point_row(point: AccessPoint, totals: Totals) -> list[str]:
    what = "as they are"
    if point.transform:
        what = point.transform
    elif point.handler is not None:
        what = f"Lambda {point.handler.handler}"
    elif point.webhook is not None:
        what = f"webhook {public_url(point.webhook.url)}"
    if what == "as they are":
        return [point.name, public_url(point.upstream), what, "-", "-"]
    good, failed = (
        totals.counter("penstock_gateway_result_runs_total", access_point=point.name, outcome=outcome)
        for outcome in ("ok", "failed")
    )
    return [point.name, public_url(point.upstream), what, f"{good + failed:,.0f}", f"{failed:,.0f}"]


def _live_rows(snapshots: Iterable[Snapshot]) -> list[list[str]]:
    live = [each for snapshot in snapshots for each in snapshot["live"]]
    live.sort(key=lambda each: -each["seconds"])
    return [
        [each["what"], f"{each['seconds']:.1f} s", format_bytes(each["sent_bytes"]), each["remote"], each["request_id"]]
        for each in live[:LIVE_MAX]
    ]


def _error_rows(snapshots: Iterable[Snapshot]) -> list[list[str]]:
    errors = [each for snapshot in snapshots for each in snapshot["errors"]]
    errors.sort(key=lambda each: -each["time_s"])
    return [
        [
            time.strftime("%H:%M:%S", time.gmtime(each["time_s"])),
            each["what"],
            each["reason"],
            each["request_id"] or "-",
        ]
        for each in errors[:ERRORS_MAX]
    ]


TILES = (
    ("in_flight", "requests now"),
    ("requests_rate", "requests, last 10 s"),
    ("throughput", "throughput, last 10 s"),
    ("cache_hits", "bytes from the cache"),
    ("cache_used", "cache"),
    ("budget", "read-ahead memory"),
    ("runs", "transforms now"),
    ("failed", "server errors"),
)
LINES = (
    ("processes", "processes"),
    ("requests", "requests"),
    ("sent", "sent"),
    ("memory", "memory"),
    ("uptime", "up for"),
    ("version", "penstock"),
)
TABLES = (
    (
        "access_points",
        "Access points",
        ("Name", "Upstream", "Transform", "Transforms run", "Not finished"),
        "There are no access points.",
    ),
    ("live", "Requests now", ("Request", "For", "Sent", "Client", "Request ID"), "No request is being answered."),
    ("errors", "Last errors", ("Time (UTC)", "What", "Reason", "Request ID"), "There were no errors."),
)


def render_page(view: StatusView) -> bytes:
    """Return the page. Every text of the view is escaped."""
    style, script = _asset("status.css"), _asset("status.js")
    tiles = "".join(
        f'<div class="tile"><dd data-value="{name}">{escape(view.values[name])}</dd><dt>{label}</dt></div>'
        for name, label in TILES
    )
    lines = " · ".join(f'{label} <b data-value="{name}">{escape(view.values[name])}</b>' for name, label in LINES)
    tables = "".join(_table(view, *each) for each in TABLES)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>penstock gateway</title>
<style>{style}</style>
</head>
<body>
<header><h1>penstock gateway</h1><span class="state" data-value="state" role="status">{escape(view.values["state"])}</span>
<time data-value="time">{escape(view.values["time"])}</time></header>
<main>
<dl class="tiles">{tiles}</dl>
<figure>
<svg viewBox="0 -4 {CHART_WIDTH} {CHART_HEIGHT + 8}" preserveAspectRatio="none" role="img"
 aria-label="Bytes sent in each of the last 60 seconds">
<polyline id="chart" points="{escape(view.chart)}"/></svg>
<figcaption>bytes sent, by second, in the last minute</figcaption>
</figure>
<p class="lines">{lines}</p>
{tables}
</main>
<script>{script}</script>
</body>
</html>
""".encode()


def page_headers() -> dict[str, str]:
    """Return the headers of the page: its own style and script run, and nothing else."""
    policy = (
        f"default-src 'none'; style-src '{_digest('status.css')}'; script-src '{_digest('status.js')}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy, **PRIVATE_HEADERS}


PRIVATE_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of everything that shows the gateway's state."""


def _table(view: StatusView, name: str, title: str, columns: tuple[str, ...], empty: str) -> str:
    rows = view.tables[name]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    hidden = " hidden" if rows else ""
    return (
        f'<section><h2>{title}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody data-table="{name}">{body}</tbody></table></div>'
        f'<p class="empty" data-empty="{name}"{hidden}>{empty}</p></section>'
    )


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


@cache
def _digest(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()


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
        readiness: The state of the upstreams; None until they are known.
    """

    readiness: Readiness | None = None

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
        if (refusal := _refused_method(request)) is not None:
            return refusal
        if self.state != "serving":
            return _answer(503, self.state)
        failures = [] if self.readiness is None else await self.readiness.failures()
        return _answer(503, "\n".join(failures)) if failures else _answer(200, self.state)

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
            return web.json_response(asdict(view), headers=PRIVATE_HEADERS)
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
