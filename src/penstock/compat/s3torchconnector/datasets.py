"""``S3MapDataset`` and ``S3IterableDataset``: the objects of a prefix, or of a list, as a data set of PyTorch.

A reader that requests its object only when it is read waits some 30 ms for each object, however fast the network is. Whether
a reader will be read is unknown before it is handed out, so objects are read ahead until readers are dropped unread:
``UNREAD_MAX`` unread ones in a row end the read-ahead, and as many read ones in a row begin it again. A program that only
looks at keys therefore pays for the requests in flight until then.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack

import torch.utils.data

from penstock.compat.s3torchconnector.objects import ObjectLocation, ObjectSource, ReadCounter, first_part
from penstock.compat.s3torchconnector.readers import kind_of
from penstock.compat.s3torchconnector.stores import BucketStores, parse_uri
from penstock.config import check_names, default_budget_bytes, share_machine
from penstock.errors import ConfigError
from penstock.fetch import configure_process_budget
from penstock.store.base import MultiStore
from penstock.system.tracebacks import boundary
from penstock.torch.ranks import rank_and_world_size
from penstock.types import Blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.compat.s3torchconnector.readers import ReaderConstructor, ReaderKind, S3Reader
    from penstock.compat.s3torchconnector.stores import S3ClientConfig
    from penstock.errors import StoreError
    from penstock.fetch import PlanItem


class ReadersAhead:
    """Iterator over readers of objects. Dropping it cancels the requests in flight. For one thread at a time.

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


Locate: TypeAlias = "Callable[[BucketStores], Iterator[ObjectLocation]]"
"""Returns an iterator over the places of the objects of a data set, in a fixed order."""


def _listed(bucket: str, prefix: str, stores: BucketStores) -> Iterator[ObjectLocation]:
    """Return an iterator over the objects whose keys begin with a prefix. Cost: one request per 1 000 keys."""
    return (ObjectLocation(bucket, info.key, info.size_bytes) for info in stores.store(bucket).list(prefix))


def _given(locations: tuple[ObjectLocation, ...], _: BucketStores) -> Iterator[ObjectLocation]:
    return iter(locations)


def _given_by(object_uris: str | Iterable[str]) -> Locate:
    if not isinstance(object_uris, str) and not hasattr(object_uris, "__iter__"):
        raise ConfigError(f"object_uris={object_uris!r} must be an s3:// URI, or an iterable of them")
    uris = (object_uris,) if isinstance(object_uris, str) else object_uris
    return partial(_given, tuple(ObjectLocation(*parse_uri(uri)) for uri in uris))


def identity(reader: S3Reader) -> S3Reader:
    """Return the reader itself: the default `transform`."""
    return reader


class DatasetOptions(TypedDict, total=False):
    """Keyword arguments of ``from_prefix`` and ``from_objects``, all of them optional.

    Attributes:
        region: Region of the buckets. If it is wrong, the store's answer corrects it; None takes the environment's.
        endpoint: URL of an S3-compatible store; None takes the environment's, else Amazon's.
        transform: Function that makes a sample of each reader; the default returns the reader.
        s3client_config: Options of the client.
        reader_constructor: Kind of the readers: one of ``S3ReaderConstructor``, or a function of the user's.
    """

    region: str | None
    endpoint: str | None
    transform: Callable[[S3Reader], Any]
    s3client_config: S3ClientConfig | None
    reader_constructor: ReaderConstructor | None


