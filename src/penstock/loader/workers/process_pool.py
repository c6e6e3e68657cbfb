"""Workers as their loader sees them: it starts them, gives them jobs, restarts and ends them.

``Worker`` is what a run needs of any worker, and ``WorkerPool`` of what starts workers. Here they are processes of this
machine; ``penstock.ray`` starts the same processes on other machines. They differ in the channel alone: a Unix socket that
shares memory, or a TCP connection over which rows arrive (``landing.py``).
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import WorkerDiedError
from penstock.loader.workers.messages import JobEnded, MessageChannel, pickled_by_value
from penstock.processes.starting import described_end, is_running, kill_group, python_path, worker_command

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    from penstock.loader.position import FeedPosition
    from penstock.loader.workers.landing import LandingChannel
    from penstock.loader.workers.messages import WorkerJob
    from penstock.loader.workers.shared_memory import SharedMemory

EXIT_S_MAX = 2.0


class Worker(ABC):
    """One worker, as its loader sees it: a process that owns some lanes, and may be replaced by another.

    Args:
        job: First job of the worker.

    Attributes:
        number: Number of the worker, from 0.
        channel: Connection to the process.
        node: Name of the machine that it runs on, for the statistics; "" for this one.
        done_count: Number of batches of the run whose rows it has written, itself or a process that it replaced.
        position: Position of its lanes after these batches, if it has reported one.
        failure: Error that ended it.
        deaths_count: Number of processes that have died in its place since a batch was done.
        sums: Counters of the process, by name.
        slots: Slots whose memory its channel has.
        heaps: Values of variable length that it wrote, by slot.
    """

    channel: MessageChannel | LandingChannel
    node = ""
    deaths_count: int
    _job: WorkerJob

    def __init__(self, job: WorkerJob) -> None:
        self.heaps: dict[int, mmap.mmap] = {}
        self._begin(job)
        self._start()

    def take_job(self, job: WorkerJob) -> None:
        """Do another job, after the process has sent ``JobEnded`` for the one before."""
        data = pickled_by_value(job)
        self.heaps = {}
        self._begin(job)
        self.send_raw(data)

    def restart(self, *, has_died: bool) -> None:
        """Start another process in its place, for the batches that it has not finished.

        Args:
            has_died: Whether the process has died; otherwise it moves.

        Raises:
            PenstockError: No other process can be started.
        """
        self.close()
        deaths_count = self.deaths_count + has_died
        self._begin(self._job.remaining_after(self.done_count, self.position))
        self.deaths_count = deaths_count
        self._start()

    def _begin(self, job: WorkerJob) -> None:
        """Note a job. The heaps stay: batches whose other rows are missing have their values there."""
        self.number = job.number
        self.done_count = job.first_batch
        self.position: FeedPosition | None = None
        self.failure: BaseException | None = None
        self.deaths_count = 0
        self.sums: Mapping[str, float] = {}
        self.slots: dict[int, SharedMemory] = {}
        self._job = job

    def send(self, message: Any, *, memory: SharedMemory | None = None) -> None:
        """Send a message. If the process is gone, its receiver will notice."""
        with suppress(OSError):
            self.channel.send(message, memory=memory)

    def send_raw(self, data: bytes) -> None:
        """Send a message that has been pickled. If the process is gone, its receiver will notice."""
        with suppress(OSError):
            self.channel.send_raw(data)

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

    @abstractmethod
    def _start(self) -> None:
        """Start a process, and send it the job."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the process has not ended."""

    @abstractmethod
    def described(self) -> str:
        """The process, for people."""

    @abstractmethod
    def death(self) -> WorkerDiedError:
        """The error that says how the process ended, after its channel has ended."""

    @abstractmethod
    def close(self) -> None:
        """End the process, which holds nothing that it would have to finish; idempotent."""

    def explained(self, error: BaseException) -> BaseException:
        """The error of a process that failed, as it is raised here."""
        return error


class WorkerProcess(Worker):
    """A worker process of this machine."""

    def _start(self) -> None:
        data = pickled_by_value(self._job)  # before there is a process: it may fail
        ours, theirs = socket.socketpair()
        self.channel = MessageChannel(ours)
        try:
            with theirs:
                self.process = start_process(theirs)
        except BaseException:
            self.channel.close()
            raise
        self.send_raw(data)

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return is_running(self.process)

    def described(self) -> str:
        """The process, for people."""
        return f"worker process {self.number} (pid {self.process.pid})"

    def death(self) -> WorkerDiedError:
        """The error that says how the process ended."""
        end_s = time.monotonic() + EXIT_S_MAX
        while (is_alive := self.is_alive()) and time.monotonic() < end_s:
            time.sleep(0.01)
        self.close()
        code = self.process.returncode
        text = f"{self.described()} {'closed its end' if is_alive else described_end(code)}"
        return WorkerDiedError(text, worker=self.number, process_id=self.process.pid, exit_code=code)

    def close(self) -> None:
        """Kill the process and what it has started; idempotent."""
        kill_group(self.process)
        self.channel.close()
        self.process.wait()


def start_process(end: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker process, whose loader is at the other end of this socket; the caller closes it here."""
    return subprocess.Popen(
        worker_command("penstock.loader.workers.worker", end),
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OPENCV_FOR_THREADS_NUM": "1",  # as many workers as there are cores are faster with one each
            "PYTHONPATH": python_path(),
        },
        process_group=0,  # a terminal's Ctrl-C goes to the loader, which decides
    )


class WorkerPool(ABC):
    """Workers that wait between epochs: starting one costs about half a second of a core.

    Args:
        count: Number of workers that are asked for.
    """

    restarts: ClassVar[bool] = False
    """Whether a worker that dies is replaced although the loader's options do not say so."""
    deaths_max: ClassVar[int] = 3
    """Processes that may die in one worker's place without a batch done: one that dies again and again will not stop."""
    ahead_bytes: ClassVar[int] = 0
    """Total size in bytes up to which more batches than ``prefetch_batches`` may be under way."""
    threads_count: int | None = None
    """Number of decode threads of a worker; None is an equal share of the loader's."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._process_id = os.getpid()
        self._idle: list[Worker] = []
        self._closed = False

    @abstractmethod
    def _new(self, job: WorkerJob) -> Worker:
        """Start a worker."""

    def take(self, job: WorkerJob) -> Worker:
        """A worker that does this job: one that waits, or else a new one.

        Raises:
            PenstockError: No worker can be started.
        """
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                worker.take_job(job)
                return worker
            worker.close()
        return self._new(job)

    def give_back(self, worker: Worker) -> None:
        """Keep a worker that has ended its job."""
        if self._closed:
            worker.close()
        else:
            self._idle.append(worker)

    def misplaced(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers of a run that should be restarted elsewhere. It is called often, and never blocks."""
        del workers
        return []

    def interrupt(self) -> None:  # noqa: B027 - only a pool on a cluster waits
        """Have a thread that waits for a worker to start raise ``ClosedError``."""

    def close(self) -> None:
        """End the workers that wait, and later those that are given back; idempotent."""
        if os.getpid() != self._process_id:
            return
        self._closed = True
        while self._idle:
            self._idle.pop().close()


class ProcessPool(WorkerPool):
    """Worker processes of this machine."""

    def _new(self, job: WorkerJob) -> Worker:
        return WorkerProcess(job)
