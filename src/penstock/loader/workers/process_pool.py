"""Worker processes as their loader sees them: it starts them, gives them jobs, restarts and ends them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.loader.workers.messages import JobEnded, MessageChannel, pickled_by_value
from penstock.loader.workers.shared_memory import map_memory
from penstock.processes.starting import described_end, python_path, worker_command

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from penstock.loader.position import FeedPosition
    from penstock.loader.workers.messages import WorkerJob

EXIT_S_MAX = 2.0


class WorkerProcess:
    """One worker process, as its loader sees it.

    Args:
        job: First job of the process.

    Attributes:
        number: Number of the worker, from 0.
        channel: Connection to the process.
        done_count: Number of batches of the run whose rows it has written, itself or a process that it replaced.
        position: Position of its lanes after these batches, if it has reported one.
        failure: Error that ended it.
        deaths_count: Number of processes that have died in its place since a batch was done.
        sums: Counters of the process, by name.
        slots: Slots that it has map_memory.
        heaps: Values of variable length that it wrote, by slot.
    """

    def __init__(self, job: WorkerJob) -> None:
        self._begin(job)
        self._start()

    def take_job(self, job: WorkerJob) -> None:
        """Do another job, after the process has sent ``JobEnded`` for the one before."""
        data = pickled_by_value(job)
        self._begin(job)
        self.send_raw(data)

    def _begin(self, job: WorkerJob) -> None:
        self.number = job.number
        self.done_count = job.first_batch
        self.position: FeedPosition | None = None
        self.failure: BaseException | None = None
        self.deaths_count = 0
        self.heaps: dict[int, mmap.mmap] = {}
        self.sums: Mapping[str, float] = {}
        self.slots: set[int] = set()
        self._job = job

    def _start(self) -> None:
        data = pickled_by_value(self._job)  # before there is a process: it may fail
        ours, theirs = socket.socketpair()
        self.channel = MessageChannel(ours)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    worker_command("penstock.loader.workers.worker", theirs),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "CUDA_VISIBLE_DEVICES": "",
                        "OPENCV_FOR_THREADS_NUM": "1",  # as many workers as there are cores are faster with one each
                        "PYTHONPATH": python_path(),
                    },
                    process_group=0,  # a terminal's Ctrl-C goes to the loader, which decides
                )
        except BaseException:
            self.channel.close()
            raise
        self.send_raw(data)

    def send(self, message: Any, *, descriptor: int | None = None) -> None:
        """Send a message. If the process is gone, its receiver will notice."""
        with suppress(OSError):
            self.channel.send(message, descriptor=descriptor)

    def send_raw(self, data: bytes) -> None:
        """Send a message that has been pickled. If the process is gone, its receiver will notice."""
        with suppress(OSError):
            self.channel.send_raw(data)

    def add_heap(self, slot: int, descriptor: int, size_bytes: int) -> None:
        """Read the values of variable length of this slot's batches from this memory, from now on."""
        self.heaps[slot] = map_memory(descriptor, size_bytes)

    def restart(self) -> None:
        """Start another process in its place, for the batches that it has not finished."""
        self.channel.close()
        self.process.wait()
        deaths_count = self.deaths_count + 1
        self._begin(self._job.remaining_after(self.done_count, self.position))
        self.deaths_count = deaths_count
        self._start()

    def wait_ended(self) -> bool:
        """Wait at most ``EXIT_S_MAX`` seconds for the process to end its job after an ``EndJob``. Returns whether it did."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        try:
            while poll.poll(EXIT_S_MAX * 1000):
                if isinstance(self.channel.receive()[0], JobEnded):
                    return True
        except (EOFError, OSError):
            return False
        return False

    def is_alive(self) -> bool:
        """Whether the process has not ended. ``poll`` alone gives None also while another thread waits for the process."""
        if self.process.poll() is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def described(self) -> str:
        """The process, for people."""
        return f"worker process {self.number} (pid {self.process.pid})"

    def described_end(self) -> str:
        """How the process ended, for people."""
        try:
            code = self.process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"{self.described()} closed its end"
        return f"{self.described()} {described_end(code)}"

    def close(self) -> None:
        """Kill the process, which holds nothing that it would have to finish; idempotent."""
        self.process.kill()
        self.channel.close()
        self.process.wait()


class ProcessPool:
    """Worker processes that wait between epochs: starting one costs about half a second of a core."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._idle: list[WorkerProcess] = []
        self._closed = False

    def take(self, job: WorkerJob) -> WorkerProcess:
        """A process that does this job: one that waits, or else a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                worker.take_job(job)
                return worker
            worker.close()
        return WorkerProcess(job)

    def give_back(self, worker: WorkerProcess) -> None:
        """Keep a process that has ended its job."""
        if self._closed:
            worker.close()
        else:
            self._idle.append(worker)

    def close(self) -> None:
        """End the processes that wait, and later those that are given back; idempotent."""
        if os.getpid() != self._process_id:
            return
        self._closed = True
        while self._idle:
            self._idle.pop().close()
