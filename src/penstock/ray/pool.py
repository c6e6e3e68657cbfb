"""The workers on a cluster, as their loader sees them: which machine each runs on, and when it moves to another.

A loader has as many workers as its lanes are divided among, for the whole epoch; each is a process on some machine of the
cluster, and a machine may run several. A machine joins: some workers are started again there. A machine is lost: its workers
are started again on the others. So lanes stay where they are divided, and only processes move.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.config import MIB
from penstock.errors import ClosedError, ClusterLostError, ConfigError, PenstockError, WorkerDiedError
from penstock.loader.workers.landing import LandingChannel
from penstock.loader.workers.messages import MessageChannel, pickled_by_value
from penstock.loader.workers.process_pool import Worker, WorkerPool
from penstock.processes.starting import python_path, worker_command
from penstock.ray.connecting import BrokerFailed, CountAllowed, HostJoined, HostLeft, HostsWanted, connect
from penstock.ray.elastic import Elasticity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.loader.statistics import Meter
    from penstock.loader.workers.messages import WorkerJob
    from penstock.ray.workers import Workers

_log = logging.getLogger("penstock.loader")

AHEAD_BYTES = 256 * MIB
JOIN_S_MAX = 3.0
"""Seconds that the first machine waits for the others, before it gets all workers."""
RESTART_S = 2.0
"""Seconds between two attempts to join the cluster."""
REJOIN_S = 15.0
"""Seconds after the loss of the last machine, after which the cluster is joined anew, and each time twice as many: Ray does not
tell that the head has restarted, and starts nothing for a process that had joined before."""
CLOSE_S_MAX, CLOSE_EARLY_S_MAX = 10.0, 1.0
"""Seconds that the broker may take to end; the second, before a machine has joined, when Ray may be waiting for the cluster."""
_CLOSED = "the loader was closed while it waited for the Ray cluster"


@dataclass(slots=True, eq=False)
class Machine:
    """An actor on a machine of the cluster.

    Attributes:
        name: Name of the actor.
        node: Address of the machine.
        port: Port at which it listens.
        secret: The secret that it knows.
        workers: The workers that run there.
        is_leaving: Whether it is given back when its workers have moved.
    """

    name: str
    node: str
    port: int
    secret: bytes = field(repr=False)
    workers: set[RayWorker] = field(default_factory=set)
    is_leaving: bool = False


class RayWorker(Worker):
    """A worker on a machine of the cluster.

    Args:
        job: First job of the worker.
        pool: Finds a machine for it.
    """

    channel: LandingChannel

    def __init__(self, job: WorkerJob, pool: RayPool) -> None:
        self._pool = pool
        self._last: Machine | None = None
        self.machine: Machine | None = None
        super().__init__(job)

    @property
    def job(self) -> WorkerJob:
        """The job that it does."""
        return self._job

    def _start(self) -> None:
        data = pickled_by_value(self._job)
        end, self.machine = self._pool.connect(avoided=self._last)
        self.machine.workers.add(self)
        self.node = self.machine.node
        self.channel = LandingChannel(end)
        try:
            self.send_raw(data)
        except BaseException:  # Ctrl-C: nobody else knows this worker yet
            self.close()
            raise

    def is_alive(self) -> bool:
        """Whether the connection is there, and the worker is not overdue."""
        return not self.channel.is_ended and not self._is_overdue()

    def _is_overdue(self) -> bool:
        channel = self.channel
        return channel.is_waiting and time.monotonic() - channel.heard_s > self._pool.options.answer_s_max

    def described(self) -> str:
        """The worker, for people."""
        return f"worker {self.number} on node {self.node} of the Ray cluster"

    def death(self) -> WorkerDiedError:
        """The error that says what is known of its end."""
        what = "is gone"
        if self._is_overdue():
            what = f"has not finished its rows in {self._pool.options.answer_s_max:g} s"
        return WorkerDiedError(f"{self.described()} {what}", worker=self.number)

    def close(self) -> None:
        """Close the connection, which ends the process; idempotent."""
        self.channel.close()
        if self.machine is not None:
            self.machine.workers.discard(self)
            self._last, self.machine = self.machine, None

    def explained(self, error: BaseException) -> BaseException:
        """A module that a machine lacks is a matter of its environment."""
        if not isinstance(error, ImportError):
            return error
        named = ConfigError(
            f"node {self.node} of the Ray cluster lacks a package: {type(error).__name__}: {error}",
            hint="Workers(runtime_env={'pip': [...], 'py_modules': [...]}), or install it there",
        )
        named.__cause__ = error
        return named


class RayPool(WorkerPool):
    """The workers of one loader, and the machines that they run on. It is used by the thread that iterates.

    Args:
        options: The workers that the user asked for.
        meter: Counts the stalls of the loader.
        address: Address of the cluster; None has Ray find it.
    """

    restarts = True
    deaths_max = 4
    ahead_bytes = AHEAD_BYTES

    def __init__(self, options: Workers, meter: Meter, *, address: str | None) -> None:
        super().__init__(options.high)
        self.options = replace(options, address=address)
        self.threads_count = max(1, math.ceil(options.cpus))
        self._meter = meter
        self._elasticity = Elasticity(options.low, options.high)
        self._allowed_count = options.high if options.pool is None else options.low
        self._machines: dict[str, Machine] = {}
        self._why = "none has started: the cluster does not answer, or has no place for one"
        self._asked: tuple[int, int] = (0, 0)
        self._workers_count = options.high  # fewer if the rank has fewer lanes
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_first = True
        self._joined_s = 0.0  # when a machine last joined
        self._lost_s: float | None = None  # when the last machine was lost
        self._rejoin_s = REJOIN_S
        self._lock = threading.RLock()  # held by the thread that connects, and by one that closes
        self._start_broker()

    # ── machines ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_broker(self) -> None:
        self._started_s = time.monotonic()
        self._asked = (0, 0)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                worker_command("penstock.ray.broker", theirs),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
                process_group=0,
            )
        self._broker: MessageChannel | None = MessageChannel(ours)
        self._broker.send_raw(pickled_by_value(self.options))
        self._ask()

    def _end_broker(self, time_s_max: float = CLOSE_S_MAX) -> None:
        broker, self._broker = self._broker, None
        if broker is None:
            return
        broker.close()
        try:
            self._process.wait(time_s_max)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, dropped: Sequence[Machine] = ()) -> None:
        """Tell the broker how many machines there should be."""
        wish = min(self._elasticity.wanted_count, self._workers_count)
        asked = (min(wish, self._allowed_count), wish)
        if self._broker is None or (asked == self._asked and not dropped):
            return
        self._asked = asked
        with suppress(OSError):
            self._broker.send_raw(pickled_by_value(HostsWanted(*asked, tuple(each.name for each in dropped))))

    def _hear(self) -> None:
        """Take the messages of the broker that have arrived.

        Raises:
            ConfigError: No machine can be used, for this reason.
        """
        poll = select.poll()
        while self._broker is not None:
            poll.register(self._broker.fileno(), select.POLLIN)
            if not poll.poll(0):
                return
            try:
                message, _ = self._broker.receive()
            except (EOFError, OSError):
                self._end_broker()
                return
            self._note(message)

    def _note(self, message: object) -> None:
        match message:
            case HostJoined(name, node, port, secret):
                self._machines[name] = Machine(name, node, port, secret)
                self._joined_s = time.monotonic()
                self._rejoin_s = REJOIN_S
            case HostLeft(name, why):
                self._why = why or self._why
                self._forget(name)
            case CountAllowed(count):
                self._allowed_count = max(self.options.low, count)
            case BrokerFailed(failure):
                error = failure.revived()
                self._why = getattr(error, "what", str(error))
                if isinstance(error, ConfigError) and "no Ray cluster answers" not in self._why:
                    raise error
        self._meter.cluster_workers_count = len(self._machines)

    def connect(self, *, avoided: Machine | None) -> tuple[socket.socket, Machine]:
        """A connection to a new process on the machine that has the fewest, if possible not to one that was just lost.

        Raises:
            ClusterLostError: There has been no machine for ``wait_s`` seconds.
            ConfigError: No machine can be used, for another reason.
            ClosedError: The loader was closed meanwhile.
        """
        with self._lock:
            return self._connect(avoided)

    def _connect(self, avoided: Machine | None) -> tuple[socket.socket, Machine]:
        began_s = time.monotonic()
        while True:
            self._check_open()
            self._hear()
            usable = [each for each in self._machines.values() if not each.is_leaving] or list(self._machines.values())
            is_waited = self._is_first and 0 < len(usable) < self._asked[0]
            if is_waited and time.monotonic() - self._joined_s < JOIN_S_MAX:
                self._wait(0.1)
                continue
            self._is_first = self._is_first and not usable
            for machine in sorted(usable, key=lambda each: (each is avoided, len(each.workers))):
                try:
                    return connect(machine.node, machine.port, machine.secret), machine
                except (OSError, PenstockError):
                    self._lose(machine)
                    break
            else:
                if time.monotonic() - began_s > self.options.wait_s:
                    raise ClusterLostError(
                        f"no worker of the Ray cluster is left: {self._why}",
                        hint="Workers(fallback=True) goes on in this process",
                    )
                self._rejoin()
                self._wait(0.5)

    def _rejoin(self) -> None:
        """Join the cluster anew if the broker has ended, or brings no machine after all were lost."""
        now_s = time.monotonic()
        if self._broker is None:
            if now_s - self._started_s > RESTART_S:
                self._start_broker()
        elif self._lost_s is not None and now_s - max(self._lost_s, self._started_s) > self._rejoin_s:
            self._rejoin_s *= 2
            self._end_broker(0)

    def _wait(self, time_s_max: float) -> None:
        """Wait for the broker to say something.

        Raises:
            ClosedError: The loader was closed.
        """
        self._check_open()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._broker is not None:
            poll.register(self._broker.fileno(), select.POLLIN)
        poll.poll(time_s_max * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
            raise ClosedError(_CLOSED)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(_CLOSED)

    def _forget(self, name: str) -> None:
        if self._machines.pop(name, None) is not None and not self._machines:
            self._lost_s = time.monotonic()

    def _lose(self, machine: Machine) -> None:
        """Do without a machine that does not answer; the broker starts another."""
        self._why = f"node {machine.node} does not answer"
        self._forget(machine.name)
        self._meter.cluster_workers_count = len(self._machines)
        self._ask([machine])

    # ── workers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new(self, job: WorkerJob) -> Worker:
        return RayWorker(job, self)

    def take(self, job: WorkerJob) -> Worker:
        """A worker that does this job."""
        if job.number == 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._workers_count = job.workers_count
        self._ask()
        return super().take(job)

    def misplaced(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers to start again elsewhere, because machines have joined or are given back."""
        with suppress(ConfigError):
            self._hear()
        joined = [each for each in self._machines.values() if not each.is_leaving]
        self._elasticity.note(self._meter.elapsed_s, self._meter.stall_s, has_all=len(joined) >= self._asked[0])
        self._ask_fewer(joined)
        found: list[Worker] = []
        if not joined:
            return found
        most = math.ceil(len(workers) / len(joined))
        room = sum(max(0, most - len(each.workers)) for each in joined)
        for machine in self._machines.values():
            surplus = len(machine.workers) - (0 if machine.is_leaving else most)
            own = [each for each in workers if each in machine.workers and each.failure is None]
            found += own[: max(0, min(surplus, room - len(found)))]
        return found

    def _ask_fewer(self, joined: list[Machine]) -> None:
        """Have machines leave that are no longer wanted: their workers move first."""
        self._ask()
        for machine in sorted(joined, key=lambda each: len(each.workers))[: max(0, len(joined) - self._asked[0])]:
            machine.is_leaving = True
            joined.remove(machine)
        left = [each for each in self._machines.values() if each.is_leaving and not each.workers]
        for machine in left:
            del self._machines[machine.name]
        if left:
            self._ask(left)

    def interrupt(self) -> None:
        """Have a thread that waits for a machine raise ``ClosedError``."""
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the workers, and leave the cluster; idempotent."""
        if os.getpid() != self._process_id or self._closed:
            return
        self.interrupt()
        super().close()
        with self._lock:
            self._end_broker(CLOSE_S_MAX if self._joined_s else CLOSE_EARLY_S_MAX)
            self._machines.clear()
            os.close(self._wake)
