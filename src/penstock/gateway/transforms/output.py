"""What an author's function may return, and the error if it returned something else."""

from __future__ import annotations

from penstock.errors import PenstockError


class WrongOutputError(PenstockError, ValueError):
    """An author's function returned something that it may not return. The message says it without a traceback."""


def view_of(piece: object) -> memoryview:
    """Return a piece of a transform's output as memory.

    Raises:
        WrongOutputError: It is not bytes.
    """
    try:
        return memoryview(piece)  # type: ignore[arg-type]
    except TypeError:
        raise WrongOutputError(
            f"the transform yielded {type(piece).__name__}; a transform yields bytes",
            hint="text.encode()" if isinstance(piece, str) else None,
        ) from None
