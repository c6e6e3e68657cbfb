"""The clients that take turns in a benchmark: drivers as subprocesses, wrk, and plain calls, all with one interface."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError, ClientProcess, client_environment

HERE = Path(__file__).resolve().parent
BUCKET = "bench"


KEYS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
}  # fmt: skip


class Client:
    """One driver process, ``peers/<script>_<driver>.py``, in its own venv. `options` are passed to its constructor."""

    script = "drive"
    environment: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed
    answer_s_max = 600.0

    def __init__(self, name: str, driver: str, **options: Any) -> None:
        self.name, self.driver, self.options = name, driver, options
        self.versions: dict[str, str] = {}
        self._process: ClientProcess | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the driver runs penstock, in the interpreter that runs the benchmark."""
        return self.driver.partition("_")[0] == "penstock"

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.is_ours else HERE / ".venvs" / self.driver / "bin" / "python"

    @property
    def command(self) -> list[str]:
        return [str(self.python), str(HERE / "peers" / f"{self.script}_{self.driver}.py")]

    def start(self, origin: Origin) -> None:
        if not self.python.exists():
            raise BenchError(f"{self.name}: {self.python} is missing; run bench/setup.sh")
        command = _trusting(origin.ca_path, self.command) if origin.ca_path else self.command
        inherited = {key: value for key, value in client_environment().items() if not key.startswith("AWS_")}
        tools = os.pathsep.join([str(HERE / ".venvs/awscli/bin"), os.environ["PATH"]])
        environment = {**inherited, **KEYS, "PATH": tools, **self.environment}
        self._process = ClientProcess(self.name, command, environment=environment, answer_s_max=self.answer_s_max)
        ca = str(origin.ca_path) if origin.ca_path else None
        opening = {"do": "open", "url": origin.url, "bucket": BUCKET, "ca": ca, "options": self.options}
        self.versions = self.ask(opening)["versions"]

    @property
    def pid(self) -> int:
        """Process id of the driver. The wrappers in the command replace themselves by it."""
        assert self._process is not None
        return self._process.pid

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        return self._process.ask(command)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _trusting(ca: Path, command: list[str]) -> list[str]:
    """Return `command` such that it sees the benchmark's CA as the system's bundle, because the CRT reads no other."""
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", f'mount --bind "$0" {bundle} && exec "$@"', str(ca), *command]


WRK_REPORT = """
done = function(s)
  local errors = s.errors.connect + s.errors.read + s.errors.write + s.errors.status + s.errors.timeout
  io.write(string.format("\\nRESULT %d %d %d %d\\n", s.duration, s.requests, s.bytes, errors))
end"""


class Wrk:
    """wrk on one thread, which neither signs requests nor keeps bodies: a lower bound of the cost. It runs for `seconds`."""

    name, driver = "wrk", "wrk"
    is_warmed = False

    def __init__(self, *, connections: int, seconds: float, script: str) -> None:
        self.connections, self.seconds, self.script = connections, seconds, script
        self.options = {"connections": connections, "threads": 1}
        self.versions: dict[str, str] = {}
        self._url = ""

    def start(self, origin: Origin) -> None:
        if not shutil.which("wrk"):
            raise BenchError("wrk is missing; run bench/setup.sh")
        text = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
        self.versions = {"wrk": re.search(r"wrk (?:debian/)?([\d.]+)", text)[1]}
        self._url = origin.url

    def measure(self, seconds: float | None = None) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
            file.write(f"{self.script}\n{WRK_REPORT}\n")
            file.flush()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [
                "wrk",
                "-t1",
                "--timeout",
                "30s",
                f"-c{self.connections}",
                f"-d{round(seconds or self.seconds)}s",
                "-s",
                file.name,
            ]
            out = subprocess.run([*command, self._url], capture_output=True, text=True, check=True).stdout
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        duration_us, requests, total, errors = map(int, re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", out).groups())
        if errors:
            raise BenchError(f"wrk: {errors} errors\n{out}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": duration_us / 1e6, "cpu_s": cpu_s, "bytes": total, "objects": requests}

    def close(self) -> None:
        """Nothing runs between measurements."""


def ran(*command: Any) -> str:
    """Return what the command printed. Raises ``BenchError`` with its standard error if it failed."""
    found = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if found.returncode:
        raise BenchError(f"{' '.join(map(str, command))}: status {found.returncode}\n{found.stderr[-2000:]}")
    return found.stdout


class Function:
    """A client that calls `function(*arguments)`, for questions that need no driver and no origin."""

    def __init__(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any, **about: Any) -> None:
        self.name, self.driver, self.options = name, "function", about
        self.versions: dict[str, str] = {}
        self._function, self._arguments = function, arguments

    def start(self, origin: Origin | None) -> None:
        """Nothing runs between measurements."""

    def measure(self) -> dict[str, Any]:
        return self._function(*self._arguments)

    def close(self) -> None:
        """Nothing runs between measurements."""
