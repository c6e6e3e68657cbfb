"""The status page shows the state of all processes, escapes everything, and loads nothing."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from penstock.gateway.config import AccessPoint, GatewayConfig, WebhookConfig
from penstock.gateway.http.access_log import AccessRecord
from penstock.gateway.metrics import Metrics
from penstock.gateway.serving.journal import ERRORS_MAX, SECONDS_MAX, Activity
from penstock.gateway.serving.snapshots import add_up, take_snapshot
from penstock.gateway.serving.status import LIVE_MAX, StatusView, duration_text, make_view, page_headers, render_page

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"
CONFIG = GatewayConfig(
    access_points=(
        AccessPoint(name="plain", upstream="s3://bucket/"),
        AccessPoint(name="changed", upstream="https://user:secret@host/x", transform="gzip"),
        AccessPoint(
            name="hook", upstream="s3://b/", webhook=WebhookConfig(url="http://h/?token=secret", token="secret")
        ),
    )
)


def record(**values: Any) -> AccessRecord:
    sound: dict[str, Any] = {
        "time_s": time.time(), "remote": "127.0.0.1", "access_key": "", "method": "GET", "bucket": "b", "key": "k", "query": "",
        "status": 200, "code": "", "sent_bytes": 1000, "received_bytes": 0, "seconds": 0.01, "complete": True,
        "request_id": "R1", "user_agent": "",
    }  # fmt: skip
    return AccessRecord(**{**sound, **values})


def view_of(activity: Activity, *, live: tuple[dict[str, Any], ...] = ()) -> StatusView:
    metrics = Metrics()
    metrics.add("penstock_gateway_requests_total", 3, method="GET", status="200")
    metrics.add("penstock_gateway_requests_total", 2, method="GET", status="503")
    metrics.add("penstock_gateway_result_runs_total", 5, access_point="changed", outcome="ok")
    metrics.add("penstock_gateway_result_runs_total", 2, access_point="changed", outcome="failed")
    details = {"live": list(live), **activity.details()}
    taken = take_snapshot(metrics, counters={}, gauges={}, details=details)
    return make_view(CONFIG, add_up([taken]), state="serving", started_s=time.time() - 7300)


def ignore(_: AccessRecord) -> None:
    return


def test_values_and_tables() -> None:
    """Requests, rates, errors and access points are shown as texts."""
    written: list[AccessRecord] = []
    activity = Activity(written.append)
    now_s = time.time()
    for back in (3, 2, 1):
        activity(record(time_s=now_s - back, seconds=0.0))
    activity(record(time_s=now_s - 1, status=500, code="InternalError", key="bad", request_id="R2"))
    live = {"what": "GET /b/k", "seconds": 3.2, "sent_bytes": 2048, "remote": "127.0.0.1", "request_id": "R9"}
    view = view_of(activity, live=(live,))
    assert len(written) == 4
    shown = [view.values[name] for name in ("state", "in_flight", "requests", "failed", "uptime")]
    assert shown == ["serving", "1", "5", "2", "2 h 1 min"]
    assert view.tables["access_points"][0] == ["plain", "s3://bucket/", "as they are", "-", "-"]
    assert view.tables["access_points"][1][2:] == ["gzip", "7", "2"]
    assert view.tables["live"] == [["GET /b/k", "3.2 s", "2 KiB", "127.0.0.1", "R9"]]
    assert view.tables["errors"][0][1:] == ["GET /b/bad", "500 InternalError", "R2"]


def test_the_page_escapes_everything() -> None:
    """Keys are chosen by clients: none of them becomes markup, and none controls a terminal."""
    activity = Activity(ignore)
    activity(record(status=500, key=HOSTILE, code=HOSTILE))
    live = {"what": HOSTILE, "seconds": 1.0, "sent_bytes": 1, "remote": HOSTILE, "request_id": HOSTILE}
    page = render_page(view_of(activity, live=(live,))).decode()
    assert page.count("<script>") == 1
    assert "alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in page
    assert "\x1b" not in page.partition("<h2>Last errors")[2]


def test_no_secret_is_shown() -> None:
    """Passwords and tokens in URLs of the configuration and of errors stay out of the page."""
    activity = Activity(ignore)
    activity.note_error("upstream", "https://user:secret@host/x?X-Amz-Signature=secret failed")
    assert "secret" not in render_page(view_of(activity)).decode()


def test_the_page_loads_nothing() -> None:
    """Style and script are in the page, and the policy allows these two alone."""
    page = render_page(view_of(Activity(ignore))).decode()
    assert re.findall(r"""(?:\bsrc|\bhref|url\(|@import)\s*=?\s*["']?(\S+)""", page) == []
    policy = page_headers()["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_what_is_kept_is_bounded() -> None:
    """Old seconds and errors make room for new ones, long texts are cut, and a limited number of requests is shown."""
    activity = Activity(ignore)
    for number in range(10 * ERRORS_MAX):
        activity(record(time_s=1000.0 + number, status=503, key="k" * 5000, request_id=str(number)))
    details = activity.details()
    assert (len(details["seconds"]), len(details["errors"])) == (SECONDS_MAX, ERRORS_MAX)
    assert max(len(each["what"]) for each in details["errors"]) <= 400
    row = {"what": "GET /", "seconds": 1.0, "sent_bytes": 1, "remote": "r", "request_id": "R"}
    assert len(view_of(activity, live=(row,) * 5000).tables["live"]) == LIVE_MAX


def test_requests_that_were_broken_off_are_errors() -> None:
    """An answer that began well and ended early is among the errors; a 404 is not."""
    activity = Activity(ignore)
    activity(record(status=404, code="NoSuchKey"))
    activity(record(complete=False))
    assert [each["reason"] for each in activity.details()["errors"]] == ["200 broken off"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3700, "1 h 1 min"), (200000, "2 d 7 h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    """The two largest units are enough to read."""
    assert duration_text(seconds) == text


def test_one_request_is_one_error() -> None:
    """The reason that a log record tells and the status of the answer become one line, in whichever order they come."""
    activity = Activity(ignore)
    activity.note_error("", "the transform raised KeyError", "R1")
    activity(record(status=500, code="InternalError"))
    activity(record(status=503, code="SlowDown", request_id="R2"))
    activity.note_error("", "too many", "R2")
    assert [(each["what"], each["reason"]) for each in activity.details()["errors"]] == [
        ("GET /b/k", "the transform raised KeyError; 500 InternalError"),
        ("GET /b/k", "503 SlowDown; too many"),
    ]
