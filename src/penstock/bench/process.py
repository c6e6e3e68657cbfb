"""``ClientProcess``: a client of a benchmark in a process of its own, which is told what to do by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.processes.group import GUARD
from penstock.processes.starting import described_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCE = Path(__file__).resolve().parents[2]
"""The folder that holds the package, for interpreters in which it is not installed."""
END_S_MAX = 5.0
_PATH = "PYTHONPATH"
ERROR_CHARACTERS = 2000


class BenchError(PenstockError):
    """A client failed, did not answer in time, or delivered something else than it should."""


class ClientProcess:
    """A process that answers commands; ``clients/loop.py`` is the other side. It ends with this process.

    Args:
        name: Name of the client in tables.
        command: The program and its arguments.
        environment: Variables in place of those of this process.
        answer_s_max: Seconds after which a client that has not answered is killed, with everything that it started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        answer_s_max: float = 600.0,
    ) -> None:
        self.name = name
        self._answer_s_max = answer_s_max
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() closes it
        self._process = subprocess.Popen(
            command,
            env=None if environment is None else dict(environment),
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        GUARD.watch(self.pid)
        self._is_late = False

    @property
    def pid(self) -> int:
        """Process id of the client, also that of its group."""
        return self._process.pid

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            BenchError: The client failed, ended, or did not answer in time; it has the end of what the client printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._answer_s_max, self._end_late)
        timer.daemon = True  # Ctrl-C may come while it starts, and the interpreter waits for other threads at its end
        try:
            timer.start()
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            reason = f"did not answer within {self._answer_s_max:g} s"
            if not self._is_late:
                reason = described_end(self._process.wait(END_S_MAX))
            raise BenchError(f"{self.name} {reason}\n{self._printed()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}\n{self._printed()}")
        return answer

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-ERROR_CHARACTERS:]

    def close(self) -> None:
        """End the client, and the processes that it leaves behind; may be called twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait in the kernel for another program's mount
            self._process.wait(END_S_MAX)
        GUARD.release(self.pid)
        self._process.stdout.close()
        self._errors.close()

    def _end_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group is there as long as one of its processes is
            os.killpg(self.pid, signal.SIGKILL)


def client_command(module: str, python: str = sys.executable) -> list[str]:
    """Return the command of one of ``penstock.bench.clients``."""
    return [python, "-m", "penstock.bench.clients", module]


def client_environment(**variables: str) -> dict[str, str]:
    """Return the variables of a client: those of this process, and this package on the path of other interpreters."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get(_PATH, "")]))
    return {**os.environ, _PATH: path, **variables}
