"""One operation, and a thread that waits for its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.errors import ClosedError
from penstock.types import Head

if TYPE_CHECKING:
    from penstock.types import ByteRange, Completion, Core, Key, Landing, ObjectInfo, Operation, Transfer


class WaitingSink:
    """A sink that one thread waits for.

    Args:
        landing: Where the body goes; None for a new private buffer.

    Attributes:
        completion: How the operation ended; None until then.
    """

    __slots__ = ("_ended", "completion", "landing")

    def __init__(self, landing: Landing | None = None) -> None:
        self.landing = landing
        self.completion: Completion | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Let the body go to the landing given at construction."""
        if self.landing is not None:
            self.landing.position = self.landing.start
        return self.landing

    def done(self, completion: Completion) -> None:
        """Wake the waiting thread."""
        self.completion = completion
        self._ended.release()

    def wait(self, transfer: Transfer) -> Completion:
        """Block until the operation has ended; Ctrl-C cancels `transfer` and propagates.

        There is no deadline here: the transport and ``Retrying`` have theirs, so every submitted operation ends.
        """
        try:
            self._ended.acquire()
        except BaseException:
            transfer.cancel()
            raise
        completion = self.completion
        if completion is None:  # pragma: no branch - released by done() only
            raise ClosedError("the operation ended without an answer")
        return completion


def perform(core: Core, operation: Operation) -> Completion:
    """Submit `operation` and wait for its end.

    Raises:
        StoreError: The operation failed.
        KeyboardInterrupt: Ctrl-C; the transfer is cancelled.
    """
    sink = WaitingSink()
    completion = sink.wait(core.submit(operation, sink))
    if completion.error is not None:
        raise completion.error
    return completion


def stat(core: Core, key: Key) -> ObjectInfo:
    """Return size, ETag and modification time of an object.

    Raises:
        ObjectMissingError: The object does not exist.
    """
    info = perform(core, Head(key)).info
    assert info is not None
    return info
