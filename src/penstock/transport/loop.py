"""The event loop: one epoll in one background thread, for plain sockets (``plain.py``) and those of libcurl (``curl.py``).

Submissions arrive in a deque, and an eventfd is written only while the loop sleeps. The loop enforces deadlines itself: a
watchdog checks all transfers twice a second, which is cheaper than libcurl's speed check per transfer, and tells a late first
byte from a stalled body.

Another part of the process can have a descriptor watched here, so that its work and the work of its requests run on one
thread: threads of one interpreter that wake each other up lose more time than they gain.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.system.libcurl import pycurl
from penstock.transport.connections import HttpConnection
from penstock.transport.curl import EVENTS_MAX, CurlPool
from penstock.transport.http import (
    CLOSED,
    DEFECT,
    LATE_BODY,
    LATE_FIRST_BYTE,
    LATE_TOTAL,
    HttpRequest,
    HttpTransfer,
)
from penstock.transport.plain import PlainPool

if TYPE_CHECKING:
    from collections.abc import Callable

WATCH_S = 0.5
"""Seconds between two checks of the watchdog: the precision of every deadline, except that of libcurl's connections."""


log = logging.getLogger("penstock.transport")


@dataclass(slots=True, eq=False, repr=False)
class Timer:
    """A call in the future; ``cancel()`` may be called from any thread."""

    when_s: float
    call: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        """Drop the call. Idempotent."""
        self.cancelled = True


@dataclass(slots=True, eq=False, repr=False)
class WatchedDescriptor:
    """A descriptor of somebody else that an event loop watches; ``EventLoop.add_reader`` makes it.

    Attributes:
        descriptor: The descriptor.
        on_readable: Called as long as it is readable.
        on_loop_end: Called when the loop ends, with whether a defect in a callback has ended it.
    """

    _loop: EventLoop
    descriptor: int
    on_readable: Callable[[], object]
    on_loop_end: Callable[[bool], object]

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Run `call` on the thread of the same loop after `delay_s` seconds."""
        return self._loop.call_later(delay_s, call)

    def remove(self) -> None:
        """Watch it no longer; nothing is called afterwards. Call it on the loop's thread, before the descriptor is closed."""
        self._loop.remove_reader(self)


