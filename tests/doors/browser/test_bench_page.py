"""The pages of ``penstock bench`` in headless Chromium: light and dark, wide and narrow, with nothing but the file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from doors.browser.chromium import Chromium
from doors.browser.test_status_page import LOW_CONTRAST
from measuring import made_record, turn
from penstock.bench.clients import RAW, STEP_ALONE, UNDECODED
from penstock.bench.page import write_page
from penstock.bench.record import BenchRecord

HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
RATES = {
    RAW.name: 900, UNDECODED.name: 600, STEP_ALONE.name: 800, "penstock": 500, "penstock, processes": 450,
    "webdataset, pipe:aws": 150, "connector, iterable": 220,
}  # fmt: skip
SHAPES = {
    "wide": {"width": 1200, "height": 1000, "deviceScaleFactor": 1, "mobile": False},
    "narrow": {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True},
}
OVERFLOWING = """
[...document.body.querySelectorAll("*")]
  .filter((each) => !each.closest(".panel > *") && each.getBoundingClientRect().right > innerWidth + 0.5)
  .map((each) => each.outerHTML.slice(0, 100))
"""
FILLS = """
[...new Set([...document.querySelectorAll("svg text")].map((each) => getComputedStyle(each).fill))]
"""
OUTSIDE = """
[...document.querySelectorAll("svg")].flatMap((plot) => [...plot.querySelectorAll("text")].filter((text) => {
  const [inner, outer] = [text.getBoundingClientRect(), plot.getBoundingClientRect()];
  return inner.left < outer.left - 1 || inner.right > outer.right + 1
    || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
}).map((text) => text.textContent))
"""

OVERLAPPING = """
[...document.querySelectorAll("svg")].flatMap((plot) => {
  const texts = [...plot.querySelectorAll("text")].filter((text) => !text.closest("[transform*='rotate(-90']"));
  const boxes = texts.map((text) => text.getBoundingClientRect());
  return texts.flatMap((text, i) => texts.slice(i + 1).filter((_, k) => {
    const [a, b] = [boxes[i], boxes[i + 1 + k]];
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && height > 2;
  }).map((other) => text.textContent + " | " + other.textContent));
})
"""


def record(folder: Path, factor: float) -> BenchRecord:
    more = {name: {"is_ours": name.startswith("penstock"), "stall_ratio": 0.4} for name in RATES}
    turns = [
        turn(
            name,
            factor * rate * workers**0.5 * (1 - 0.1 * number),
            number=number,
            settings={"workers": workers},
            **more[name],
        )
        for number in range(2)
        for workers in (1, 2, 4)
        for name, rate in RATES.items()
    ]
    return made_record(
        folder, *turns, settings={"decode": True, "step": "gpu", "sweep": {"workers": [1, 2, 4]}}, image=HOSTILE,
        not_run={"Ray Data": f"failed: {HOSTILE}", "datasets": "not installed: datasets, s3fs"},
        url="s3://a-bucket-with-a-long-name/" + "imagenet-1k-train/" * 5,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("runs_count", [1, 2])
def test_both_colour_schemes(runs_count: int, scheme: str, tmp_path: Path) -> None:
    """Text stands out by WCAG's ratio of 4.5, no text is cut off, and nothing is wider than a narrow window."""
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS", tmp_path))
    page = tmp_path / "report.html"
    write_page([record(tmp_path / f"run-{number}", 1 + number) for number in range(runs_count)], page)

    async def visit() -> None:
        async with Chromium() as browser:
            await browser.send(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
            )
            await browser.open(page.as_uri())
            for name, shape in SHAPES.items():
                await browser.send("Emulation.setDeviceMetricsOverride", **shape)
                await browser.screenshot(folder / f"bench-{runs_count}-{scheme}-{name}.png")
                assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
                assert await browser.evaluate(OVERFLOWING) == []
                assert await browser.evaluate(OUTSIDE) == []
                assert await browser.evaluate(OVERLAPPING) == []
            await check(browser)

    async def check(browser: Chromium) -> None:
        ground = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (scheme == "light")
        assert await browser.evaluate(LOW_CONTRAST) == []
        assert await browser.evaluate(FILLS) == [await browser.evaluate("getComputedStyle(document.body).color")]
        assert await browser.evaluate("document.querySelectorAll('svg[role=img][aria-label]').length") >= 1
        assert await browser.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
        assert HOSTILE in await browser.evaluate("document.body.textContent")
        assert (await browser.evaluate("document.title")).startswith("penstock bench")
        sent: list[Any] = [each for each in browser.events if each["method"] == "Network.requestWillBeSent"]
        assert {each["params"]["request"]["url"] for each in sent} == {page.as_uri()}
        assert browser.complaints() == []

    asyncio.run(visit())
