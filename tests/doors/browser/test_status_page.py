"""The status page of the gateway in headless Chromium: light and dark, with and without its script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from doors.browser.chromium import Chromium
from servers.gateway import Gateway, wait_until

HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
DATA = bytes(20_000_000)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of two processes that has served requests, of which some failed and one goes on."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.bin").write_bytes(DATA)
    (data / f"{HOSTILE.replace('/', '')}.txt").write_text("x")
    (tmp_path / "mine.py").write_text("def fail(reader, request):\n    raise ValueError('the transform failed')\n")
    (tmp_path / "gateway.toml").write_text(
        "port = 0\nworkers = 2\ncache = 'cache:100MB'\n"
        "[access_points.plain]\nupstream = 'data'\n"
        "[access_points.failing]\nupstream = 'data'\ntransform = 'mine:fail'\nprocesses = 1\n"
        "[access_points.small]\nupstream = 'data'\ntransform = 'gzip'\nprocesses = 1\n"
    )
    started = Gateway("--config", "gateway.toml", folder=tmp_path)
    for _ in range(5):
        started.get("/plain/a.bin")
    started.get("/small/a.bin")
    for key in ("a.bin", quote(f"{HOSTILE}.txt")):
        with pytest.raises((urllib.error.HTTPError, OSError)):
            started.get(f"/failing/{key}")
    yield started
    if started.process.poll() is None:
        started.kill()


@pytest.fixture
def slow(gateway: Gateway) -> Iterator[socket.socket]:
    """A client that has requested an object and takes only its beginning."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(b"GET /plain/a.bin HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: gateway.metric("penstock_gateway_requests_in_flight") == 1)
        yield client


def browse(visit: Callable[[Chromium], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Chromium() as browser:
            await visit(browser)

    asyncio.run(run())


def value(name: str) -> str:
    return f"document.querySelector('[data-value={name}]').textContent"


def rows(name: str) -> str:
    line = "[...line.cells].map(cell => cell.textContent)"
    return f"[...document.querySelectorAll('[data-table={name}] tr')].map(line => {line})"


def test_it_shows_what_happens(gateway: Gateway, slow: socket.socket) -> None:
    """Requests, transforms and errors are there at once and are refreshed; nothing of a key becomes markup."""

    async def visit(browser: Chromium) -> None:
        await browser.open(f"{gateway.url}/-/")
        assert await browser.evaluate(value("state")) == "serving"
        assert await browser.evaluate(value("in_flight")) == "1"
        live = await browser.evaluate(rows("live"))
        assert [row[0] for row in live] == ["GET /plain/a.bin"]
        points = {row[0]: row for row in await browser.evaluate(rows("access_points"))}
        assert points["small"][2:] == ["gzip", "1", "0"]
        assert points["failing"][2:] == ["mine:fail", "2", "2"]
        errors = " ".join(" ".join(row) for row in await browser.evaluate(rows("errors")))
        assert HOSTILE in errors
        assert "ValueError" in errors
        await browser.wait_for("document.documentElement.dataset.refreshed >= 1")
        before = int(await browser.evaluate(value("requests")))
        await asyncio.to_thread(gateway.get, "/plain/a.bin")
        await browser.wait_for(f"Number({value('requests')}) === {before + 1}")
        assert HOSTILE in " ".join(" ".join(row) for row in await browser.evaluate(rows("errors")))
        assert await browser.evaluate("document.title") == "penstock gateway"
        assert await browser.evaluate("document.images.length") == 0
        slow.close()
        await browser.wait_for(f"{value('in_flight')} === '0'")
        await browser.wait_for("!document.querySelector('[data-empty=live]').hidden")
        assert browser.complaints() == []

    browse(visit)


def test_it_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    """The page and its data are the only requests; inserted markup runs no script."""

    async def visit(browser: Chromium) -> None:
        await browser.open(f"{gateway.url}/-/")
        await browser.wait_for("document.documentElement.dataset.refreshed >= 1")
        requested = {
            event["params"]["request"]["url"]
            for event in browser.events
            if event["method"] == "Network.requestWillBeSent"
        }
        assert requested - {f"{gateway.url}/favicon.ico"} == {f"{gateway.url}/-/", f"{gateway.url}/-/status.json"}
        await browser.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')"
        )
        await browser.evaluate("new Promise(done => setTimeout(done, 200))")
        assert await browser.evaluate("document.title") == "penstock gateway"
        assert any("Content Security Policy" in text for text in browser.complaints())

    browse(visit)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes(gateway: Gateway, slow: socket.socket, scheme: str, tmp_path: Path) -> None:
    """Text stands out from its ground in both schemes by WCAG's ratio of 4.5, and nothing is wider than the window."""
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS", tmp_path))

    async def visit(browser: Chromium) -> None:
        await browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await browser.open(f"{gateway.url}/-/")
        await browser.screenshot(folder / f"status-{scheme}.png")
        ground = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (scheme == "light")
        assert await browser.evaluate(LOW_CONTRAST) == []
        assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await browser.send(
            "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True
        )
        assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth")

    browse(visit)
    assert (folder / f"status-{scheme}.png").stat().st_size > 10_000


LOW_CONTRAST = """
(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
  };
  const low = [];
  for (const element of document.body.querySelectorAll("*")) {
    const has = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!has || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const [a, b] = [light(parts(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(element.outerHTML.slice(0, 100));
  }
  return low;
})()
"""


def test_it_works_without_its_script(gateway: Gateway) -> None:
    """A browser without JavaScript shows the same numbers, as of when the page was loaded."""

    async def visit(browser: Chromium) -> None:
        await browser.send("Emulation.setScriptExecutionDisabled", value=True)
        await browser.open(f"{gateway.url}/-/")
        assert await browser.evaluate(value("state")) == "serving"
        assert len(await browser.evaluate(rows("access_points"))) == 3
        assert len(await browser.evaluate(rows("errors"))) >= 2
        assert await browser.evaluate("document.documentElement.dataset.refreshed") is None

    browse(visit)


def test_it_says_that_the_gateway_is_gone(gateway: Gateway) -> None:
    """When the gateway has ended, an open page says that it is not reachable."""

    async def visit(browser: Chromium) -> None:
        await browser.open(f"{gateway.url}/-/")
        with contextlib.suppress(ProcessLookupError):
            gateway.process.send_signal(signal.SIGKILL)
        await browser.wait_for(f"{value('state')} === 'not reachable'")

    browse(visit)


def test_other_pages_do_not_read_it(gateway: Gateway, tmp_path: Path) -> None:
    """A page of another origin can neither fetch the data nor put the page into a frame."""

    async def visit(browser: Chromium) -> None:
        page = tmp_path / "other.html"
        page.write_text("<!DOCTYPE html><title>other</title>")
        await browser.open(page.as_uri())
        fetched = await browser.evaluate(f"fetch('{gateway.url}/-/status.json').then(() => 'read', () => 'refused')")
        assert fetched == "refused"
        script = f"""new Promise(done => {{
            const frame = document.createElement('iframe');
            frame.onload = () => done(frame.contentDocument === null ? 'refused' : 'empty');
            frame.src = '{gateway.url}/-/';
            document.body.append(frame);
        }})"""
        assert await browser.evaluate(script) == "refused"
        assert any("frame-ancestors" in text or "Framing" in text for text in browser.complaints())

    browse(visit)
