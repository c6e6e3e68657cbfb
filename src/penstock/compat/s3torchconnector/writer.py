"""``S3Writer``: a file of one object, which becomes visible when it is closed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.system.tracebacks import boundary
from penstock.torch.writing import CheckpointWriter

if TYPE_CHECKING:
    from penstock.store.base import Store
    from penstock.types import Key


@boundary
class S3Writer(CheckpointWriter):
    """A file that writes one object, as ``S3Checkpoint.writer`` returns it.

    The whole object becomes visible when ``close()`` returns or the ``with`` block ends normally. If an exception ends the
    block, the writer is dropped without being closed, or the process ends, nothing becomes visible.
    """

    MADE_BY = "checkpoint.writer(uri)"

    def __init__(self, store: Store, key: Key) -> None:
        self._closing = threading.Lock()
        super().__init__(store, key)

    def write(self, data: Any, /) -> int:
        """Take all of `data`, any contiguous buffer, and return its length in bytes.

        Raises:
            TypeError: `data` is not a buffer.
            ValueError: The writer is closed.
            StoreError: An earlier part could not be sent; the writer is then aborted.
        """
        if self.closed:
            raise ValueError(f"{self!r} is not open")
        return super().write(memoryview(data))

    def close(self) -> None:
        """Make the object visible; any number of threads may call it, and all return when it is.

        Raises:
            StoreError: The object could not be stored.
        """
        with self._closing:
            super().close()

    def writable(self) -> bool:
        """Return whether it is open."""
        return not self.closed
