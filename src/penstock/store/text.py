"""Text files around objects: Python's own, except that a failed ``with`` statement commits nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class ObjectText(io.TextIOWrapper):
    """A text file around a reader or a ``Writer``: an exception inside ``with`` discards what was written."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and hasattr(self.buffer, "abort"):
            self.buffer.abort()
        self.close()
