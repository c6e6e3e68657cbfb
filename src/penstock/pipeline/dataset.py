"""``Dataset``: the samples of a pipeline by number and by key, as ``Pipeline.open`` returns them.

``Pipeline.open`` opens a data set and a join may read another pipeline, but a layer never imports one that lies above it. So
``penstock/__init__.py``, which Python runs before any other module of the package, assigns the two functions for this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, overload

from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

Values: TypeAlias = dict[str, Any]
Many: TypeAlias = "slice | range | list[int] | list[str] | tuple[int, ...] | NDArray[np.integer]"
D = TypeVar("D")

open_dataset: Callable[..., Any]
"""Opens the data set of a pipeline; takes the arguments of ``Pipeline.open`` and returns a ``penstock.Dataset``."""

iter_batches: Callable[[Any], Iterator[dict[str, Any]]]
"""Iterates the batches of a pipeline that ends with ``.batch()``, all of them on this rank, once."""


@boundary
class Dataset(ABC):
    """Samples by number and by key: objects, one each or grouped by stem, or the samples of indexed shards.

    ``Pipeline.open`` makes it. Each sample is a dict of the values that the pipeline's stages make, with ``__key__``,
    ``__shard__`` (the URL of the object or shard) and ``__position__`` (the sample's number)::

        with ps.objects("s3://bucket/images/").decode(ps.Image("jpg")).open() as ds:
            ds[0], ds[-1], ds[10:20], ds[[5, 2, 5]], ds["images/7.jpg"], len(ds), "images/7.jpg" in ds

    Any number of threads may use a data set at once. It pickles with its listing or index and without connections, and it keeps
    working in a forked child. Used as a context manager, it closes at the end of the block.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of their numbers, if ``pack(labels=)`` made the shards of words; otherwise None.

        Cost: one request, at the first use.
        """

    @abstractmethod
    def read_samples(self, indices: Sequence[int | str] | NDArray[np.integer], *, epoch: int = 0) -> list[Values]:
        """Read samples by number or key, in parallel; a sample that is requested twice is read once.

        Args:
            indices: int[n], or keys.
            epoch: Epoch number, from 0, for the `rng` of ``map`` functions.

        Returns:
            One dict per index, in the order of `indices`; repeated indices get dicts of their own.

        Raises:
            IndexError: A number is out of range.
            KeyError: No sample has this key.
            ObjectChangedError: An object or shard was replaced after it was listed or indexed.
            StoreError, DataError: A sample cannot be read or decoded; the error names its key and shard.

        Cost: one request per sample and member object, as many at a time as the store takes; ranges that lie near each
            other in a shard are read by one request. Holds the samples.
        """

    @abstractmethod
    def iter_samples(self, indices: Iterable[int | str] | None = None, *, epoch: int = 0) -> Iterator[Values]:
        """Iterate over samples in the given order, reading ahead.

        Args:
            indices: Numbers or keys, pulled a little ahead of the samples; None: all samples in stored order. A
                permutation shuffles fully: ``ds.iter_samples(np.random.default_rng(epoch).permutation(len(ds)))``.
            epoch: Epoch number, from 0, for the `rng` of ``map`` functions.

        Raises:
            ClosedError: The data set is closed. While iterating: as ``read_samples``.

        Cost: one request per sample; samples that follow each other in a shard are read by one request. Holds the
            read-ahead, within the process's byte budget.
        """

    @abstractmethod
    def find(self, key: str) -> int | None:
        """Return the number of the first sample with this key, or None.

        Raises:
            ConfigError: The index has no keys, as the indexes of other tools.

        Cost: the first call reads all keys and keeps them, about 150 bytes per key.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the stores; idempotent. Calls in progress in other threads finish or raise ``ClosedError``."""

    @overload
    def __getitem__(self, index: int | np.integer | str) -> Values: ...
    @overload
    def __getitem__(self, index: Many) -> list[Values]: ...
    def __getitem__(self, index: int | np.integer | str | Many) -> Any:
        """Return one sample by number or key, or a list of samples by a slice or a list of either.

        Negative numbers count from the end.

        Raises:
            IndexError, KeyError, ObjectChangedError, StoreError, DataError: As ``read_samples``.

        Cost: as ``read_samples``.
        """
        return self.at(index)

    def at(self, index: Any, *, epoch: int = 0) -> Any:
        """Return ``dataset[index]`` with the random numbers that ``map`` functions draw in `epoch`."""
        if isinstance(index, slice):
            return self.read_samples(range(*index.indices(len(self))), epoch=epoch)
        if isinstance(index, str) or not hasattr(index, "__len__") or getattr(index, "ndim", 1) == 0:
            return self.read_samples([index], epoch=epoch)[0]
        return self.read_samples(index, epoch=epoch)

    def __getitems__(self, indices: Sequence[int]) -> list[Values]:
        """Return ``read_samples(indices)``; a PyTorch ``DataLoader`` calls this method."""
        return self.read_samples(indices)

    def __iter__(self) -> Iterator[Values]:
        return self.iter_samples()

    def __contains__(self, key: object) -> bool:
        """Whether a sample has this key. Cost: as ``find``."""
        return isinstance(key, str) and self.find(key) is not None

    def get(self, key: str, default: D | None = None) -> Values | D | None:
        """Return the first sample with this key, or `default`.

        Raises:
            StoreError, DataError: The sample cannot be read or decoded; the error names its key and shard.

        Cost: as ``find``, and one request.
        """
        number = self.find(key)
        return default if number is None else self.read_samples([number])[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
