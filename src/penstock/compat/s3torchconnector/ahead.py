"""Readers of many objects, in order, while the objects behind the next readers are already being read.

A reader that requests its object only when it is read waits some 30 ms for each object, however fast the network is. Whether
a reader will be read is unknown before it is handed out, so objects are read ahead until readers are dropped unread:
``UNREAD_MAX`` of them in a row end the read-ahead, and as many in a row that were read begin it again. A program that only
looks at keys therefore pays for what was in flight until then.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Self

from penstock.compat.s3torchconnector.objects import WHOLE_BYTES_MAX, ObjectSource, first_part
from penstock.config import KIB
from penstock.errors import ConfigError
from penstock.store.base import MultiStore
from penstock.types import Blob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.compat.s3torchconnector.objects import ObjectLocation
    from penstock.compat.s3torchconnector.readers import ReaderKind, S3Reader
    from penstock.compat.s3torchconnector.stores import BucketStores
    from penstock.errors import StoreError
    from penstock.fetch import PlanItem

UNREAD_MAX = 16
"""At 100 KB an object this is less than one part of a large one, and far fewer readers than most batches have."""

UNKNOWN_BYTES_MIN = 256 * KIB
"""As much memory is reserved for an object of unknown size; most pictures are shorter."""


class ReadCounter:
    """Decides from the latest readers whether and how far to read ahead. Any thread may drop readers.

    Attributes:
        is_wanted: Whether objects are to be read ahead.
        unknown_bytes: Bytes to request of an object of unknown size. The number grows while objects turn out to be longer.
    """

    def __init__(self) -> None:
        self.is_wanted = True
        self.unknown_bytes = UNKNOWN_BYTES_MIN
        self._against_count = 0  # in a row: readers that argue for the opposite of `is_wanted`

    def note_read(self) -> None:
        """A reader was read."""
        self._note(is_read=True)

    def note_dropped(self) -> None:
        """A reader was dropped unread."""
        self._note(is_read=False)

    def note_length(self, read_bytes: int) -> None:
        """So many bytes of an object were read ahead."""
        if read_bytes >= self.unknown_bytes:
            self.unknown_bytes = min(2 * self.unknown_bytes, WHOLE_BYTES_MAX)

    def _note(self, *, is_read: bool) -> None:
        if is_read is self.is_wanted:
            self._against_count = 0
            return
        self._against_count += 1
        if self._against_count >= UNREAD_MAX:
            self.is_wanted, self._against_count = is_read, 0


class ReadersAhead:
    """Iterator over readers of objects. Dropping it cancels what is in flight. For one thread at a time.

    Args:
        stores: The stores of the objects' buckets.
        locations: The objects; pulled lazily.
        kind: Kind of the readers; only sequential ones are read ahead.
        demand: Counts which readers are read.

    Cost: that of ``Store.try_read_many``: one request for each object, as many at a time as pay, within the process's budget. A
        reader that was handed out holds its object, up to 8 MiB of it, until it is dropped.
    """

    def __init__(
        self, stores: BucketStores, locations: Iterable[ObjectLocation], *, kind: ReaderKind, demand: ReadCounter
    ) -> None:
        self._stores = stores
        self._locations = iter(locations)
        self._kind = kind
        self._demand = demand
        self._pulled: deque[ObjectLocation] = deque()  # requested or about to be, and not handed out yet
        self._answers: Iterator[Blob | StoreError] | None = None
        self._store: MultiStore | None = None
        self._numbers: dict[str, int] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> S3Reader:
        answer = self._next_answer() if self._kind.is_ahead else None
        location = self._pulled.popleft() if self._pulled else next(self._locations)
        return self._kind.make(ObjectSource(self._stores, location, answer=answer, demand=self._demand))

    def close(self) -> None:
        """Cancel the requests in flight; idempotent."""
        answers, self._answers = self._answers, None
        close = getattr(answers, "close", None)
        if close is not None:
            close()

    def _next_answer(self) -> Blob | StoreError | None:
        """Wait for the next object's first part; None if it is not read ahead."""
        if not self._demand.is_wanted:
            self.close()
            return None
        if self._answers is None:
            self._answers = self._begin()
        try:
            answer = next(self._answers, None)
        except ConfigError:  # part_size is so large that a first part does not fit into the budget
            self.close()
            return None
        if isinstance(answer, Blob):
            self._demand.note_length(len(answer))
        return answer

    def _begin(self) -> Iterator[Blob | StoreError]:
        if not self._pulled:
            self._pulled.extend(islice(self._locations, 1))
        if not self._pulled:
            return iter(())
        if self._store is None:  # the first store says how all of them are read
            bucket = self._pulled[0].bucket
            self._store, self._numbers[bucket] = MultiStore([self._stores.store(bucket)]), 0
        return self._store.try_read_many(self._requests(self._store))

    def _requests(self, store: MultiStore) -> Iterator[PlanItem]:
        for location in tuple(self._pulled):
            yield self._request(store, location)
        for location in self._locations:
            self._pulled.append(location)
            yield self._request(store, location)

    def _request(self, store: MultiStore, location: ObjectLocation) -> PlanItem:
        number = self._numbers.get(location.bucket)
        if number is None:
            number = self._numbers[location.bucket] = len(self._numbers)
            store.add(self._stores.store(location.bucket))
        return first_part(location, key=f"{number}/{location.key}", unknown_bytes=self._demand.unknown_bytes)
