"""``DataWriter``: writes the data set of a scenario to a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, TYPE_CHECKING, cast

from penstock.bench.samples import KINDS, write_tar, write_tfrecord
from penstock.errors import ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bench.samples import Fields
    from penstock.bench.scenarios import DataSet
    from penstock.store.base import Store

WRITERS = 8
"""Objects that are written at a time."""


class DataWriter:
    """The objects of a data set, of which those that are there are not written again.

    Args:
        data: The data set.
        store: Store of the folder in which the folder of the data set lies.

    Attributes:
        missing: Keys of the objects that are to be written, and the number of the first sample of each.

    Raises:
        StoreError: The store cannot be listed.

    Cost: one listing.
    """

    def __init__(self, data: DataSet, store: Store) -> None:
        self._data, self._store, self._kind = data, store, KINDS[data.kind]
        self._shard_samples = data.shard_samples or max(1, data.shard_bytes // self._kind.sample_bytes)
        if data.format == "objects":
            self._shard_samples = 1
        there: set[str] = set()
        with suppress(ObjectMissingError):  # a directory that is still to be made
            there = {info.key for info in store.list(f"{data.folder}/")}
        keys = {self._key(start): start for start in range(0, data.count, self._shard_samples)}
        self.missing = {key: start for key, start in keys.items() if key not in there}

    def write(self, progress: Callable[[str, int, int], object]) -> None:
        """Write what is missing, and tell `progress` the folder, the objects that are written, and how many are missing.

        Raises:
            StoreError: An object cannot be written. The same call goes on after those that were.
        """
        if not self.missing:
            return
        samples = self._kind.make(min(self._data.count, self._kind.distinct_count), self._data.seed)
        with ThreadPoolExecutor(WRITERS) as pool:
            written = [pool.submit(self._write, key, start, samples) for key, start in self.missing.items()]
            try:
                for done, each in enumerate(as_completed(written)):
                    progress(f"writing {self._data.folder}", done, len(written))
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _key(self, start: int) -> str:
        """The label is in an object's name, as data sets of single pictures have it."""
        if self._data.format == "objects":
            return f"{self._data.folder}/{start:08d}-{start % 10}.{self._kind.suffix}"
        return f"{self._data.folder}/{start // self._shard_samples:06d}.{self._data.format}"

    def _write(self, key: str, start: int, samples: list[Fields]) -> None:
        numbers = range(start, min(start + self._shard_samples, self._data.count))
        if self._data.format == "objects":
            self._store.write(key, next(iter(samples[start % len(samples)].values())))
            return
        with self._store.writer(key) as writer:
            file = cast("IO[bytes]", writer)
            if self._data.format == "tar":
                write_tar(file, ((f"{number:08d}", samples[number % len(samples)]) for number in numbers))
            else:
                write_tfrecord(file, (samples[number % len(samples)] for number in numbers))
