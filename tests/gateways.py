"""``penstock gateway`` in a process of its own, for tests with other people's clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ACCESS_KEY, SECRET_KEY, REGION = "AKPENSTOCKCLIENTS000", "clients/secret/clients/secret/clients/s", "us-east-1"


class RunningGateway:
    """A gateway that listens on a free port of loopback.

    Args:
        folder: Folder for its cache.
        flags: Options of the command.
        upstream: Environment variables with which it finds its upstream.

    Attributes:
        url: Its URL.
        environment: Variables with which AWS clients find it and its keys.
    """

    def __init__(self, folder: Path, *flags: str, upstream: Mapping[str, str] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        started_with = environment | dict(upstream or {})
        started_with["PENSTOCK_GATEWAY_KEYS"] = f"{ACCESS_KEY}:{SECRET_KEY}:rw"
        cache = f"{folder}/cache:2GB,free_ratio_min=0"  # a machine whose disk is nearly full would not keep anything
        command = [sys.executable, "-m", "penstock", "gateway", "--port", "0", "--cache", cache, *flags]
        self._process = subprocess.Popen(command, env=started_with, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(60), "".join(self.lines)
        found = re.search(r"at (http://\S+)", "".join(self.lines))
        assert found is not None, "".join(self.lines)
        self.url = found[1]
        self.environment = environment | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if " at http://" in line:
                self._ready.set()
        self._ready.set()

    def transforms_count(self) -> float:
        """Return how many transforms were started: those that have ended, and those that run, without those of indexes."""
        text = urllib.request.urlopen(f"{self.url}/-/metrics").read().decode()
        name = r'^penstock_gateway_result_runs(?:_total|_in_flight)(?:\{(?!access_point="[^"]*/index")[^}]*\})? ([\d.e+]+)$'
        return sum(map(float, re.findall(name, text, re.MULTILINE)))

    def close(self) -> None:
        """End the gateway, which must end by itself, without an error."""
        self._process.terminate()
        code = self._process.wait(30)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        assert code in (0, 143), f"status {code}\n{''.join(self.lines[-50:])}"
