"""Worker processes as their loader sees them: started, told what to do, restarted, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from penstock.loader.wire import Wire, by_value

if TYPE_CHECKING:
    from penstock.loader.worker import WorkerJob

EXIT_S_MAX = 5.0


class Worker:
    """One worker process, as its loader sees it.

    Args:
        number: From 0.
        told: What to do.
    """

    def __init__(self, number: int, told: WorkerJob) -> None:
        self.number = number
        self.told = told
        self.done_count = told.first_batch  # batches whose rows it has written
        self.restarts_count = 0
        self.failure: BaseException | None = None
        self.sums: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        said = by_value(self.told)  # may be refused: before there is a process
        ours, theirs = socket.socketpair()
        self.wire = Wire(ours)
        self.slots: set[int] = set()  # that it has mapped
        try:
            with theirs:
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
                environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "penstock.loader.worker", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            self.wire.send_raw(said)
        except BaseException:
            self.wire.close()
            raise

    def restart(self) -> None:
        """Start another process in its place, for the batches that it has not finished."""
        self.wire.close()
        self.process.wait()
        self.restarts_count += 1
        self.told = self.told._replace(first_batch=self.done_count)
        self._start()

    def described_end(self) -> str:
        """How the process ended, for people."""
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"worker process {self.number} (pid {self.process.pid}) {how}"

    def close(self) -> None:
        """End the process; idempotent."""
        self.wire.close()
        try:
            self.process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
