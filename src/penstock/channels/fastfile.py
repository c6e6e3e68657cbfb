"""Channels that are mounts: FastFile mode, and File mode with ``start="lazy"``.

With ``start="lazy"``, the program starts immediately, while the files arrive. The channel is a mount with a cache on this
node's disk, and a thread of the runner reads all objects into that cache. So one mechanism serves files that have arrived and
files that have not: a file that the program reads early is fetched from the store once for both; others come from the disk.
"""

from __future__ import annotations

import math
import shutil
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.cache import CacheConfig, CacheStatistics
from penstock.cache.warm import warm
from penstock.channels.entries import Entries, objects_of, open_source
from penstock.channels.file import FileChannel, link_directory, linked_directory
from penstock.channels.interruptible import Interruptible
from penstock.errors import ConfigError, DirectoryMissingError
from penstock.fetch import PlanItem
from penstock.index import write_manifest
from penstock.mount import MountConfig, start_mount
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.channels.entries import ChannelObject, EpochOrder
    from penstock.channels.inputs import InputChannel
    from penstock.mount import RunningMount
    from penstock.store import Store


class FastFileChannel:
    """A channel that is a mount; see ``RunningChannel``.

    Args:
        mount: The mount; its directory is removed at the end.
        manifest: File that names this host's share, to be removed at the end; None if the host gets all objects.

    Attributes:
        filling: Reads the objects into the mount's cache, with ``start="lazy"``.
    """

    def __init__(self, mount: RunningMount, *, manifest: Path | None) -> None:
        self.path = mount.directory
        self._mount = mount
        self._manifest = manifest
        self.filling: CacheFilling | None = None

    def check(self) -> None:
        """Raise an error if the mount has ended, or an object cannot be read into the cache.

        Raises:
            WorkerDiedError: The process that serves the mount has ended.
            StoreError: The objects cannot be listed, or one of them cannot be read.
        """
        self._mount.check()
        if self.filling is not None:
            self.filling.check()

    def warnings(self) -> list[str]:
        """Return the last warnings and errors of the mount."""
        return self._mount.warnings()

    def close(self) -> None:
        """Stop what still arrives, and unmount; idempotent. The cache belongs to the run's directory."""
        if self.filling is not None:
            self.filling.close()
        self._mount.close()
        _remove_if_empty(self.path)
        if self._manifest is not None:
            self._manifest.unlink(missing_ok=True)


def open_fastfile_channel(
    channel: InputChannel, entries: Entries, *, path: Path, order: EpochOrder, connection: Mapping[str, Any]
) -> FastFileChannel | FileChannel:
    """Mount a channel, or link a directory of this machine.

    Names are listed when the program asks for them, and once: the names do not change while the program runs. Files
    that an earlier run in File mode has left at `path` are hidden meanwhile, and stay.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order; needed if hosts share it.
        path: The directory on which it is mounted.
        order: Says which entries this host gets.
        connection: Options of ``penstock.connect``.

    Raises:
        ConfigError: The URL is not a folder, or the system does not permit the mount.
        StoreError: The store cannot be listed.

    Cost: one request, and what ``penstock.mount`` costs; a listing of everything if hosts share the channel.
    """
    if (directory := linked_directory(channel, order)) is not None:
        link_directory(path, directory, channel=channel.name)
        return FileChannel(path, removes_link=True)
    if path.is_symlink():
        path.unlink()  # of an earlier run with the same base directory
    url = folder_url(channel, entries.store)
    with ExitStack() as undone:
        manifest = None
        if not order.has_all:
            manifest = path.with_name(f".{path.name}.manifest.jsonl")
            undone.callback(manifest.unlink, missing_ok=True)
            _write_share(manifest, url, entries, order)
        path.mkdir(parents=True, exist_ok=True)
        undone.callback(_remove_if_empty, path)
        config = MountConfig(
            url=url,
            directory=str(path),
            connection=dict(connection),
            manifest=None if manifest is None else str(manifest),
            metadata_ttl_s=math.inf,
            nonempty=True,
        )
        mount = start_mount(config, is_bound=True)
        undone.pop_all()
    return FastFileChannel(mount, manifest=manifest)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def folder_url(channel: InputChannel, store: Store) -> str:
    """Return the URL of a channel with a slash at its end.

    Raises:
        ConfigError: There is nothing below it: it is an object, the beginning of a name, or empty.
    """
    url = channel.url if channel.url.endswith("/") else f"{channel.url}/"
    _, prefix = compose.split(url)
    try:
        found = next(store.list(prefix), None)
    except DirectoryMissingError:
        found = None
    if found is None:
        raise ConfigError(
            f"channel {channel.name!r}: there is nothing below {url}, and FastFile mode mounts folders",
            hint="name the folder itself, with a slash at its end",
        )
    return url


def _write_share(file: Path, url: str, entries: Entries, order: EpochOrder) -> None:
    """Write a manifest of this host's share, with keys relative to the folder that is mounted."""
    objects = objects_of(order.entries(entries, epoch=0))
    infos = (ObjectInfo(each.name, each.size_bytes or 0, each.etag, each.modified_s) for each in objects)
    file.unlink(missing_ok=True)  # of a killed run; and no link is followed
    with file.open("xb") as output:
        write_manifest(infos, output, base_url=url)


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
) -> FastFileChannel | FileChannel:
    """Mount a channel and begin to fill the mount's cache, or link a directory of this machine.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order.
        path: The directory on which it is mounted.
        order: Says which entries this host gets.
        connection: Options of ``penstock.connect``; a cache among them is used instead of `cache`.
        cache: Directory of the cache. It may fill the disk up to the share that ``CacheConfig`` leaves free.

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
    if isinstance(mount, FileChannel):
        return mount
    try:
        folder = replace(channel, url=folder_url(channel, entries.store))
        root, _ = compose.split(folder.url)
        store = Interruptible(compose.connect(root, **options))
        try:
            found = Entries(open_source(folder, lambda _: store))
            mount.filling = CacheFilling(store, objects_of(order.entries(found, epoch=0)))
        except BaseException:
            store.close()
            raise
    except BaseException:
        mount.close()
        raise
    return mount
