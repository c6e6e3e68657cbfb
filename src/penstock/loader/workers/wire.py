"""Messages between a loader and its worker processes: pickles over a socket, a descriptor beside some.

Both ends are this program's own: what is unpickled here never comes from data.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import socket
import struct
import sys
import threading
from typing import Any

from penstock.errors import ConfigError

_HEAD = struct.Struct("<QB")


class MessageChannel:
    """One end. ``send`` may be called from any thread, ``receive`` from one.

    Args:
        end: A connected stream socket; closed with this.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.RLock()  # a finaliser may run inside `send`, and end what sends
        self._is_receiving = False

    def fileno(self) -> int:
        """To wait for."""
        return self._socket.fileno()

    def send(self, message: Any, *, descriptor: int | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        self.send_raw(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), descriptor=descriptor)

    def send_raw(self, data: bytes, *, descriptor: int | None = None) -> None:
        """Send a message that is pickled already."""
        head = _HEAD.pack(len(data), descriptor is not None)
        with self._lock:
            if descriptor is not None:
                socket.send_fds(self._socket, [head], [descriptor])
                self._socket.sendall(data)
            else:
                self._socket.sendall(head + data)  # one call: the training loop waits for it

    def receive(self) -> tuple[Any, int | None]:
        """The next message, and the descriptor that came with it. Blocks.

        Raises:
            EOFError, OSError: the other end is gone; or a signal's exception broke off the call before.
        """
        if self._is_receiving:
            raise EOFError
        self._is_receiving = True
        head, descriptors = b"", []
        while len(head) < _HEAD.size:
            part, more, _, _ = socket.recv_fds(self._socket, _HEAD.size - len(head), 1)
            if not part:
                raise EOFError
            head += part
            descriptors += more
        size_bytes, _ = _HEAD.unpack(head)
        data = bytearray(size_bytes)
        view, at = memoryview(data), 0
        while at < size_bytes:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        self._is_receiving = False
        return pickle.loads(data), descriptors[0] if descriptors else None

    def end(self) -> None:
        """Whoever receives takes what was sent so far, and then sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; whoever receives wakes. Idempotent."""
        self.end()
        self._socket.close()


def by_value(message: Any) -> bytes:
    """A pickle that carries functions of the main module, lambdas and closures with it.

    Raises:
        ConfigError: there is no cloudpickle, or it cannot be pickled.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise ConfigError(
            "processes= sends the pipeline's functions to its workers by cloudpickle, which is not installed",
            hint="pip install 'penstock[processes]'",
        ) from None
    main = sys.modules.get("__mp_main__")  # of a process that `spawn` or `forkserver` started: no worker can import it
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    try:
        data: bytes = cloudpickle.dumps(message)
    except Exception as error:
        raise ConfigError(
            f"the pipeline cannot be sent to worker processes: {type(error).__name__}: {error}",
            hint="functions may not hold locks, open files or connections; make those inside the function",
        ) from error
    return data
