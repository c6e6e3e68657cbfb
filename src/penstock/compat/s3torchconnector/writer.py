"""``S3Writer``: a file of one object, which becomes visible when it is closed."""

from __future__ import annotations

from typing import Any

from penstock.torch.writing import CheckpointWriter
from penstock.tracebacks import boundary


@boundary
class S3Writer(CheckpointWriter):
    """A file that writes one object, as ``S3Checkpoint.writer`` returns it.

    The whole object becomes visible when ``close()`` returns or the ``with`` block ends normally. If an exception ends the
    block, the writer is dropped without being closed, or the process ends, nothing becomes visible.
    """

    MADE_BY = "checkpoint.writer(uri)"

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

    def writable(self) -> bool:
        """Return whether it is open."""
        return not self.closed
