"""Shards as uploads, which become objects when they are closed, and never after an exception.

WebDataset's writers close their stream whenever their ``with`` block ends, also if an exception ends it; a file then keeps
the samples written so far. An object would appear that looks like a whole shard. ``abort_on_exceptions`` therefore has
the writers abort uploads first; what they write while they close is dropped.
"""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from penstock.store import Store
    from penstock.types import Key


class ShardUpload(io.RawIOBase):
    """A file object that writes one shard.

    Args:
        store: The store.
        key: Key of the shard.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._writer = store.writer(key)
        super().__init__()
        self._is_aborted = False

    def __del__(self) -> None:
        """Do nothing, because ``io.IOBase`` would close the upload and so commit it; the writer's finaliser aborts it."""

    def __repr__(self) -> str:
        return f"<ShardUpload {self.name!r}{', aborted' if self._is_aborted else ''}>"

    @property
    def name(self) -> str:
        """The object's URL."""
        return self._writer.name

    @property
    def mode(self) -> str:
        """``"wb"``."""
        return "wb"

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._writer.tell()

    def write(self, data: Any, /) -> int:
        """Take all of `data`; drop it if the upload was aborted.

        Raises:
            StoreError: An earlier part failed; nothing becomes visible.
        """
        return memoryview(data).nbytes if self._is_aborted else self._writer.write(data)

    def close(self) -> None:
        """Make the object visible, unless the upload was aborted; idempotent.

        Raises:
            StoreError: A part or the commit failed; nothing is visible.
        """
        self._writer.close()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def abort(self) -> None:
        """Drop what was sent, and everything that is still written."""
        self._is_aborted = True
        self._writer.abort()


def abort_on_exceptions(writers: ModuleType) -> None:
    """Have WebDataset's ``TarWriter`` and ``ShardWriter`` abort uploads if an exception ends their ``with`` block.

    Args:
        writers: The module ``webdataset.writer``.
    """
    for kind in (writers.TarWriter, writers.ShardWriter):
        if not hasattr(kind.__exit__, "__wrapped__"):
            kind.__exit__ = _aborting(kind.__exit__)


def _aborting(leave: Any) -> Any:
    @functools.wraps(leave)
    def leave_aborted(self: Any, *error: Any) -> Any:
        if error and error[0] is not None:
            tar = getattr(self, "tarstream", None) if hasattr(self, "pattern") else self  # a ``ShardWriter`` has one
            stream = getattr(tar, "stream", None)
            if isinstance(stream, ShardUpload):
                stream.abort()
                self.post = None  # a ``ShardWriter`` would call it for the shard that does not exist
        return leave(self, *error)

    return leave_aborted
