"""libcurl's side of one event loop: its multi handle, and the easy handles that are kept for the next GET.

Sockets stay registered with epoll when a transfer ends, because a kept-alive connection would soon be registered again; that
saves two system calls per request. ``SOCKOPTFUNCTION`` reports new sockets, so that a reused descriptor number is never
mistaken for the old one.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, Any

from penstock.system.libcurl import pycurl
from penstock.transport.curl import attach, configure, prepare_method, record_outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.transport.http import HttpTransfer

_EVENTS_MAX = 256
_POOLS_MAX = 16
"""Configurations whose idle libcurl handles are kept; a program may make a store, and so a configuration, for each file."""
_WEIRD_SERVER_REPLY = 8  # a code of libcurl that pycurl 7.49 does not name
_REFUSALS = (pycurl.error, TypeError, ValueError)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_SELECT_IN, _SELECT_OUT, _SELECT_ERR = pycurl.CSELECT_IN, pycurl.CSELECT_OUT, pycurl.CSELECT_ERR


class CurlPool:
    """Exchanges that libcurl carries; everything runs on the loop's thread.

    Args:
        epoll: The epoll of the loop.
        end: Called as ``end(transfer, code, reason)`` to finish an exchange.
        opened: Called as ``opened(descriptor, purpose)`` for every new socket.
        connections_max: The most open connections, including idle ones.

    Attributes:
        due_s: Time of the monotonic clock at which libcurl is to be called at the latest; None if there is none.
    """

    def __init__(
        self,
        epoll: select.epoll,
        *,
        end: Callable[[HttpTransfer, int, str], None],
        opened: Callable[[int, int], int],
        connections_max: int,
    ) -> None:
        self._epoll = epoll
        self._end = end
        self._opened = opened
        self.due_s: float | None = None
        self._active: dict[Any, HttpTransfer] = {}
        self._idle: dict[tuple[int, bool] | None, list[Any]] = {}
        self._handles: set[Any] = set()
        self._registered: dict[int, int] = {}
        self._wanted: dict[int, int] = {}
        self._closing = False
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, connections_max)
        self._multi.setopt(pycurl.M_MAX_TOTAL_CONNECTIONS, connections_max)

    # ── exchanges ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, transfer: HttpTransfer) -> None:
        """Send the request of `transfer`."""
        request = transfer.request
        plain = request.method == "GET" and not request.redirects_max
        pool = (id(request.config), request.url.startswith("https:"))
        idle = self._idle_handles(pool) if plain else None
        if idle:
            curl = idle.pop()
        else:
            curl = None
            try:
                curl = configure(request.config, request.url, self._on_new_socket)
                curl.pool = pool if plain else None
                curl.config = request.config  # keeps the config alive, so that no other gets its id
                self._handles.add(curl)
                if not plain:
                    prepare_method(transfer, curl)
            except _REFUSALS as error:
                self._refuse(transfer, curl, error)
                return
        try:
            attach(transfer, curl)
            self._active[curl] = transfer
            self._multi.add_handle(curl)
        except _REFUSALS as error:
            self._refuse(transfer, curl, error)

    def _idle_handles(self, pool: tuple[int, bool]) -> list[Any]:
        """Return the idle handles of a configuration; if there are too many configurations, those of the oldest are closed."""
        idle = self._idle.get(pool)
        if idle is None:
            if len(self._idle) >= _POOLS_MAX:
                for curl in self._idle.pop(next(iter(self._idle))):
                    self._drop(curl)
            idle = self._idle[pool] = []
        return idle

    def _refuse(self, transfer: HttpTransfer, curl: Any, error: Exception) -> None:
        """End an exchange that libcurl refuses: a bad URL, header or file name."""
        self._active.pop(curl, None)
        code = error.args[0] if isinstance(error, pycurl.error) else pycurl.E_URL_MALFORMAT
        self._end(transfer, code, str(error.args[-1]))
        if curl is not None:
            self._drop(curl)

    def finish(self, curl: Any, code: int, reason: str) -> None:
        """End an exchange that libcurl has ended, or that is abandoned, which closes its connection."""
        transfer = self._active.pop(curl)
        self._multi.remove_handle(curl)
        try:
            record_outcome(transfer, curl)
        except ValueError as error:
            code, reason = code or _WEIRD_SERVER_REPLY, str(error)
        pool = self._idle.get(curl.pool) if not self._closing else None
        if pool is not None:
            pool.append(curl)
        else:
            self._drop(curl)
        self._end(transfer, code, reason)

    def _drop(self, curl: Any) -> None:
        self._handles.discard(curl)
        curl.close()

    def stop_keeping(self) -> None:
        """Close every handle whose exchange ends from now on."""
        self._closing = True

    def close(self) -> None:
        """Close every handle and connection; all exchanges have ended."""
        for curl in self._handles:
            curl.close()
        self._handles.clear()
        self._idle.clear()
        self._multi.close()

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_ready(self, fd: int, event: int) -> None:
        """Pass an event of epoll on to libcurl."""
        if not self._wanted.get(fd):  # the server closed an idle connection; libcurl notices before it reuses it
            self._forget_socket(fd)
            return
        mask = _SELECT_IN if event & _IN else 0
        if event & _OUT:
            mask |= _SELECT_OUT
        if event & ~(_IN | _OUT):
            mask |= _SELECT_ERR
        self._multi.socket_action(fd, mask)

    def collect(self, now_s: float) -> None:
        """Call libcurl if it is due, and end the exchanges that it has finished."""
        if self.due_s is not None and now_s >= self.due_s:
            self.due_s = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        while True:
            queued, finished, failed = self._multi.info_read(_EVENTS_MAX)
            for curl in finished:
                self.finish(curl, 0, "")
            for curl, code, reason in failed:
                self.finish(curl, code, reason)
            if not queued:
                return

    def _on_socket(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        if what == pycurl.POLL_REMOVE:
            self._wanted[fd] = 0
            return
        self._wanted[fd] = what
        registered = self._registered.get(fd)
        if registered == what:
            return
        mask = (_IN if what & pycurl.POLL_IN else 0) | (_OUT if what & pycurl.POLL_OUT else 0)
        if registered is None:
            try:
                self._epoll.register(fd, mask)
            except FileExistsError:  # the same open descriptor, after a connection that was not completed
                self._epoll.modify(fd, mask)
        else:
            self._epoll.modify(fd, mask)
        self._registered[fd] = what

    def _on_new_socket(self, fd: int, purpose: int) -> int:
        self._registered.pop(fd, None)
        return self._opened(fd, purpose)

    def _forget_socket(self, fd: int) -> None:
        self._registered.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def _on_timer(self, timeout_ms: int) -> None:
        self.due_s = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
