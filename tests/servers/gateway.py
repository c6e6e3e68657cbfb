"""``penstock gateway`` as a process, and its files and processes for tests to look at."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WAIT_S = 60.0
COUNTED_S = 5.0  # within which everything that was sent is counted as well


class Gateway:
    """A running ``penstock gateway``."""

    def __init__(self, *arguments: str, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.log = folder / "gateway.log"
        command = [sys.executable, "-W", "error", "-m", "penstock", "gateway", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stderr=log, stdout=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
            )
        wait_until(lambda: "serving" in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text
        found = re.search(r" at (https?://\S+) ", self.text)
        assert found, self.text
        self.url = found[1]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def text(self) -> str:
        return self.log.read_text()

    def workers(self) -> list[int]:
        """Processes that this one started, in the order of their numbers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(number) for number in children.split()]

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        context: ssl.SSLContext | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        request = urllib.request.Request(self.url + path, headers=headers or {}, method=method)
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
            body: bytes = answer.read()
        return body

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.get("/-/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{re.escape(name)}[ {{]", line))

    def assert_metrics(self, expected: Mapping[str, float]) -> None:
        """Assert that metrics have these values, or will soon: some are counted just after the last byte was sent."""
        end_s = time.monotonic() + COUNTED_S
        while (found := {name: self.metric(name) for name in expected}) != expected and time.monotonic() < end_s:
            time.sleep(0.02)
        assert found == expected

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


def wait_until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.02)