class _Objects:
    """The base class of both kinds of data sets."""

    def __init__(self, locate: Locate, **options: Unpack[DatasetOptions]) -> None:
        check_names(type(self).__name__, options, DatasetOptions.__annotations__)
        transform = options.get("transform", identity)
        if not callable(transform):
            raise ConfigError(f"transform={transform!r} cannot be called")
        self._locate = locate
        self._stores = BucketStores(
            region=options.get("region"), endpoint=options.get("endpoint"), config=options.get("s3client_config")
        )
        self._transform = transform
        self._kind = kind_of(options.get("reader_constructor"))
        self._demand = ReadCounter()

    @property
    def region(self) -> str | None:
        """The region that was given."""
        return self._stores.region

    @property
    def endpoint(self) -> str | None:
        """The endpoint that was given."""
        return self._stores.endpoint

    def _samples(self, locations: Iterable[ObjectLocation]) -> Iterator[Any]:
        """Return an iterator over the samples of objects, which are read ahead."""
        worker = torch.utils.data.get_worker_info()
        if worker is not None:  # the workers of a DataLoader share the machine and its memory
            share_machine(worker.num_workers)
            configure_process_budget(default_budget_bytes() // worker.num_workers)
        readers = ReadersAhead(self._stores, locations, kind=self._kind, demand=self._demand)
        return map(self._transform, readers)


@boundary
class S3MapDataset(_Objects, torch.utils.data.Dataset[Any]):
    """The objects of a prefix or list, by number; ``from_prefix`` and ``from_objects`` create it.

    If a DataLoader has a batch size, all objects of a batch are read at once.

    Cost: nothing when it is made; one listing at the first use, which workers inherit if the DataLoader asked for the length
        before, as it does when it shuffles. Memory holds the keys.
    """

    _locations: tuple[ObjectLocation, ...] | None = None

    @classmethod
    def from_prefix(cls, s3_uri: str, **options: Unpack[DatasetOptions]) -> Self:
        """Return a data set of all objects whose URIs begin with `s3_uri`, in the order of their keys.

        Args:
            s3_uri: ``s3://bucket[/prefix]``; the prefix may end anywhere in a key.
            **options: The options that ``DatasetOptions`` describes.

        Raises:
            ConfigError: An argument is invalid; no request has been sent.
        """
        return cls(partial(_listed, *parse_uri(s3_uri)), **options)

    @classmethod
    def from_objects(cls, object_uris: str | Iterable[str], **options: Unpack[DatasetOptions]) -> Self:
        """Return a data set of the objects that `object_uris` names, in this order.

        Args:
            object_uris: One ``s3://bucket/key``, or an iterable of them, which is consumed at once.
            **options: The options that ``DatasetOptions`` describes.

        Raises:
            ConfigError: An argument is invalid; no request has been sent.
        """
        return cls(_given_by(object_uris), **options)

    def __len__(self) -> int:
        return len(self._located())

    def __getitem__(self, i: int) -> Any:
        """Return the sample of object `i`.

        Raises:
            IndexError: There is no such object.
            StoreError: The bucket cannot be listed, or, when the reader is read, the object cannot.
        """
        source = ObjectSource(self._stores, self._located()[i])
        return self._transform(self._kind.make(source))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several objects, in this order; a DataLoader calls it for each batch.

        Raises:
            IndexError: There is no such object.
            StoreError: As for a single object.

        Cost: one request for each object, as many at a time as the store allows.
        """
        located = self._located()
        return list(self._samples([located[i] for i in indices]))

    def _located(self) -> tuple[ObjectLocation, ...]:
        if self._locations is None:
            self._locations = tuple(self._locate(self._stores))
        return self._locations


@boundary
class S3IterableDataset(_Objects, torch.utils.data.IterableDataset[Any]):
    """The objects of a prefix or list, in order; ``from_prefix`` and ``from_objects`` create it.

    The objects of the next samples are read ahead, as many at a time as pay, within the process's byte budget.

    With ``enable_sharding=True`` ranks and DataLoader workers divide the objects: a rank has those whose number, modulo the
    world size, is its own, and a worker has every ``num_workers``-th of these. Otherwise each worker of each rank yields all of
    them. The rank is that of ``torch.distributed`` when the iteration begins or, for spawned workers, when they are started.

    Cost: one listing for each iteration and worker; memory within the budget, and what the program keeps of the readers.
    """

    def __init__(self, locate: Locate, *, enable_sharding: bool = False, **options: Unpack[DatasetOptions]) -> None:
        super().__init__(locate, **options)
        self._enable_sharding = bool(enable_sharding)
        self._rank: tuple[int, int] | None = None

    @classmethod
    def from_prefix(cls, s3_uri: str, *, enable_sharding: bool = False, **options: Unpack[DatasetOptions]) -> Self:
        """Return a data set of all objects whose URIs begin with `s3_uri`, in the order of their keys.

        Args:
            s3_uri: ``s3://bucket[/prefix]``; the prefix may end anywhere in a key.
            enable_sharding: Whether ranks and workers divide the objects.
            **options: The options that ``DatasetOptions`` describes.

        Raises:
            ConfigError: An argument is invalid; no request has been sent.
        """
        return cls(partial(_listed, *parse_uri(s3_uri)), enable_sharding=enable_sharding, **options)

    @classmethod
    def from_objects(
        cls, object_uris: str | Iterable[str], *, enable_sharding: bool = False, **options: Unpack[DatasetOptions]
    ) -> Self:
        """Return a data set of the objects that `object_uris` names, in this order.

        Args:
            object_uris: One ``s3://bucket/key``, or an iterable of them, which is consumed at once.
            enable_sharding: Whether ranks and workers divide the objects.
            **options: The options that ``DatasetOptions`` describes.

        Raises:
            ConfigError: An argument is invalid; no request has been sent.
        """
        return cls(_given_by(object_uris), enable_sharding=enable_sharding, **options)

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration over all objects, or over the share of this rank and worker.

        Raises:
            StoreError: While iterating: the bucket cannot be listed; or, when a reader is read, the object cannot.
        """
        locations = self._locate(self._stores)
        if self._enable_sharding:
            rank, world_size = rank_and_world_size() or self._rank or (0, 1)
            worker = torch.utils.data.get_worker_info()
            number, workers_count = (0, 1) if worker is None else (worker.id, worker.num_workers)
            # object i belongs to rank i % world_size, and is that rank's object i // world_size
            locations = islice(locations, rank + world_size * number, None, world_size * workers_count)
        return self._samples(locations)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rank": rank_and_world_size() or self._rank}