class EventLoop:
    """One thread, one libcurl multi handle, one connection pool.

    Args:
        connections_max: The most open connections, and the most exchanges at the same time.
        name: Name of the thread.
    """

    def __init__(self, *, connections_max: int, name: str) -> None:
        self._name = name
        self._connections_max = connections_max
        self._incoming: deque[HttpTransfer | Callable[[], None]] = deque()
        self._pending: deque[HttpTransfer] = deque()  # wait for one of the connections
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._active: dict[HttpTransfer, None] = {}  # an ordered set
        self._readers: dict[int, WatchedDescriptor] = {}
        self._sockets: dict[int, int] = {}  # descriptor to inode, so that a reused number is noticed
        self._sleeping = False
        self._closing = False
        self._ended = False
        self._why = CLOSED, "the transport was closed"
        self._drainer = 0
        self._waking = threading.RLock()
        self._epoll = select.epoll()
        self._curl = CurlPool(self._epoll, end=self._end, opened=self._on_new_socket, connections_max=connections_max)
        self._plain = PlainPool(
            self._epoll,
            end=self._end,
            call_soon=self.call_soon,
            opened=self._on_new_socket,
            connections_max=connections_max,
        )
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # last, because it does not close itself
        self._epoll.register(self._waker, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. If that is interrupted, ``close()`` still ends everything."""
        self._thread.start()

    # ── from any thread ────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: HttpRequest) -> HttpTransfer:
        """Start an exchange; never blocks."""
        transfer = HttpTransfer(self, request)
        self._enqueue(transfer)
        return transfer

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread."""
        self._enqueue(call)

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Run `call` on the loop's thread after `delay_s` seconds."""
        timer = Timer(time.monotonic() + delay_s, call)
        self._enqueue(lambda: heapq.heappush(self._timers, (timer.when_s, next(self._sequence), timer)))
        return timer

    def add_reader(
        self, descriptor: int, *, on_readable: Callable[[], object], on_loop_end: Callable[[bool], object]
    ) -> WatchedDescriptor:
        """Call `on_readable` on the loop's thread as long as a descriptor is readable.

        Args:
            descriptor: Descriptor that epoll can watch and that is in non-blocking mode. The caller closes it, after
                ``WatchedDescriptor.remove``.
            on_readable: Must return soon. If it raises, the loop ends, like after any other callback.
            on_loop_end: Called on the loop's thread at its end, unless the descriptor was removed before, with whether a defect
                in a callback has ended the loop: another loop then goes on in its place.
        """
        watched = WatchedDescriptor(self, descriptor, on_readable, on_loop_end)
        self._enqueue(lambda: self._begin_watching(watched))
        return watched

    def _enqueue(self, item: HttpTransfer | Callable[[], None]) -> None:
        self._incoming.append(item)
        if self._sleeping:
            self._wake()
        if self._ended:
            self._drain_closed()

    def _wake(self) -> None:
        # The lock keeps a late write from reaching the next owner of the descriptor's number; it is reentrant, because a
        # finaliser may submit meanwhile. `_sleeping` may be True too often, which costs a write, but never too
        # rarely: after a Ctrl-C between the two lines, the loop would sleep for ever.
        with self._waking:
            try:
                self._sleeping = False
                if self._waker >= 0:
                    os.eventfd_write(self._waker, 1)
            except BaseException:
                self._sleeping = True
                raise

    def close(self) -> None:
        """End every transfer with ``CLOSED``, then the thread, its sockets and descriptors. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.ident is None:  # interrupted before it started
            self._shut()
        elif not self.is_current():
            self._thread.join(timeout=5.0)

    def abandon(self) -> None:
        """Keep every handle of the parent alive and untouched for ever; called in a forked child.

        Closing a handle, removing it from the multi handle, or an epoll call on the shared descriptor would send bytes on the
        parent's connections or change what its epoll watches. One leaked reference holds all of them, even when the
        interpreter clears its modules at exit.

        The child's copies of the sockets are closed by descriptor only. If one stayed open, a connection that the parent
        closes would stay alive and registered with the parent's epoll, and the parent's loop would spin on it.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._sleeping = False  # so that the parent's loop is not woken
        for fd, inode in self._sockets.items():
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)

    @property
    def alive(self) -> bool:
        """Whether it may be used: it was not closed, and no defect in a callback has ended its thread."""
        return not self._closing

    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread, or ends what was submitted too late for it."""
        # The thread's number would not do, because another thread may have it after its end.
        return threading.current_thread() is self._thread or threading.get_ident() == self._drainer

    @property
    def ended(self) -> bool:
        """Whether its thread has ended."""
        return self._ended and not self._thread.is_alive()

    # ── on the loop's thread ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """Run until the loop is closed, or a callback fails: then everything in flight fails by an error that names it."""
        try:
            self._turn()
        except Exception as error:
            self._why = DEFECT, f"a callback on the event loop failed: {type(error).__name__}: {error}"
            log.exception("A callback failed, which ends the event loop and every request on it.")
        finally:
            self._shut()

    def _turn(self) -> None:
        poll = self._epoll.poll
        plain, curl, readers = self._plain.connections, self._curl, self._readers
        watch_due_s = 0.0
        while not self._closing:
            self._start_incoming()
            timeout_s = self._sleep_s(watch_due_s)
            events = poll(timeout_s, EVENTS_MAX)
            self._sleeping = False
            for fd, event in events:
                connection = plain.get(fd)
                if connection is not None:
                    connection.on_ready(connection)
                elif fd in readers:
                    readers[fd].on_readable()
                elif fd == self._waker:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._waker)
                else:
                    curl.on_ready(fd, event)
            now_s = time.monotonic()
            curl.collect(now_s)
            if now_s >= watch_due_s:
                watch_due_s = now_s + WATCH_S
                self._watch(now_s)
            self._run_timers(now_s)

    def _sleep_s(self, watch_due_s: float) -> float:
        """Return how long to sleep at most; 0 if something waits. Sets ``_sleeping`` before the last look at the deque."""
        due_s = self._curl.due_s
        if self._timers and (due_s is None or self._timers[0][0] < due_s):
            due_s = self._timers[0][0]
        if self._active and (due_s is None or watch_due_s < due_s):
            due_s = watch_due_s
        self._sleeping = True
        if self._incoming or self._closing:
            return 0.0
        if due_s is None:
            return -1
        return max(0.0, due_s - time.monotonic())

    def _start_incoming(self) -> None:
        incoming, waiting, active, active_max = self._incoming, self._pending, self._active, self._connections_max
        while incoming:
            item = incoming.popleft()
            if not isinstance(item, HttpTransfer):
                item()
            elif waiting or len(active) >= active_max:
                waiting.append(item)  # libcurl would queue it too, but count the wait as time to connect
            elif not item.ended:
                self._start(item)
        while waiting and len(active) < active_max:
            transfer = waiting.popleft()
            if not transfer.ended:
                self._start(transfer)

    def _start(self, transfer: HttpTransfer) -> None:
        self._active[transfer] = None
        origin = self._plain.find_origin(transfer.request)
        if origin is None:
            self._curl.start(transfer)
            return
        try:
            self._plain.start(transfer, origin)
        except ValueError as error:
            self._end(transfer, pycurl.E_URL_MALFORMAT, str(error))

    def _end(self, transfer: HttpTransfer, code: int, reason: str) -> None:
        transfer.ended = True
        self._active.pop(transfer, None)  # it is not there if it was never started
        answer = transfer.answer(code, reason)
        transfer.carrier = None
        sink = transfer.request.sink
        del transfer.request  # an idle handle keeps its last transfer, which must not keep sinks and buffers alive
        sink.on_end(answer)

    def give_up(self, transfer: HttpTransfer, code: int, reason: str) -> None:
        """End a transfer early; its connection is closed, because the rest of its answer is still on the way."""
        if transfer.ended:
            return
        carrier = transfer.carrier
        if isinstance(carrier, HttpConnection):
            self._plain.drop(carrier)
            self._end(transfer, code, reason)
        elif carrier is not None:
            self._curl.finish(carrier, code, reason)
        else:
            self._end(transfer, code, reason)

    def _watch(self, now_s: float) -> None:
        """Enforce the deadlines of all transfers."""
        late: list[tuple[HttpTransfer, int, str]] = []
        for transfer in list(self._active):  # a copy, because trying another address may end one
            if transfer.ended:
                continue
            config = transfer.request.config
            age_s = now_s - transfer.started_s
            if age_s > config.total_s_max:
                late.append((transfer, LATE_TOTAL, f"not complete after {config.total_s_max:g} s"))
                continue
            carrier = transfer.carrier
            if (
                isinstance(carrier, HttpConnection)
                and (connecting_s := self._plain.connector.waited_s(carrier, now_s)) is not None
            ):
                transfer.watch_s = now_s  # the wait for the answer begins when the connection is open
                if connecting_s > config.connect_s_max:
                    late.append(
                        (transfer, pycurl.E_OPERATION_TIMEDOUT, f"no connection within {config.connect_s_max:g} s")
                    )
                continue
            if transfer.waits_for_body:
                transfer.watch_s = now_s  # the caller has its own deadlines for what it sends
                continue
            progress = transfer.progress_bytes()
            moved = progress - transfer.watch_bytes
            if moved >= config.stall_bytes_per_s * config.stall_s_max or transfer.watch_bytes < 0:
                transfer.watch_bytes, transfer.watch_s = progress, now_s
            elif transfer.header_lines:
                self._watch_body(transfer, moved, now_s, late)
            elif now_s - transfer.watch_s > config.first_byte_s_max:
                late.append((transfer, LATE_FIRST_BYTE, f"no answer within {config.first_byte_s_max:g} s"))
        for transfer, code, reason in late:
            self.give_up(transfer, code, reason)

    @staticmethod
    def _watch_body(
        transfer: HttpTransfer, moved: int, now_s: float, late: list[tuple[HttpTransfer, int, str]]
    ) -> None:
        config = transfer.request.config
        waited_s = now_s - transfer.watch_s
        if waited_s <= config.stall_s_max:
            return
        if moved < config.stall_bytes_per_s * waited_s:
            late.append((transfer, LATE_BODY, f"only {moved} bytes in {waited_s:.0f} s"))
        else:
            transfer.watch_bytes, transfer.watch_s = transfer.watch_bytes + moved, now_s

    def _on_new_socket(self, fd: int, _purpose: int) -> int:
        self._sockets[fd] = os.fstat(fd).st_ino
        return 0  # CURL_SOCKOPT_OK

    def _begin_watching(self, watched: WatchedDescriptor) -> None:
        if self._ended:
            watched.on_loop_end(self._why[0] == DEFECT)
            return
        self._epoll.register(watched.descriptor, select.EPOLLIN)
        self._readers[watched.descriptor] = watched

    def remove_reader(self, watched: WatchedDescriptor) -> None:
        """Watch a descriptor no longer; see ``WatchedDescriptor.remove``."""
        if self._readers.get(watched.descriptor) is watched:
            del self._readers[watched.descriptor]
            with contextlib.suppress(OSError):
                self._epoll.unregister(watched.descriptor)

    def _run_timers(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.call()

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _shut(self) -> None:
        """End everything; runs last on the loop's thread, and leaves nothing of it."""
        self._closing = True
        self._curl.stop_keeping()
        for transfer in (*self._active, *self._pending):
            self._call_safely(self.give_up, transfer, *self._why)
            if not transfer.ended:  # the defect was in its connection or handle
                self._call_safely(self._end, transfer, *self._why)
        self._pending.clear()
        self._ended = True  # from now on, a submitting thread ends its own exchange
        self._drain_closed()
        for watched in list(self._readers.values()):
            self.remove_reader(watched)
            self._call_safely(watched.on_loop_end, self._why[0] == DEFECT)
        self._plain.close()
        self._curl.close()
        self._epoll.close()
        with self._waking:
            waker, self._waker = self._waker, -1
        os.close(waker)

    @staticmethod
    def _call_safely(call: Callable[..., object], *args: Any) -> None:
        """Call a sink at the end of the loop; a defect in one of them must not keep the others from hearing."""
        try:
            call(*args)
        except Exception:
            log.exception("A callback failed while its event loop ended.")

    def _drain_closed(self) -> None:
        if self._drainer == threading.get_ident():
            return  # what ended has submitted more, which the caller ends in turn
        self._drainer = threading.get_ident()
        while True:
            try:
                item = self._incoming.popleft()
            except IndexError:
                break
            if isinstance(item, HttpTransfer):
                self._call_safely(self.give_up, item, *self._why)
            else:
                self._call_safely(item)
        timers, self._timers = self._timers, []
        for _, _, timer in timers:
            if not timer.cancelled:
                self._call_safely(
                    timer.call
                )  # the waiting callers must learn of the end, which ``Engine.closings`` shows
        self._drainer = 0
        if self._incoming:
            self._drain_closed()
