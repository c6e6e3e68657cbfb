"""Clients with a new process for each turn: ``SCRIPT --client KIND ENDPOINT BUCKET WORD...`` prints one line of JSON."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

TURN_S_MAX = 600
"""Longest turn in seconds: several times what the slowest peer needs for 50 000 files on a quiet machine."""


def be_client(clients: Mapping[str, Callable[..., dict[str, Any]]], kind: str, *words: str) -> None:
    """Run one turn in the client's process, and print its answer with the resources that it used."""
    answer = clients[kind](*words)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu_s"] = sum(each.ru_utime + each.ru_stime for each in used)
    answer["memory_bytes"] = max(each.ru_maxrss for each in used) * 1024
    print(json.dumps(answer))


class OneTurn:
    """One client.

    Args:
        name: Name in the table.
        kind: Key in the script's ``CLIENTS``.
        script: Path of the benchmark.
        samples_count: Number of samples that the client must report; a client that does not count them reports None.
        words: Arguments after the bucket.
        python: Interpreter to use; by default the current one.
        options: Options to state in the report.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        script: str,
        samples_count: int,
        words: tuple[object, ...] = (),
        python: str = sys.executable,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.kind, self.options = name, kind, dict(options or {})
        self.versions: dict[str, str] = {}
        self._script, self._python, self._words = script, python, [str(word) for word in words]
        self._samples_count = samples_count
        self._origin: Any = None

    def start(self, origin: Any) -> None:
        self._origin = origin

    def close(self) -> None:
        """Do nothing, because no process outlives a turn."""

    def measure(self) -> dict[str, Any]:
        """Run one turn and return its answer.

        Raises:
            BenchError: The client failed, took too long, or did not do everything.
        """
        from clients import BUCKET

        from penstock.bench.process import BenchError

        command = [self._python, self._script, "--client", self.kind, self._origin.url, BUCKET, *self._words]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TURN_S_MAX)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{self.name} was not done after {TURN_S_MAX} s") from None
        if ended.returncode:
            raise BenchError(f"{self.name} ended with {ended.returncode}: {ended.stderr.strip()[-2000:]}")
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if answer["samples"] not in (None, self._samples_count):
            raise BenchError(f"{self.name} did {answer['samples']} samples, not {self._samples_count}")
        self.versions = answer["versions"]
        return answer
