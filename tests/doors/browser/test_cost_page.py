"""The page of ``penstock cost`` in headless Chromium: light, dark, narrow, and without a network."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from doors.browser.chromium import Chromium
from doors.browser.test_status_page import LOW_CONTRAST
from penstock.cli.app import run


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes(scheme: str, tmp_path: Path) -> None:
    """Text stands out by WCAG's ratio of 4.5, nothing is wider than a narrow window, and the file is all that is loaded."""
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS", tmp_path))
    page = tmp_path / "cost.html"
    case = ["--objects", "1000000", "--bytes", "100TB", "--price-per-hour", "28", "--hours", "20", "--busy", "0.25"]
    assert run(["cost", *case, "--html", str(page)]) == 0

    async def visit() -> None:
        async with Chromium() as browser:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await browser.send("Emulation.setEmulatedMedia", features=media)
            await browser.open(page.as_uri())
            await browser.screenshot(folder / f"cost-{scheme}.png")
            ground = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
            is_light = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 380
            assert is_light == (scheme == "light")
            assert await browser.evaluate(LOW_CONTRAST) == []
            shown = "[...document.querySelectorAll('%s')].map(each => each.textContent)"
            texts = set(await browser.evaluate(shown % "svg text"))
            names = await browser.evaluate(shown % "table:first-of-type tbody th")
            assert len(set(names) & texts) == 11
            assert {"epochs", "1", "10", "100", "US dollars without GPU hosts"} <= texts
            narrow = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
            for shape in ({}, narrow):
                if shape:
                    await browser.send("Emulation.setDeviceMetricsOverride", **shape)
                assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await browser.screenshot(folder / f"cost-{scheme}-narrow.png")
            sent = [each for each in browser.events if each["method"] == "Network.requestWillBeSent"]
            assert {each["params"]["request"]["url"] for each in sent} == {page.as_uri()}
            assert browser.complaints() == []

    asyncio.run(visit())
    assert (folder / f"cost-{scheme}.png").stat().st_size > 10_000
