"""The access log: its lines, and a writer that never stops the event loop."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from typing import Literal

import pytest

from penstock.gateway.http import access_log
from penstock.gateway.http.access_log import AccessLogWriter, AccessRecord, as_line
from servers.leaks import nothing_left


def record(**changes: object) -> AccessRecord:
    fields: dict[str, object] = {
        "time_s": 1_767_323_045.0049, "remote": "127.0.0.1", "access_key": "AK", "method": "GET", "bucket": "b", "key": "k",
        "query": "", "status": 200, "code": "", "sent_bytes": 3, "received_bytes": 0, "seconds": 0.01, "complete": True,
        "request_id": "0123456789ABCDEF", "user_agent": "test",
    }  # fmt: skip
    return AccessRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (1_767_323_045.0, "2026-01-02T03:04:05.000Z"),
        (1_767_323_045.004, "2026-01-02T03:04:05.004Z"),
        (1_767_323_045.9999, "2026-01-02T03:04:05.999Z"),
        (1_767_323_045.9999996, "2026-01-02T03:04:05.999Z"),
    ],
)
def test_times(time_s: float, text: str) -> None:
    """Times are in UTC, cut to milliseconds."""
    assert as_line(record(time_s=time_s)).split(" ")[0] == text


def test_names_cannot_forge_lines() -> None:
    """Quotation marks, line breaks and control characters of keys and user agents are escaped."""
    line = as_line(record(key='a" b\n\x1b[31m\\', user_agent='x"\u202ey'))
    assert '"/b/a\\" b' in line
    assert not {"\n", "\x1b", "\u202e"} & set(line)


def test_all_records_are_written_in_order() -> None:
    """Closing writes what waits; the thread has ended then."""
    stream = io.StringIO()
    with nothing_left():
        writer = AccessLogWriter(stream)
        for number in range(500):
            writer(record(key=f"k{number}"))
        writer.close()
        writer.close()
    assert [line.split('"')[1] for line in stream.getvalue().splitlines()] == [f"/b/k{number}" for number in range(500)]


@pytest.mark.parametrize("style", ["lines", "json"])
def test_a_stalled_reader_stops_nobody(monkeypatch: pytest.MonkeyPatch, style: Literal["lines", "json"]) -> None:
    """Records for a pipe that nobody reads are taken at once, and dropped when too many wait; a line tells how many."""
    monkeypatch.setattr(access_log, "_WAITING_COUNT_MAX", 100)
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stream, os.fdopen(read_fd) as reader:
        writer = AccessLogWriter(stream, style=style)
        sent_count = 20_000  # at least 2 MB of lines, where a pipe takes 64 KB
        for number in range(sent_count):
            writer(record(key=f"k{number}"))
        lines: list[str] = []
        draining = threading.Thread(target=lambda: lines.extend(reader))
        draining.start()
        writer.close()
        stream.close()
        draining.join()
    if style == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines)
    dropped = [
        int(match[1]) for line in lines if (match := re.search(r"(\d+) lines of the access log were dropped", line))
    ]
    assert sum(dropped) > 0
    assert len(lines) - len(dropped) + sum(dropped) == sent_count
