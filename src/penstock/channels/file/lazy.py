"""File mode with ``start="lazy"``: the program starts at once, while the files arrive.

The channel is a mount with a cache on this node's disk, and a thread of the runner reads all objects into that cache. So
there is one mechanism for what has arrived and for what has not: a file that the program reads too early is read from the
store, once for both, and everything else comes from the disk.
"""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.cache import CacheConfig, CacheStatistics
from penstock.cache.warm import warm
from penstock.channels.entries import Entries, objects_of, open_source
from penstock.channels.fastfile import FastFileChannel, LinkedChannel, folder_url, open_fastfile_channel
from penstock.channels.interruptible import Interruptible
from penstock.fetch import PlanItem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.channels.entries import EpochOrder
    from penstock.channels.entry_table import ChannelObject
    from penstock.channels.inputs import InputChannel
    from penstock.store import Store


class LazyChannel:
    """A channel whose files arrive while the program runs; see ``RunningChannel``.

    Args:
        mount: The mount that the program reads.
        filling: Reads the objects into the mount's cache.
    """

    def __init__(self, mount: FastFileChannel, filling: CacheFilling) -> None:
        self.path = mount.path
        self._mount = mount
        self._filling = filling

    def check(self) -> None:
        """Raise an error if the mount has ended, or an object cannot be read.

        Raises:
            WorkerDiedError: The process that serves the mount has ended.
            StoreError: The objects cannot be listed, or one of them cannot be read.
        """
        self._mount.check()
        self._filling.check()

    def warnings(self) -> list[str]:
        """Return the last warnings and errors of the mount."""
        return self._mount.warnings()

    def close(self) -> None:
        """Stop what still arrives, and unmount; idempotent. The cache belongs to the run's directory."""
        self._filling.close()
        self._mount.close()


class CacheFilling:
    """A thread that reads objects into a cache, in their order, until all are there or the cache is full.

    Args:
        store: A store with the cache; ``close`` closes it.
        objects: Finds the objects.
    """

    def __init__(self, store: Interruptible, objects: Iterator[ChannelObject]) -> None:
        self._store = store
        self._objects = objects
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-lazy", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended it, if there is one.

        Raises:
            StoreError: The objects cannot be listed, or one of them cannot be read.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop it and wait for its end; idempotent."""
        self._closed.set()
        self._store.interrupt()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        try:
            warm(self._store, self._requests())
        except Exception as error:
            if not self._closed.is_set():
                self._failure = error

    def _requests(self) -> Iterator[PlanItem]:
        for each in self._objects:
            if self._closed.is_set() or _is_full(self._store):
                return
            yield PlanItem(each.key, etag=each.etag, size_bytes=each.size_bytes, last_modified_s=each.modified_s)


def _is_full(store: Store) -> bool:
    """Whether more objects would take the place of others; those that were left out are read when the program reads them."""
    counts = store.statistics()
    assert isinstance(counts, CacheStatistics)
    return counts.evicted_bytes > 0 or counts.refused_count > 0


def open_lazy_channel(
    channel: InputChannel,
    entries: Entries,
    *,
    path: Path,
    order: EpochOrder,
    connection: Mapping[str, Any],
    cache: Path,
) -> LazyChannel | LinkedChannel:
    """Mount a channel and begin to fill the mount's cache, or link a directory of this machine.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order.
        path: The directory on which it is mounted.
        order: Says which entries this host gets.
        connection: Options of ``penstock.connect``; a cache among them is used instead of `cache`.
        cache: Directory that keeps what was read. It may fill the disk up to the share that ``CacheConfig`` leaves free.

    Raises:
        ConfigError: The URL is not a folder, or the system does not permit the mount.
        StoreError: The store cannot be listed.

    Cost: a mount, and each object once, in the background; a thread and a read-ahead within this process's budget.
    """
    options = dict(connection)
    if options.get("cache") is None:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        options["cache"] = CacheConfig(cache, shutil.disk_usage(cache).total)
    mount = open_fastfile_channel(channel, entries, path=path, order=order, connection=options)
    if isinstance(mount, LinkedChannel):
        return mount
    try:
        folder = replace(channel, url=folder_url(channel, entries.store))
        root, _ = compose.split(folder.url)
        store = Interruptible(compose.connect(root, **options))
        try:
            found = Entries(open_source(folder, lambda _: store))
            return LazyChannel(mount, CacheFilling(store, objects_of(order.entries(found, epoch=0))))
        except BaseException:
            store.close()
            raise
    except BaseException:
        mount.close()
        raise
