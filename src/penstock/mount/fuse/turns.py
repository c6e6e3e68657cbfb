"""Reads the kernel's requests, on a thread that does nothing else, or on that of an event loop that has other work, too.

The second way is for a file system that is answered from an event loop of the same process. Two threads of one interpreter
take turns at it, and on two processors each turn wakes the other one up: reading and replying on the loop's thread saves that.
"""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING, Protocol

from penstock.mount.fuse.answering import GONE
from penstock.mount.fuse.protocol import BUFFER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.mount.fuse.answering import Device, InterruptedRequests
    from penstock.mount.fuse.dispatching import Dispatcher

REQUESTS_PER_TURN = 16
"""Requests that are read before an event loop goes on with its other work."""


class LoopReader(Protocol):
    """A descriptor that an event loop watches."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> object:
        """Run `call` on the loop's thread after `delay_s` seconds."""

    def remove(self) -> None:
        """Watch it no longer; called on the loop's thread."""


class AddReader(Protocol):
    """Has an event loop watch a descriptor."""

    def __call__(
        self, descriptor: int, /, *, on_readable: Callable[[], object], on_loop_end: Callable[[bool], object]
    ) -> LoopReader:
        """Call `on_readable` as long as it is readable, and `on_loop_end` with whether a defect has ended the loop."""


class RequestReader:
    """Reads requests from the device, and has them answered. One thread at a time may use it.

    Args:
        device: The device.
        dispatcher: Has requests answered.
        interrupted: The requests of threads that have received a signal.

    Attributes:
        is_stopping: Whether no more requests are to be read.
        interrupted: The object that was passed.
    """

    def __init__(self, device: Device, dispatcher: Dispatcher, interrupted: InterruptedRequests) -> None:
        self._device = device
        self._dispatcher = dispatcher
        buffer = bytearray(BUFFER_BYTES)
        self._buffers, self._view = [buffer], memoryview(buffer)
        self.interrupted = interrupted
        self.is_stopping = False

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._device.fileno()

    def answer(self, *, count_max: int) -> bool:
        """Read requests as long as there are any, at most `count_max`; False if the connection has ended.

        Raises:
            OSError: The device cannot be read.
        """
        read, buffers, view, dispatch = self._device.read, self._buffers, self._view, self._dispatcher.dispatch
        for _ in range(count_max):
            if self.is_stopping:
                break
            try:
                length_bytes = read(buffers)
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            if not length_bytes:
                break
            dispatch(view[:length_bytes])
        return True


class ThreadTurns:
    """Reads requests on the calling thread.

    Args:
        requests: Reads and answers them.
        wake: Descriptor that becomes readable when `requests` is to stop.
    """

    def __init__(self, requests: RequestReader, wake: int) -> None:
        self._requests = requests
        self._poll = select.poll()
        self._poll.register(requests.fileno(), select.POLLIN)
        self._poll.register(wake, select.POLLIN)

    def run(self) -> None:
        """Answer requests until the connection ends, or `requests` is to stop.

        Raises:
            OSError: The device cannot be read.
        """
        requests, interrupted = self._requests, self._requests.interrupted
        while not requests.is_stopping:
            self._poll.poll(interrupted.wait_ms)
            if not requests.answer(count_max=1):  # another read, which finds nothing, costs as much as polling
                return
            if interrupted.is_due:
                interrupted.check()


class LoopTurns:
    """Reads requests on the thread of an event loop.

    If a defect in another callback ends the loop, the next one takes its place. If the loops are closed, the session ends.

    Args:
        requests: Reads and answers them.
        add_reader: Has the loop watch a descriptor.
        end: Called once, on the loop's thread, when no more requests are read; with the error if the device cannot be read.
    """

    def __init__(
        self, requests: RequestReader, *, add_reader: AddReader, end: Callable[[Exception | None], object]
    ) -> None:
        self._requests = requests
        self._add_reader = add_reader
        self._end: Callable[[Exception | None], object] | None = end
        self._reader: LoopReader | None = None
        self._checks_soon = False
        self._lock = threading.RLock()  # the loop may end while it is asked to watch the device

    def start(self) -> None:
        """Begin; it may be called from any thread."""
        with self._lock:
            before = self._reader
            reader = self._add_reader(
                self._requests.fileno(), on_readable=self._on_readable, on_loop_end=self._on_loop_end
            )
            if self._reader is before:  # otherwise that loop has ended already, and the next one watches the device
                self._reader = reader

    def stop(self) -> None:
        """End soon, after ``requests.is_stopping`` was set; it may be called from any thread."""
        with self._lock:
            reader = self._reader
        if reader is not None:
            reader.call_later(0.0, self._finish)

    def _on_readable(self) -> None:
        requests = self._requests
        try:
            goes_on = requests.answer(count_max=REQUESTS_PER_TURN)
        except Exception as error:
            self._finish(error)
            return
        if not goes_on or requests.is_stopping:
            self._finish()
        elif requests.interrupted.wait_ms is not None:
            self._check_soon()

    def _check_soon(self) -> None:
        wait_ms, reader = self._requests.interrupted.wait_ms, self._reader
        if not self._checks_soon and wait_ms is not None and reader is not None:
            self._checks_soon = True
            reader.call_later(wait_ms / 1000, self._check)

    def _check(self) -> None:
        self._checks_soon = False
        if self._end is not None:
            self._requests.interrupted.check()
            self._check_soon()

    def _on_loop_end(self, by_defect: bool) -> None:
        if by_defect and not self._requests.is_stopping:
            self.start()
        else:
            self._finish()

    def _finish(self, failure: Exception | None = None) -> None:
        with self._lock:
            end, self._end = self._end, None
            reader, self._reader = self._reader, None
        if end is None:
            return
        if reader is not None:
            reader.remove()
        end(failure)
