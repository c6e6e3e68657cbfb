"""Read-only raw files of known size with a current offset, which is all that Python's buffered files need besides the bytes."""

from __future__ import annotations

import io
from abc import abstractmethod


class RawFile(io.RawIOBase):
    """A file that can be read and moved in. A subclass has a size, reads from `_position` on, and may have a ``name``."""

    _position = 0

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the file in bytes; only asked for to move from the end."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current offset in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the current offset, which may be past the end, and return it; see ``io.IOBase.seek``.

        Raises:
            ValueError: `whence` is unknown, or the offset would be negative.
        """
        if whence == io.SEEK_SET:
            position = offset
        elif whence == io.SEEK_CUR:
            position = self._position + offset
        elif whence == io.SEEK_END:
            position = self.size_bytes + offset
        else:
            raise ValueError(f"whence={whence!r} must be 0, 1 or 2")
        if position < 0:
            raise ValueError(f"{getattr(self, 'name', 'the file')}: seek to {position}, before the start")
        self._position = position
        return position
