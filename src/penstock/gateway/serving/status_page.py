"""The status page as HTML. It loads nothing but its own data, and shows everything without its script as well."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from penstock.gateway.serving.status import CHART_HEIGHT, CHART_WIDTH

if TYPE_CHECKING:
    from penstock.gateway.serving.status import StatusView

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
