"""The process's event loops: made at first use, shared by every store, replaced after a fork, ended at exit.

Loops are told apart by what they must have in common, the number of threads and the bound of the pool. On a small machine,
and for plain HTTP on any machine, a process has one loop, which moves more bytes than one network card carries. Decrypting is
slower, and libcurl does it without the interpreter lock, so that over TLS a larger machine has several. Requests are dealt to
a configuration's loops in turn.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from typing import TYPE_CHECKING

import pycurl

from penstock import forks
from penstock.config import TransportConfig, cores_count
from penstock.errors import UnavailableError
from penstock.transport.http import DESCRIPTORS_HINT
from penstock.transport.loop import EventLoop, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.http import HttpRequest, HttpTransfer


CORES_PER_TLS_LOOP = 4
"""The decoding threads of a training job want most cores; four loops on 16 cores are what a fast network card can use."""
TLS_LOOPS_MAX = 4


def loops_count(cores: int, *, tls: bool) -> int:
    """Event loops of a process that may use `cores` cores, where ``TransportConfig(threads_count=)`` names no number."""
    return max(1, min(TLS_LOOPS_MAX, cores // CORES_PER_TLS_LOOP)) if tls else 1


class Engine:
    """All event loops of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finaliser may submit in the midst of it
        self._loops: dict[tuple[int, int], list[EventLoop]] = {}
        self._closing: list[EventLoop] = []
        self._turn = itertools.count()
        self.closings = 0
        """How often ``close()`` was called: a backoff that spans a close does not start the engine again."""
        forks.register(self)

    def submit(self, request: HttpRequest) -> HttpTransfer:
        """Start an exchange on one of the loops of its configuration; never blocks."""
        return self._loop(request.config, tls=request.url.startswith("https:")).submit(request)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Run `call` on a loop's thread after `delay_s` seconds: backoff, hedging."""
        with self._lock:
            loops = next(iter(self._loops.values()), None)
        return (loops[0] if loops else self._loop(None, tls=False)).call_later(delay_s, call)

    def close(self) -> None:
        """End every transfer with ``ClosedError`` and leave no thread, socket or descriptor; the next use starts anew."""
        with self._lock:
            self.closings += 1
            loops = [loop for group in self._loops.values() for loop in group]
            # before they leave `_loops`, for their threads look without the lock; until they ended: their sinks may call
            self._closing = [loop for loop in self._closing if not loop.ended] + loops
            self._loops = {}
        for loop in loops:
            loop.close()

    def after_fork_in_child(self) -> None:
        """See ``forks``: the parent's loops are left untouched for ever, and forgotten."""
        for group in self._loops.values():
            for loop in group:
                loop.abandon()
        self._lock = threading.RLock()  # reentrant: a finaliser may submit in the midst of it
        self._loops = {}
        self._closing = []

    def _loop(self, config: TransportConfig | None, *, tls: bool) -> EventLoop:
        config = config or TransportConfig()
        count = config.threads_count or loops_count(cores_count(), tls=tls)
        group = self._loops.get((count, config.connections_max))
        if group is None or not group[0].alive:
            for loop in self._closing:
                if loop.is_current():  # told of the end, a reader asks for more: that must not start the engine again
                    return loop
            with self._lock:
                group = self._group(count, config.connections_max)
        if len(group) == 1:
            return group[0]
        return group[next(self._turn) % len(group)]

    def _group(self, count: int, connections_max: int) -> list[EventLoop]:
        """The living loops of a configuration, as many as it wants; under the lock."""
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
                living = [other for other in self._loops.get(key, ()) if other.alive]  # a finaliser's, too
                self._loops[key] = [*living, loop]  # replaced whole: others look without the lock
            except BaseException:  # Ctrl-C: nobody else knows of it
                loop.close()
                raise


engine = Engine()
atexit.register(engine.close)
