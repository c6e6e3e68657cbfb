"""Numbers of processes are added up, and Prometheus can read the sums."""

from __future__ import annotations

import json
import re

from penstock.gateway.metrics import BOUNDS_S, Metrics
from penstock.gateway.serving.prometheus import HELP, render
from penstock.gateway.serving.snapshots import Snapshot, Totals, add_up, fold, take_snapshot

SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? (\+Inf|[-0-9.e+]+)')


def snapshot(requests: int, *, running: float = 0, seconds: tuple[float, ...] = ()) -> Snapshot:
    metrics = Metrics()
    metrics.add("penstock_gateway_requests_total", requests, method="GET", status="200")
    metrics.move("penstock_gateway_requests_in_flight", running)
    for each in seconds:
        metrics.histograms["penstock_gateway_request_seconds", (("method", "GET"),)].add(each)
    taken = take_snapshot(
        metrics, counters={("penstock_cache_hit_bytes_total", ()): 5}, gauges={}, details={"live": []}
    )
    over_the_channel: Snapshot = json.loads(json.dumps(taken))
    return over_the_channel


def test_sums_over_processes() -> None:
    """Counters, gauges and histograms of all processes are added up, label by label."""
    totals = add_up([snapshot(3, running=1, seconds=(0.002,)), snapshot(4, running=2, seconds=(0.002, 400.0))])
    assert totals.counter("penstock_gateway_requests_total") == 7
    assert totals.counter("penstock_gateway_requests_total", status="404") == 0
    assert totals.counter("penstock_cache_hit_bytes_total") == 10
    assert totals.gauge("penstock_gateway_requests_in_flight") == 3
    counts, sum_s = totals.histograms["penstock_gateway_request_seconds", (("method", "GET"),)]
    assert (sum(counts), counts[BOUNDS_S.index(0.0025)], counts[-1], sum_s) == (3, 2, 1, 400.004)


def test_counters_outlive_their_process() -> None:
    """What a process that ended had counted remains in the sums; its gauges do not."""
    ended = fold(fold(None, snapshot(3, running=1)), snapshot(2, running=1, seconds=(0.1,)))
    totals = add_up([snapshot(10, running=4)], ended=[json.loads(json.dumps(ended))])
    assert totals.counter("penstock_gateway_requests_total") == 15
    assert totals.gauge("penstock_gateway_requests_in_flight") == 4
    assert sum(totals.histograms["penstock_gateway_request_seconds", (("method", "GET"),)][0]) == 1
    assert len(totals.snapshots) == 1


def test_the_text_of_prometheus() -> None:
    """Every line is a comment or a sample; each name has its HELP and TYPE once, before its samples."""
    lines = render(add_up([snapshot(3, running=0.5, seconds=(0.002, 400.0))])).decode().splitlines()
    names: list[str] = []
    for line in lines:
        if line.startswith("# TYPE "):
            names.append(line.split()[2])
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(names[-1])
    assert sorted(names) == sorted(set(names))
    assert 'penstock_gateway_requests_total{method="GET",status="200"} 3' in lines
    assert "penstock_gateway_requests_in_flight 0.5" in lines
    assert 'penstock_gateway_request_seconds_bucket{method="GET",le="+Inf"} 2' in lines
    assert 'penstock_gateway_request_seconds_bucket{method="GET",le="300"} 1' in lines
    assert 'penstock_gateway_request_seconds_count{method="GET"} 2' in lines


def test_labels_are_escaped() -> None:
    """A label with a quote, a backslash or a line break stays one label."""
    text = render(Totals({("penstock_gateway_requests_total", (("method", 'a"b\\c\nd'),)): 1.0})).decode()
    assert 'method="a\\"b\\\\c\\nd"' in text
    assert SAMPLE.fullmatch(text.splitlines()[-1])


def test_nothing_is_still_a_text() -> None:
    """Before the first request there is nothing to show, which is no error."""
    assert render(Totals()) == b"\n"


def test_every_metric_is_explained() -> None:
    """A help text is a sentence, and says more than the name."""
    assert all(text.endswith(".") and " " in text and name.startswith("penstock_") for name, text in HELP.items())
