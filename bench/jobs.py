"""Commands of penstock and of its peers, with the connection to a benchmark's server."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError

SLOW = {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()"]
RUN = [*PENSTOCK, "run"]
CONNECTION = {
    "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull,
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
COMMAND_S_MAX = 600


def environment(origin: Origin | None, **variables: str) -> dict[str, str]:
    """Return the variables of a command: those of this process without its connection, and the connection to `origin`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SM_"))}
    endpoint = {} if origin is None else {"AWS_ENDPOINT_URL": origin.url}
    return {**inherited, **CONNECTION, **endpoint, **variables}


def program(origin: Origin | None, *words: Any, **variables: str) -> str:
    """Run a command with the connection to the store, and return what it printed."""
    found = subprocess.run(
        [str(word) for word in words], env=environment(origin, **variables),
        capture_output=True, text=True, check=False, timeout=COMMAND_S_MAX,
    )  # fmt: skip
    if found.returncode:
        raise BenchError(f"{' '.join(map(str, words))}: status {found.returncode}\n{found.stderr[-2000:]}")
    return found.stdout
