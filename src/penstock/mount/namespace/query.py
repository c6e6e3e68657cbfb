"""Asks the store whether a path is a file, a directory, or neither."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.errors import AccessDeniedError, ConfigError, ObjectMissingError, PenstockError, StoreError
from penstock.mount.namespace.sinks import begin
from penstock.types import Head, ListPage, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import Completion, Core, Operation, Transfer


STORAGE_CLASS = b"x-amz-storage-class"
"""The only header of an object that programs can see."""


class _Unknown:
    """Stands for the answer while a request is missing that it depends on."""


class PathQuery:
    """One question: a HEAD of the key, and at the same time a listing of one key of the prefix.

    If both exist, the path is a directory, as in the listing of its parent.

    Args:
        store: Store that is asked.
        key: Key of the file that the path would be.
        then: Receives the object, a prefix, None if there is neither, or why this is not known; called once.

    Cost: Two requests.
    """

    __slots__ = ("_key", "_listed", "_lock", "_looked_up", "_store", "_then", "_transfers")

    def __init__(self, store: Core, key: str, then: Callable[[ObjectInfo | PenstockError | None], None]) -> None:
        self._store = store
        self._key = key
        self._then: Callable[[ObjectInfo | PenstockError | None], None] | None = then
        self._lock = threading.Lock()
        self._looked_up: Completion | None = None
        self._listed: Completion | None = None
        self._transfers: list[Transfer | None] = []

    def begin(self) -> None:
        """Send both requests."""
        operations: tuple[Operation, ...] = (ListPage(self._key + "/", keys_max=1), Head(self._key))
        for operation in operations:
            self._transfers.append(begin(self._store, operation, self._ended))

    def cancel(self) -> None:
        """Cancel both requests; `then` still hears of it."""
        for transfer in list(self._transfers):
            if transfer is not None:
                transfer.cancel()

    def _ended(self, completion: Completion) -> None:
        with self._lock:
            if isinstance(completion.operation, Head):
                self._looked_up = completion
            else:
                self._listed = completion
            then, self._then = self._then, None
            answer = self._answer() if then is not None else None
            if isinstance(answer, _Unknown):
                self._then = then
                return
        if then is not None:
            self.cancel()
            then(answer)

    def _answer(self) -> ObjectInfo | PenstockError | _Unknown | None:
        listed, looked_up = self._listed, self._looked_up
        if listed is not None and listed.error is None and (listed.value.objects or listed.value.prefixes):
            return ObjectInfo(self._key + "/", 0, is_prefix=True)
        if listed is None or looked_up is None:
            return _Unknown()
        if listed.error is not None:
            # Credentials that may read objects but not list them can still open files whose names are known.
            is_readable = looked_up.error is None and isinstance(listed.error, AccessDeniedError)
            return _compact(looked_up.info) if is_readable else listed.error
        if looked_up.error is None:
            return _compact(looked_up.info)
        return None if _is_missing(looked_up.error) else looked_up.error


def _compact(info: ObjectInfo | None) -> ObjectInfo | None:
    """Drop headers that nobody sees: 1 KB and more, for as long as the kernel refers to the file."""
    if info is None or not info.headers:
        return info
    return info._replace(headers={name: value for name, value in info.headers.items() if name == STORAGE_CLASS})


def _is_missing(error: StoreError) -> bool:
    """Whether there is no such object. A key that the store refuses has no object; a bucket that is missing is an error."""
    return type(error) is ObjectMissingError or isinstance(error.__cause__, ConfigError)
