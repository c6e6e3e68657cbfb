"""A sink for operations without a body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError, as_completion_error
from penstock.types import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import ByteRange, Core, Landing, ObjectInfo, Operation, Transfer


class BodilessSink:
    """Passes the end of an operation that has no body on to a function."""

    __slots__ = ("_then", "landing")

    def __init__(self, then: Callable[[Completion], None]) -> None:
        self.landing: Landing | None = None
        self._then = then

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Take a private buffer; it is not called for these operations."""
        return None

    def done(self, completion: Completion) -> None:
        """Call the function."""
        self._then(completion)


def begin(store: Core, operation: Operation, then: Callable[[Completion], None]) -> Transfer | None:
    """Submit an operation; `then` also hears what ``submit`` refuses. Returns None if it was refused."""
    try:
        return store.submit(operation, BodilessSink(then))
    except PenstockError as error:
        failure = as_completion_error(error)
        if failure is not error:
            failure.__cause__ = error
        then(Completion(operation, error=failure))
        return None
