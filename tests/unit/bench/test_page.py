"""The page of a run, and of several side by side."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from measuring import made_record, turn
from penstock.bench.clients import RAW, STEP_ALONE, UNDECODED
from penstock.bench.page import markdown, write_page
from penstock.bench.record import BenchRecord
from penstock.errors import ConfigError

HOSTILE = "<script>alert('x')</script>"


def complete(folder: Path, factor: float = 1.0, **more: Any) -> BenchRecord:
    """A record with every part: probes, two rounds, a sweep, a step, other libraries, and clients that did not run."""
    settings = {"decode": True, "step": "gpu", "sweep": {"workers": [1, 2]}, "clients": ["penstock"]}
    turns = [
        {**turn(name, factor * rate * workers, number=number, is_ours=ours, stall_ratio=0.4), "settings": {"workers": workers}}
        for number in range(2)
        for workers in (1, 2)
        for name, rate, ours in [
            (RAW.name, 900, True), (UNDECODED.name, 600, False), (STEP_ALONE.name, 800, False), ("penstock", 500, True),
            ("connector, map", 250, False),
        ]
    ]  # fmt: skip
    return made_record(
        folder, *turns, settings=settings, not_run={"Ray Data": f"failed: {HOSTILE}"}, **{"image": HOSTILE} | more
    )


def written(folder: Path, *records: BenchRecord) -> str:
    path = folder / "page.html"
    write_page(records, path)
    return path.read_text()


def test_the_order_of_a_page(tmp_path: Path) -> None:
    """What was measured, the limit, the clients, the plots, and how to do it again."""
    page = written(tmp_path, complete(tmp_path))
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert titles == [
        "What was measured", "What limits it", "Clients", "Samples per second", "What each part allows", "By workers",
        "Seconds per 100 batches", "Over time", "Once more",
    ]  # fmt: skip
    for text in (
        "first byte after 30.0 ms",
        "a processor, 2 cores",
        "commit abc123",
        "numpy 2.4",
        "2023-11-14 22:13 UTC",
    ):
        assert text in page
    assert 'href="record.jsonl"' in page
    assert "The limit is not known." not in page


def test_text_of_data_is_escaped(tmp_path: Path) -> None:
    """Names of fields and keys, and the messages of clients, are text."""
    page = written(tmp_path, complete(tmp_path, url=f"s3://bucket/{HOSTILE}/", prefix=HOSTILE))
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") >= 4


def test_names_in_plots_are_text(tmp_path: Path) -> None:
    """Neither markup nor formulas nor letters that a font lacks matter in the names of clients and values of a sweep."""
    name = f"{HOSTILE} $\\nothing$ \N{CJK UNIFIED IDEOGRAPH-4F60}"
    turns = [turn(name, 100, settings={"w": value}) for value in ("<b>", "$\\nothing$")]
    page = written(tmp_path, made_record(tmp_path, *turns))
    assert "<script" not in page
    assert "<b>" not in page
    assert "$\\nothing$ \N{CJK UNIFIED IDEOGRAPH-4F60} (w=" in page


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    """The page names no other resource, plots have text and a description, and each is well-formed."""
    page = written(tmp_path, complete(tmp_path))
    assert re.findall(r"(?:src|href)=[\"']?([^\"'> ]+)", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)) == [
        "record.jsonl"
    ]
    assert "@import" not in page
    assert "$\\math" not in page  # which the browser would show
    assert re.findall(r"url\((?!#)", page) == []
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 5
    for plot in plots:
        ET.fromstring(plot)
        assert re.search(r'role="img" aria-label="[^"]{20,}"', plot)
        assert re.search(r"(samples/s|seconds)\s*</text>", plot)
        assert set(re.findall(r"xlink:href=\"(.)", plot)) <= {"#"}
    named = re.findall(r' id="([^"]+)"', page)
    assert {name for name in named if named.count(name) > 1 and "_" in name} == set()


def test_the_same_record_makes_the_same_page(tmp_path: Path) -> None:
    """There is no time and no random number in it."""
    record = complete(tmp_path)
    assert written(tmp_path, record) == written(tmp_path, record)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    """The page shows what there is, if it is only one batch or only reasons; without anything there is no page."""
    page = written(tmp_path, made_record(tmp_path, turn("penstock", 10, batches=1), is_complete=False))
    assert "1 round, stopped before the end" in page
    other = made_record(tmp_path / "b", not_run={"Ray Data": "not installed: ray"}, is_complete=False)
    assert "not run: not installed: ray" in written(tmp_path, other)
    with pytest.raises(ConfigError, match="holds no measurement yet"):
        written(tmp_path, made_record(tmp_path / "c", is_complete=False))


def test_runs_side_by_side(tmp_path: Path) -> None:
    """A column for each run with ratios to the first one, and a reason where a client did not run."""
    first, second = complete(tmp_path / "before"), complete(tmp_path / "after", 2.0)
    alone = made_record(tmp_path / "third", turn("penstock", 100), not_run={"connector, map": "not installed: torch"})
    page = written(tmp_path, first, second, alone)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    by_client = {row[0]: row[1:] for row in rows if row}
    assert by_client["client"] == ["before, samples/s", "after, samples/s", "third, samples/s"]
    assert [cell[-6:] for cell in by_client["penstock (workers=2)"][:2]] == ["x 1.00", "x 2.00"]
    assert by_client["penstock"] == ["not run: not asked for", "not run: not asked for", "100, x 1.00"]
    assert by_client["connector, map"][2] == "not run: not installed: torch"
    assert {'href="before/record.jsonl"', 'href="third/record.jsonl"'} <= set(re.findall(r'href="[^"]+"', page))


def test_runs_in_folders_of_one_name(tmp_path: Path) -> None:
    """They are told apart by their paths."""
    page = written(tmp_path, complete(tmp_path / "a/run"), complete(tmp_path / "b/run"))
    assert f"{tmp_path}/a/run, samples/s" in page


def scenario_parts(folder: Path) -> list[BenchRecord]:
    """Two parts of a scenario whose published ratios are known, and the page of the first one."""
    command = "penstock bench run --scenario object-lambda --scale 0.1 --clients"
    about = {"scenario": "object-lambda", "command": [*command.split(), "a b"]}
    rates = {
        "tars, 8MB": {"TensorFlow, py_function": 10, "penstock, gateway handler": 200},
        "stored TFRecords": {"penstock, TensorFlow": 800},
    }
    records = []
    for title, clients in rates.items():
        record = made_record(folder / title, *(turn(name, rate) for name, rate in clients.items()))
        record.run |= {**about, "part": title}
        records.append(record)
    write_page(records[:1], folder / "tars, 8MB" / "report.html")
    return records


def test_the_parts_of_a_scenario(tmp_path: Path) -> None:
    """Published ratios stand beside ours, as page and as Markdown; one command makes all parts, and their pages are linked."""
    records = scenario_parts(tmp_path)
    page, text = written(tmp_path, *records), markdown(records)
    command = "penstock bench run --scenario object-lambda --scale 0.1 --clients 'a b'"
    assert text.count(command) == 1
    assert page.count("penstock bench run --scenario object-lambda") == 1
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    for row in (
        ["tars of 8 MB by the naive reader : the same by a Lambda handler", "20", "20.0"],
        ["tars of 8 MB by a Lambda handler : stored TFRecords", "more than 3", "4.0"],
    ):
        assert row in rows
        assert f"| {' | '.join(row)} |" in text
    assert "not measured" in page
    assert 'href="tars%2C%208MB/report.html"' in page
    assert 'href="stored%20TFRecords/report.html"' not in page
    assert "### Tars, 8MB" in text
    assert "| penstock, gateway handler | 200 |" in text
    assert "Published ratios" not in written(tmp_path, complete(tmp_path / "other"))


def test_requests_over_time(tmp_path: Path) -> None:
    """Where a log counts them, they are a column; a sweep of a single client has a row for each value."""
    turns = [
        turn("penstock", 100 * (1 + place), settings={"cache": value}) for place, value in enumerate(("none", "1GB"))
    ]
    assert "requests/s" not in written(tmp_path, made_record(tmp_path / "a", *turns))
    for each in turns:
        each["monitor"] = [[*row, 10 * number] for number, row in enumerate(each["monitor"])]
    page = written(tmp_path, made_record(tmp_path / "b", *turns))
    assert "received MB/s, requests/s over time for penstock (cache=1GB); penstock (cache=none)" in page


def test_a_setting_that_only_some_clients_have(tmp_path: Path) -> None:
    """A sweep has a plot of those that have it, whichever is the fastest."""
    for rate in (50, 500):
        swept = [turn("penstock", 100 * value, settings={"prefetch": value}) for value in (1, 4)]
        record = made_record(tmp_path / str(rate), *swept, turn("connector, map", rate, settings={}))
        assert "By prefetch" in written(tmp_path, record)
