"""Samples that a user's own function reads, called side by side by the threads of one pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from penstock import forks
from penstock.errors import ClosedError
from penstock.formats import Sample
from penstock.formats.grouping import NO_EXTENSION
from penstock.sources.packed_strings import Names
from penstock.sources.readers import Fetched
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.pipeline import Objects

CALLS_MAX = 32
"""At once, of all threads that read: calls wait, most of the time."""

CALLS_AHEAD = 4 * CALLS_MAX


class CallPlaces:
    """Keys that a user's function reads: as ``Places``.

    Args:
        source: With the keys and the function.
    """

    def __init__(self, source: Objects) -> None:
        assert source.read is not None
        self._read: Callable[[str], bytes | Mapping[str, bytes]] = source.read
        self._names = Names(source.urls)
        self._by_key: dict[str, int] | None = None
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(CALLS_MAX, "penstock-read-fn")  # its threads begin with the first call
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """The pool's threads are the parent's."""
        self._start()

    def __len__(self) -> int:
        return len(self._names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_by_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Fetched]]:
        """See ``Places``."""
        return enumerate(fetched for _, fetched in self.stream(numbers))

    def stream(self, numbers: Iterable[int]) -> Iterator[tuple[int, Fetched]]:
        """See ``Places``."""
        calls: deque[tuple[int, Future[Sample]]] = deque()
        try:
            for number in numbers:
                calls.append((number, self._pool.submit(self._called, self._names[number])))
                if len(calls) >= CALLS_AHEAD:
                    yield _answered(*calls.popleft())
            while calls:
                yield _answered(*calls.popleft())
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise
            raise ClosedError("the data set was closed while it was read", hint="open it again") from error
        finally:
            for _, call in calls:
                call.cancel()

    def find(self, key: str) -> int | None:
        """See ``Places``."""
        if self._by_key is None:
            self._by_key = {name: number for number, name in reversed(list(enumerate(self._names)))}
        return self._by_key.get(key)

    def close(self) -> None:
        """Let calls under way end, and the pool's threads; idempotent."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _called(self, key: str) -> Sample:
        try:
            found = self._read(key)
        except Exception as error:
            raise failed(self._read, error, stage="read", sample_key=key) from error
        members = found if isinstance(found, Mapping) else {NO_EXTENSION: found}
        return Sample(key, {name: memoryview(value) for name, value in members.items()}, 0)


def _answered(number: int, call: Future[Sample]) -> tuple[int, Fetched]:
    sample = call.result()
    return number, Fetched(sample, sample.key)
