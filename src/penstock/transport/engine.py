"""The process's event loops: made at first use, shared by all stores, replaced after a fork, ended at exit.

Stores share loops if they configure the same number of threads and of connections. On a small machine, and for plain HTTP on
any machine, one loop is enough: it moves more bytes than a network card carries. Decryption is slower, and libcurl does it
without the interpreter lock, so for TLS a larger machine has several loops, which take requests in turn.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from typing import TYPE_CHECKING

from penstock.config import TransportConfig, cores_count
from penstock.errors import UnavailableError
from penstock.system import forks
from penstock.system.libcurl import pycurl
from penstock.transport.http import DESCRIPTORS_HINT
from penstock.transport.loop import EventLoop, Timer, WatchedDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.http import HttpRequest, HttpTransfer


CORES_PER_TLS_LOOP = 4
"""Cores per loop: the decoding threads of a training job need most of them, and four loops on 16 cores suffice for a fast
network card."""
TLS_LOOPS_MAX = 4


def loops_count(cores: int, *, tls: bool) -> int:
    """Return how many event loops a process with `cores` cores has if ``TransportConfig(threads_count=)`` is None."""
    return max(1, min(TLS_LOOPS_MAX, cores // CORES_PER_TLS_LOOP)) if tls else 1


class Engine:
    """All event loops of this process.

    Attributes:
        closings: Number of calls of ``close()``; a backoff that spans a close does not start the engine again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finaliser may submit while it is held
        self._loops: dict[tuple[int, int], list[EventLoop]] = {}
        self._closing: list[EventLoop] = []
        self._turn = itertools.count()
        self.closings = 0
        forks.register(self)

    def submit(self, request: HttpRequest) -> HttpTransfer:
        """Start an exchange on one of the loops of its configuration; never blocks."""
        return self._loop(request.config, tls=request.url.startswith("https:")).submit(request)

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Run `call` on a loop's thread after `delay_s` seconds; for backoff and hedging."""
        with self._lock:
            loops = next(iter(self._loops.values()), None)
        return (loops[0] if loops else self._loop(None, tls=False)).call_later(delay_s, call)

    def add_reader(
        self,
        descriptor: int,
        *,
        on_readable: Callable[[], object],
        on_loop_end: Callable[[bool], object],
        config: TransportConfig | None = None,
    ) -> WatchedDescriptor:
        """Have a loop call `on_readable` as long as a descriptor is readable; see ``EventLoop.add_reader``.

        Args:
            descriptor: The descriptor.
            on_readable: Called on the loop's thread.
            on_loop_end: Called at the end of the loop, with whether a defect in a callback has ended it.
            config: Configuration of the requests whose loop is to be used.
        """
        return self._loop(config, tls=False).add_reader(descriptor, on_readable=on_readable, on_loop_end=on_loop_end)

    def close(self) -> None:
        """End every transfer with ``ClosedStoreError``, and leave no thread, socket or descriptor; the next use starts anew."""
        with self._lock:
            self.closings += 1
            loops = [loop for group in self._loops.values() for loop in group]
            # Set before `_loops`, which their threads read without the lock; kept until they end, as their sinks may submit.
            self._closing = [loop for loop in self._closing if not loop.ended] + loops
            self._loops = {}
        for loop in loops:
            loop.close()

    def after_fork_in_child(self) -> None:
        """Forget the parent's loops, and leave them untouched for ever."""
        for group in self._loops.values():
            for loop in group:
                loop.abandon()
        self._lock = threading.RLock()
        self._loops = {}
        self._closing = []

    def _loop(self, config: TransportConfig | None, *, tls: bool) -> EventLoop:
        config = config or TransportConfig()
        count = config.threads_count or loops_count(cores_count(), tls=tls)
        group = self._loops.get((count, config.connections_max))
        if group is None or not group[0].alive:
            for loop in self._closing:
                if loop.is_current():  # a sink that hears the end submits more; that must not start the engine again
                    return loop
            with self._lock:
                group = self._group(count, config.connections_max)
        if len(group) == 1:
            return group[0]
        return group[next(self._turn) % len(group)]

    def _group(self, count: int, connections_max: int) -> list[EventLoop]:
        """Return the living loops of a configuration, and start those that are missing; under the lock."""
        key = count, connections_max
        while True:
            group = [loop for loop in self._loops.get(key, ()) if loop.alive]
            if len(group) >= count:
                return group
            try:
                loop = EventLoop(connections_max=connections_max, name=f"penstock-loop-{len(group)}")
            except (OSError, pycurl.error) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise UnavailableError(f"no event loop: {why}", hint=DESCRIPTORS_HINT) from error
            try:
                loop.start()
                # Perhaps one that a finaliser started.
                living = [other for other in self._loops.get(key, ()) if other.alive]
                self._loops[key] = [*living, loop]  # replaced whole, because others read it without the lock
            except BaseException:  # such as Ctrl-C; nothing else refers to the loop
                loop.close()
                raise


engine = Engine()
atexit.register(engine.close)
