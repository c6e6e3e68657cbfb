"""Several worker processes behind one port: starts them, restarts those that die, and ends them.

The supervisor answers no request. It holds the listening sockets, so that connections wait while a worker is started again,
and one end of a channel to each worker. A worker that reads the end of its channel drains and ends, so no worker survives a
killed supervisor. Messages are JSON, so that no message of a worker can run code here; the first message to a
worker holds its ``WorkerOrder`` as a pickle.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.gateway.serving.snapshots import fold
from penstock.processes.channel import JsonChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.gateway.authentication.keys import AccessKeys
    from penstock.gateway.serving.assembly import WorkerOrder
    from penstock.gateway.serving.journal import Journal
    from penstock.gateway.serving.snapshots import Snapshot

START_S_MAX = 120.0
"""Longest time from starting a worker until it answers; imports of frameworks in transforms take tens of seconds."""

BACKOFF_S = 0.2
BACKOFF_S_MAX = 10.0
STABLE_S = 30.0
"""A worker that lived for this time is restarted without a wait."""

REPORT_S_MAX = 1.0
POLL_S = 5.0
KILL_S = 5.0
"""Time beyond the drain that a worker has for ending its transforms; then it is killed."""

EXIT_INTERRUPTED = 130


class WorkerSlot:
    """A slot for a worker process. Each process in it gets the same listening socket.

    Attributes:
        index: Number of the place, from 0.
        listener: Listening socket.
        process: The process; None before the first one.
        channel: Connection to it; None while there is no process.
        is_ready: Whether it answers requests.
        failure: Why it could not start.
        failure_code: Exit code for that: 2 if the configuration cannot be served.
        last: The last snapshot that it sent.
    """

    def __init__(self, index: int, listener: socket.socket) -> None:
        self.index = index
        self.listener = listener
        self.process: asyncio.subprocess.Process | None = None
        self.channel: JsonChannel | None = None
        self.is_ready = False
        self.failure = ""
        self.failure_code = 1
        self.last: Snapshot | None = None
        self.started = asyncio.Event()
        """Set when the first process of the slot is ready, or has failed."""

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


class Supervisor:
    """Runs worker processes until a signal stops it.

    Args:
        order: The configuration and keys of the workers.
        listeners: One listening socket per worker.
        journal: Takes the supervisor's messages.
        read_keys: Reads the access keys again; called on SIGHUP.
        on_ready: Called once when all workers answer.
    """

    def __init__(
        self,
        order: WorkerOrder,
        listeners: Sequence[socket.socket],
        *,
        journal: Journal,
        read_keys: Callable[[], AccessKeys | None],
        on_ready: Callable[[], None],
    ) -> None:
        self._order = order
        self._journal = journal
        self._read_keys = read_keys
        self._on_ready = on_ready
        self._slots = [WorkerSlot(index, listener) for index, listener in enumerate(listeners)]
        self._ended: Snapshot | None = None
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._restarts = 0
        self._reports: dict[tuple[int, int], asyncio.Future[Snapshot]] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal arrives; return the exit code."""
        loop = asyncio.get_running_loop()
        interrupts: list[int] = []

        def on_signal(number: int) -> None:
            interrupts.append(number)
            if self._stop.is_set() and number == signal.SIGINT:
                self._kill.set()
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        try:
            await self._serve()
        finally:
            for slot in self._slots:
                slot.listener.close()
        whole = await self._end(keepers)
        failures = [slot.failure for slot in self._slots if slot.failure and not interrupts]
        for failure in failures[:1]:
            self._journal.say(failure, level="error")
        if failures:
            return max(slot.failure_code for slot in self._slots)
        if self._kill.is_set() or signal.SIGINT in interrupts:
            return EXIT_INTERRUPTED
        return 0 if whole else 1

    async def _serve(self) -> None:
        """Wait until all workers are ready, and then for the signal to stop."""
        starting = asyncio.gather(*(slot.started.wait() for slot in self._slots))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        elif any(slot.failure for slot in self._slots):
            self._stop.set()
        else:
            self._on_ready()
        while not self._stop.is_set():
            await asyncio.wait((stopping,), timeout=POLL_S)
            if not self._stop.is_set():
                await self._collect()  # so that little is lost of the counters of a worker that is killed
        await stopping

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> bool:
        """End all workers; return whether none had to be killed."""
        for slot in self._slots:
            if slot.channel is not None:
                slot.channel.send({"kind": "drain"})
        killing = asyncio.create_task(self._kill.wait())
        everything = asyncio.gather(*keepers)
        limit_s = self._order.config.drain_s_max + KILL_S
        await asyncio.wait((everything, killing), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        whole = everything.done()
        for slot in self._slots:
            slot.kill()
        killing.cancel()
        await everything
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        codes = [slot.process.returncode for slot in self._slots if slot.process is not None]
        return whole and not any(codes)

    async def _keep(self, slot: WorkerSlot) -> None:
        """Keep a process in a slot until the gateway stops."""
        backoff_s = BACKOFF_S
        while not self._stop.is_set():
            begun_s = time.monotonic()
            code = await self._run(slot)
            if self._stop.is_set():
                return
            was_first = not slot.started.is_set()
            if was_first:
                slot.failure = slot.failure or f"a worker process ended with code {code} before it was ready"
                slot.started.set()
                return
            self._restarts += 1
            wait_s = 0.0 if time.monotonic() - begun_s > STABLE_S else backoff_s
            backoff_s = BACKOFF_S if wait_s == 0 else min(2 * backoff_s, BACKOFF_S_MAX)
            reason = slot.failure or f"it ended with code {code}"
            slot.failure = ""
            self._journal.say(
                f"worker {slot.index} is started again in {wait_s:.1f} s: {reason}", level="error", exit_code=code
            )
            waiting = asyncio.create_task(self._stop.wait())
            await asyncio.wait((waiting,), timeout=wait_s)
            waiting.cancel()

    async def _run(self, slot: WorkerSlot) -> int:
        """Start a process in a slot, take its messages until it ends, and return its exit code."""
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), slot.listener.fileno())
        command = [sys.executable, "-m", "penstock.gateway.serving.worker", *map(str, fds)]
        with theirs:
            slot.process = await asyncio.create_subprocess_exec(
                *command, pass_fds=fds, stdin=asyncio.subprocess.DEVNULL, env=environment()
            )
        channel = slot.channel = await JsonChannel.over(ours)
        channel.send({"kind": "order", "order": encoded(replace(self._order, index=slot.index))})
        if self._stop.is_set():
            channel.send({"kind": "drain"})
        late = asyncio.get_running_loop().call_later(START_S_MAX, self._give_up, slot)
        try:
            while (message := await channel.receive()) is not None:
                if message["kind"] == "ready":
                    late.cancel()
                self._hear(slot, message)
            return await slot.process.wait()
        finally:
            late.cancel()
            slot.is_ready, slot.channel = False, None
            channel.close()
            if slot.last is not None:
                self._ended, slot.last = fold(self._ended, slot.last), None

    def _give_up(self, slot: WorkerSlot) -> None:
        slot.failure = f"a worker process was not ready within {START_S_MAX:.0f} s"
        slot.kill()

    def _hear(self, slot: WorkerSlot, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                slot.is_ready = True
                slot.started.set()
            case "failed":
                slot.failure, slot.failure_code = message["message"], message["code"]
            case "report":
                slot.last = message["snapshot"]
                future = self._reports.pop((slot.index, message["id"]), None)
                if future is not None and not future.done():
                    future.set_result(message["snapshot"])
            case "totals":
                task = asyncio.create_task(self._answer_totals(slot, message["id"]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer_totals(self, slot: WorkerSlot, number: int) -> None:
        """Send a worker the snapshot of all processes; the worker adds it up."""
        snapshots = await self._collect()
        if slot.channel is not None:
            ended = [] if self._ended is None else [self._ended]
            answer = {
                "kind": "totals",
                "id": number,
                "snapshots": snapshots,
                "ended": ended,
                "restarts": self._restarts,
            }
            slot.channel.send(answer)

    async def _collect(self) -> list[Snapshot]:
        """Return a snapshot of each worker: a fresh one, or the last one of a worker that does not answer in time."""
        self._asked += 1
        loop = asyncio.get_running_loop()
        futures = []
        for slot in self._slots:
            if slot.channel is not None and slot.is_ready:
                future = self._reports[slot.index, self._asked] = loop.create_future()
                futures.append(future)
                slot.channel.send({"kind": "report", "id": self._asked})
        if futures:
            await asyncio.wait(futures, timeout=REPORT_S_MAX)
        for key in [key for key in self._reports if key[1] == self._asked]:
            self._reports.pop(key).cancel()
        return [slot.last for slot in self._slots if slot.last is not None]

    def _reload(self) -> None:
        """Read keys and certificate again; if they are not valid, say so, and keep the old ones in force."""
        try:
            keys = self._read_keys()
            self._order = replace(self._order, keys=keys)
        except (PenstockError, OSError) as error:
            self._journal.say(f"the old access keys remain in force: {error}", level="error")
            keys = None
        for slot in self._slots:
            if slot.channel is not None:
                slot.channel.send({"kind": "reload", "keys": encoded(keys)})


def encoded(value: object) -> str:
    """Return a pickle as a member of a message to a worker, which ``decoded`` takes."""
    return base64.b64encode(pickle.dumps(value)).decode()


def environment() -> dict[str, str]:
    """Return the environment of worker processes: this one without the access keys, which travel over the channel."""
    return {name: value for name, value in os.environ.items() if name != "PENSTOCK_GATEWAY_KEYS"}
