"""What the end of a ``with`` block does to something that is being written: it becomes visible, or it is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from types import TracebackType


class Abortable(Protocol):
    """Something that is written, and visible once it is closed."""

    def close(self) -> None:
        """Make what was written visible."""

    def abort(self) -> None:
        """Drop what was written."""


@boundary
class CommitOnExit:
    """A context manager that calls ``close()`` when its block ends, or ``abort()`` if an exception ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Abortable, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
