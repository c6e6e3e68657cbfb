"""Worker processes as their loader sees them: started, told what to do, restarted, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from penstock.loader.workers.slots import mapped
from penstock.loader.workers.wire import MessageChannel, by_value

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from penstock.loader.position import FeedPosition
    from penstock.loader.workers.worker_job import WorkerJob

EXIT_S_MAX = 2.0


class WorkerProcess:
    """One worker process, as its loader sees it.

    Args:
        told: What to do.

    Attributes:
        done_count: Batches whose rows it has written, or whose rows another process wrote in its place.
        position: Where its lanes are behind these.
        failure: What ended it.
        sums: What it counted.
        slots: Which it has mapped.
        heaps: Its values of any length, by slot.
        deaths_count: Of processes in its place since a batch was done.
    """

    def __init__(self, told: WorkerJob) -> None:
        self._is_told(told)
        self._start()

    def begin(self, told: WorkerJob) -> None:
        """Have it do another job, after it said that it ended the one before."""
        said = by_value(told)
        self._is_told(told)
        self.send_raw(said)

    def _is_told(self, told: WorkerJob) -> None:
        self.number = told.number
        self.done_count = told.first_batch
        self.position: FeedPosition = told.position
        self.failure: BaseException | None = None
        self.deaths_count = 0
        self.heaps: dict[int, mmap.mmap] = {}
        self.sums: Mapping[str, float] = {}
        self.slots: set[int] = set()
        self._told = told

    def _start(self) -> None:
        said = by_value(self._told)  # may be refused: before there is a process
        ours, theirs = socket.socketpair()
        self.wire = MessageChannel(ours)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "penstock.loader.workers.worker", str(theirs.fileno()), str(_parent())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "CUDA_VISIBLE_DEVICES": "",
                        "OPENCV_FOR_THREADS_NUM": "1",  # as many workers as there are cores do better one by one
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    },
                    process_group=0,  # a terminal's Ctrl-C is the loader's to answer
                )
        except BaseException:
            self.wire.close()
            raise
        self.send_raw(said)

    def send(self, message: Any, *, descriptor: int | None = None) -> None:
        """Tell it something. One that is gone is noticed by who listens to it."""
        try:
            self.wire.send(message, descriptor=descriptor)
        except OSError:
            return

    def send_raw(self, data: bytes) -> None:
        """The same, of a message that is pickled already."""
        try:
            self.wire.send_raw(data)
        except OSError:
            return

    def add_heap(self, slot: int, descriptor: int, size_bytes: int) -> None:
        """Values of a slot's batches come in this memory from now on."""
        self.heaps[slot] = mapped(descriptor, size_bytes)

    def restart(self) -> None:
        """Start another process in its place, for the batches that it has not finished."""
        self.wire.close()
        self.process.wait()
        deaths_count = self.deaths_count + 1
        self._is_told(self._told.behind(self.done_count, self.position))
        self.deaths_count = deaths_count
        self._start()

    def is_alive(self) -> bool:
        """Whether the process has not ended. ``poll`` alone says so also while another thread waits for it."""
        if self.process.poll() is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def described(self) -> str:
        """It, for people."""
        return f"worker process {self.number} (pid {self.process.pid})"

    def described_end(self) -> str:
        """How the process ended, for people."""
        try:
            code = self.process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"{self.described()} closed its end"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{self.described()} {how}"

    def close(self) -> None:
        """End the process; idempotent. It holds nothing that it would have to finish."""
        self.process.kill()
        self.wire.close()
        self.process.wait()


class ProcessPool:
    """Processes that wait between epochs: to start one costs about half a second of a core."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._idle: list[WorkerProcess] = []
        self._closed = False

    def take(self, told: WorkerJob) -> WorkerProcess:
        """One that does this: one that waits, else a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                worker.begin(told)
                return worker
            worker.close()
        return WorkerProcess(told)

    def give_back(self, worker: WorkerProcess) -> None:
        """It has nothing to do."""
        if self._closed:
            worker.close()
        else:
            self._idle.append(worker)

    def close(self) -> None:
        """End those that wait, and later those that are given back; idempotent."""
        if os.getpid() != self._process_id:
            return
        self._closed = True
        while self._idle:
            self._idle.pop().close()


def _parent() -> int:
    """This process's id, where its death is told by the kernel: to children of its main thread, which lives as long."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0
