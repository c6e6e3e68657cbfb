"""The text format 0.0.4 of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.metrics import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.gateway.serving.snapshots import Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "penstock_gateway_requests_total": "Requests answered, by method and status.",
    "penstock_gateway_requests_in_flight": "Requests that are being answered.",
    "penstock_gateway_request_seconds": "Time from a request's head to the last byte of its answer.",
    "penstock_gateway_connections": "Open connections.",
    "penstock_gateway_sent_bytes_total": "Bytes of bodies sent to clients.",
    "penstock_gateway_received_bytes_total": "Bytes of bodies received from clients.",
    "penstock_gateway_result_runs_total": "Productions of results that ended, by transform and outcome: "
    "ok, failed, or copied from the bucket of results.",
    "penstock_gateway_result_run_seconds_total": "Time that runs of transforms took.",
    "penstock_gateway_result_runs_in_flight": "Transforms that run now.",
    "penstock_gateway_result_produced_bytes_total": "Bytes that transforms produced.",
    "penstock_gateway_result_bytes_total": "Bytes of results that were read, by place: memory or disk.",
    "penstock_gateway_derived_stores_total": "Results stored in the bucket of results, by outcome.",
    "penstock_gateway_derived_damaged_total": "Results in the bucket of results that were missing bytes or damaged.",
    "penstock_gateway_derived_read_bytes_total": "Bytes of results read from the bucket of results.",
    "penstock_gateway_result_readers": "Readers of results.",
    "penstock_gateway_result_waits_total": "Reads that waited for a result that somebody else had begun to produce.",
    "penstock_gateway_processes": "Worker processes that answer.",
    "penstock_gateway_start_time_seconds": "Time at which the gateway was started, in seconds since 1970.",
    "penstock_gateway_memory_max_bytes": "Memory that reading and sending may take, of which three quarters are the budget.",
    "penstock_gateway_memory_bytes": "Resident memory of the worker processes, without those of transforms.",
    "penstock_budget_used_bytes": "Bytes that readers hold now.",
    "penstock_budget_max_bytes": "Bytes that readers may hold.",
    "penstock_cache_hit_bytes_total": "Bytes read from the node's cache.",
    "penstock_cache_fetched_bytes_total": "Bytes requested from upstream to fill what the cache lacked.",
    "penstock_cache_stored_bytes_total": "Bytes written to the node's cache.",
    "penstock_cache_evicted_bytes_total": "Bytes removed from the node's cache to stay within its limit.",
    "penstock_cache_used_bytes": "Bytes that the node's cache takes on the disk.",
    "penstock_cache_max_bytes": "Bytes that the node's cache may take.",
}


def render(totals: Totals) -> bytes:
    """Return the metrics as Prometheus reads them."""
    lines: list[str] = []
    by_kind = (
        ("counter", _plain(totals.counters.items())),
        ("gauge", _plain(totals.gauges.items())),
        ("histogram", _histograms(totals)),
    )
    for kind, samples in by_kind:
        previous = ""
        for name, sample in samples:
            if name != previous:
                lines += [
                    f"# HELP {name} {HELP.get(name, name.replace('_', ' ').capitalize() + '.')}",
                    f"# TYPE {name} {kind}",
                ]
                previous = name
            lines.append(sample)
    return ("\n".join(lines) + "\n").encode()


def _plain(values: Iterable[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]) -> Iterator[tuple[str, str]]:
    for (name, labels), value in sorted(values):
        yield name, f"{name}{_labels(labels)} {_number(value)}"


def _histograms(totals: Totals) -> Iterator[tuple[str, str]]:
    for (name, labels), (counts, sum_s) in sorted(totals.histograms.items()):
        below = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), counts, strict=True):
            below += count
            yield name, f"{name}_bucket{_labels((*labels, ('le', _number(bound))))} {below}"
        yield name, f"{name}_sum{_labels(labels)} {_number(sum_s)}"
        yield name, f"{name}_count{_labels(labels)} {below}"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
