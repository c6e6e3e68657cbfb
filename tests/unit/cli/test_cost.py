"""``penstock cost``: counting the data, the tables, JSON and the page."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from measuring import made_record, turn
from penstock.bench.clients import RAW, WARM
from penstock.cli.app import run
from penstock.store.memory import MemoryStore
from penstock.version import install_hint

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

ARTICLE = ["cost", "--objects", "1000000", "--bytes", "100TB"]
IDLE = [*ARTICLE, "--price-per-hour", "28", "--hours", "20", "--busy", "0.25"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a command that succeeds."""
    assert run([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def options(found: list[dict[str, Any]], hours_are: str | None = None) -> dict[str, dict[str, Any]]:
    return {line["option"]: line for line in found if line["kind"] == "option" and line["hours_are"] == hours_are}


def row(text: str, name: str) -> list[str]:
    """The amounts of the first row of a table that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
    return [f"${each.strip()}" for each in line.split("$")[1:]]


def test_the_articles_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's defaults are the articles' case, as JSON and on the terminal."""
    found = options(lines(capsys, *ARTICLE))
    assert found["whole-objects"]["option_dollars"] == pytest.approx(0.40)
    charges = {charge["what"]: charge for charge in found["object-lambda"]["charges"]}
    assert [round(charge["dollars"], 6) for charge in charges.values()] == [0.40, 500.0, 83.50, 0.20]
    assert charges["GB returned"]["formula"] == "100 000 GB x 1 epoch x $0.005 per GB = $500.00"
    assert run([*ARTICLE, "--function-seconds", "5", "--explain"]) == 0
    text = capsys.readouterr().out
    assert row(text, "whole-objects") == ["$0.40"]
    assert row(text, "object-lambda") == ["$584.10"]
    assert "= $83.50" in text
    assert "2021-12-31" in text


def test_both_senses_of_hours(capsys: pytest.CaptureFixture[str]) -> None:
    """Hours of which it is not said what they are have both results, and a question; said, there is one."""
    assert run(IDLE) == 0
    shown = capsys.readouterr()
    assert row(shown.out, "idle-gpu") == ["$420.00", "$560.00", "$1 680.00", "$2 240.00"]
    assert "Is 20 h the time with the bottleneck?" in shown.err
    for sense, dollars in (("measured", 420), ("full-speed", 1680)):
        found = lines(capsys, *IDLE, "--hours-are", sense)
        assert {line["hours_are"] for line in found if line["kind"] != "price"} == {sense}
        assert options(found, sense)["idle-gpu"]["option_dollars"] == dollars
    assert "Is 20 h" not in capsys.readouterr().err


def test_a_url_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Objects below a URL are listed, filters apply, and the count is told; so is a single object."""
    store = MemoryStore(name=f"cost-{uuid.uuid4().hex}")
    for number in range(2500):
        store.write(f"train/{number:05d}.tar", bytes(100))
    store.write("train/readme.txt", b"x")
    url = f"memory://{store.name}/train/"
    (workload,) = [line for line in lines(capsys, "cost", url, "--include", "*.tar") if line["kind"] == "workload"]
    assert (workload["objects_count"], workload["size_bytes"]) == (2500, 250_000)
    (data,) = [line for line in lines(capsys, "cost", url) if line["kind"] == "data"]
    assert (data["listed_count"], data["is_estimated"], data["formats"]) == (2501, False, {"tar": 2500, ".txt": 1})
    assert run(["cost", f"{url}readme.txt"]) == 0
    shown = capsys.readouterr()
    assert "counted 1 object, 1 B (1 .txt)" in shown.err
    assert shown.out.startswith("objects: 1, ")


def test_very_many_objects_are_estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of more objects than --listed-max, number and size are estimates: the table, JSON and the page say so."""
    pytest.importorskip("matplotlib")
    store = MemoryStore(name=f"cost-{uuid.uuid4().hex}")
    for number in range(2500):
        store.write(f"train/{number:05d}.tar", bytes(100))
        store.write(f"train/{number:05d}.txt", b"x")
    url, page = f"memory://{store.name}/train/", tmp_path / "cost.html"
    case = ["cost", url, "--include", "*.tar", "--listed-max", "50", "--html", str(page)]
    (data,) = [line for line in lines(capsys, *case) if line["kind"] == "data"]
    assert (data["listed_count"], data["is_estimated"], data["formats"]) == (50, True, {"tar": 50})
    assert (data["objects_count"], data["size_bytes"]) == (
        pytest.approx(2500, rel=0.1),
        pytest.approx(250_000, rel=0.1),
    )
    said = "more than the 50 objects that were looked at: number and size are estimates"
    assert said in page.read_text()
    assert run(case) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("objects: about 2 ")
    assert said in shown.out
    assert "--listed-max lists more" in shown.err


def test_an_empty_url(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where nothing is, nothing is computed, and the URL is named."""
    (tmp_path / "empty").mkdir()
    assert run(["cost", f"{tmp_path}/empty/"]) == 1
    assert "there is nothing below this URL" in capsys.readouterr().err


@pytest.mark.server
def test_no_permission_to_list(faulty: FaultyServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the right to list, the error says that numbers can be given instead."""
    faulty.fail("403", times=None)
    assert run(["cost", f"{faulty.url}/", "--endpoint-url", faulty.endpoint_url, "--anonymous"]) == 1
    error = capsys.readouterr().err
    assert "403 AccessDenied" in error
    assert "--objects and --bytes" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--objects", "3"], "both --objects and --bytes"), (["memory://x/", "--objects", "3"], "either a URL"),
     ([*ARTICLE[1:], "--price", "cpu_host"], "NAME=DOLLARS"), ([*ARTICLE[1:], "--price", "x=1"], "there are store_get"),
     ([*ARTICLE[1:], "--hours-are", "x"], "--hours-are 'measured'"), (["--objects", "3", "--bytes", "much"], "not a size")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be computed is exit code 2, and names the options that help."""
    assert run(["cost", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_prices_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--on-premises zeroes the store's prices, a file and --price replace others, and the last one wins."""
    (tmp_path / "prices.toml").write_text("[cpu_host]\nvalue = 5\n[mirror]\nvalue = 7\n")
    given = ["--prices", str(tmp_path / "prices.toml"), "--price", "cpu_host=0", "--on-premises"]
    found = lines(capsys, *ARTICLE, *given)
    prices = {line["name"]: line["value"] for line in found if line["kind"] == "price"}
    assert (prices["cpu_host"], prices["mirror"], prices["store_storage"]) == (0, 7, 0)
    assert options(found)["converted-copy"]["option_dollars"] == 0


def test_the_rate_of_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record and the step's rate say how long the GPUs wait."""
    turns = turn(RAW.name, 1000.0), turn(WARM, 500.0), turn("penstock", 69.0), turn("webdataset, boto3", 50.0)
    made_record(tmp_path, *turns, stored_bytes=11_500)
    arguments = ["--bench", str(tmp_path), "--step-rate", "138", "--price-per-hour", "10"]
    for size, given in (("5713.2GB", []), ("57132GB", ["--sample-bytes", "115KB"])):  # a record knows its samples' size
        found = lines(capsys, "cost", "--objects", "10", "--bytes", size, *arguments, *given)
        assert options(found, "full-speed")["idle-gpu"]["option_dollars"] == pytest.approx(10000, rel=1e-3)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has every table, a plot, and nothing from elsewhere; what a URL holds is text."""
    pytest.importorskip("matplotlib")
    (tmp_path / "<b>data").mkdir()
    (tmp_path / "<b>data/a").write_bytes(bytes(1000))
    target = tmp_path / "cost.html"
    assert run(["cost", f"{tmp_path}/<b>data/", "--epochs", "7", "--html", str(target)]) == 0
    page = target.read_text()
    assert all(
        f"<h2>{title}" in page for title in ("Options", "By epochs", "By size of an object", "Formulas", "Prices")
    )
    assert "&lt;b&gt;data" in page
    assert "<b>" not in page
    assert page.count("<svg") == 1
    for outside in ("<script", "<link", "src=", "url(http", "@import"):
        assert outside not in page
    assert "By epochs" in capsys.readouterr().out


def test_without_the_extra() -> None:
    """Without Jinja2 the page is an error that says what to install, before anything is listed; tables need no extra."""
    code = f"""import sys; sys.modules["jinja2"] = sys.modules["matplotlib"] = None
from penstock.cli.app import run
sys.exit(run({ARTICLE}) * 10 + run({[*ARTICLE, "--html", "x.html"]}))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert install_hint("bench") in done.stderr
    assert "whole-objects" in done.stdout
