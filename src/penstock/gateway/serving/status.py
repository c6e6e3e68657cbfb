"""The status page as texts: values by name and tables by name. The page and its script render the same texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.serving.activity import SECONDS_MAX
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.serving.snapshots import Snapshot, Totals

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

    def as_json(self) -> dict[str, Any]:
        """Return it as the page's script reads it."""
        return {"values": self.values, "tables": self.tables, "chart": self.chart}


def make_view(config: GatewayConfig, totals: Totals, *, state: str, started_s: float) -> StatusView:
    """Return what the page shows.

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
