"""Headless Chromium, driven by its DevTools protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1200,1000",
    "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
WAIT_S = 30.0


class Chromium:
    """One page in a browser of its own, with a profile that is removed afterwards."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def __aenter__(self) -> Self:
        program = shutil.which("chromium")
        assert program, "chromium is not installed: apt-get install chromium"
        self._profile = tempfile.mkdtemp(prefix="penstock-chromium-")
        self._process = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._session = aiohttp.ClientSession()
        async with asyncio.timeout(WAIT_S):
            port_file = Path(self._profile) / "DevToolsActivePort"
            while not port_file.exists() or not port_file.read_text():
                assert self._process.returncode is None, "chromium ended"
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
                page = next(each for each in await answer.json() if each["type"] == "page")
            self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 26)
        self._hearing = asyncio.create_task(self._hear())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        await self._socket.close()
        await self._session.close()
        self._process.terminate()
        await self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _hear(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            else:
                self.events.append(data)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(WAIT_S):
            answer = await future
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(WAIT_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        """Load a page."""
        self.events.clear()
        await self.send("Page.navigate", url=url)
        await self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")

    async def screenshot(self, path: Path) -> None:
        """Write what the page shows as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the page's policy refused."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found
