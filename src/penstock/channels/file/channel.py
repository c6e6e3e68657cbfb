"""A channel in File mode: its objects are files before the program starts."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from penstock import compose
from penstock.channels.entries import objects_of
from penstock.channels.file.claiming import claim, link_directory
from penstock.channels.file.linking import link_file
from penstock.channels.inflating import Inflating
from penstock.channels.inside import check_folders
from penstock.errors import ConfigError, StoreError
from penstock.store.inflight import InFlight
from penstock.store.local import LocalStore
from penstock.text.sizes import format_bytes
from penstock.transfer import ETAG_ATTRIBUTE, FileReceiver, TransferItem, is_downloaded, stream
from penstock.types import Head, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from penstock.channels.entries import Entries, EpochOrder
    from penstock.channels.entry_table import ChannelObject
    from penstock.channels.inputs import InputChannel
    from penstock.store import Store

LOCAL_SCHEMES = ("", "file")

HEADS_MAX = 64
"""Questions for sizes in flight: 64 at 30 ms are 2 000 objects/s."""


class ChannelProgress(Protocol):
    """Hears how far the download of a channel is."""

    def planned(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files of so many bytes are missing."""

    def progressed(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files, and bytes, have arrived since the last call."""


@dataclass(frozen=True, slots=True)
class FileChannel:
    """A channel in File mode; see ``RunningChannel``.

    Attributes:
        path: Directory of the files, or a link to a directory of this machine.
    """

    path: Path

    def check(self) -> None:
        """Return: all files are there."""

    def warnings(self) -> list[str]:
        """Return an empty list: the program reads the files themselves."""
        return []

    def close(self) -> None:
        """Leave the files, which belong to the run's directory."""


def open_file_channel(
    channel: InputChannel,
    entries: Entries,
    *,
    path: Path,
    order: EpochOrder,
    progress: ChannelProgress | None = None,
    downloads: Path | None = None,
) -> FileChannel:
    """Make the files of a channel.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order.
        path: Directory of the files.
        order: Says which entries this host gets.
        progress: Hears how far it is.
        downloads: Directory that keeps downloads for later runs; the files of the channel are then links to its files. None
            downloads into `path` itself.

    Raises:
        ConfigError: A key is not a safe file name, the disk has too little room, or files of somebody else lie in `path`.
        StoreError: An object cannot be read.
        OSError: The disk failed.

    Cost: one request for each object of up to about two parts that is not there yet, else one for each part.
    """
    if (directory := linked_directory(channel, order)) is not None:
        link_directory(path, directory, channel=channel.name)
        return FileChannel(path)
    root = path if downloads is None else downloads / _folder_of(channel)
    items = _items(entries.store, LocalStore(root), objects_of(order.entries(entries, epoch=0)))
    by_name = {item.key: item for item in items}
    if channel.data_type == "S3Prefix":
        items = _without_folders(channel, by_name)
        by_name = {item.key: item for item in items}
    claim(
        path,
        by_name,
        channel=channel.name,
        is_there=lambda name: _is_there(channel, replace(by_name[name], path=path / name)),
    )
    if downloads is not None:
        root.mkdir(parents=True, exist_ok=True)
        check_folders(downloads, (f"{root.name}/{name}" for name in by_name))
    missing = items if _is_empty(root) else [item for item in items if not _is_there(channel, item)]
    size_bytes = sum(item.info.size_bytes for item in missing)
    _check_room(channel, root, size_bytes)
    listener = _Listener(channel, progress)
    if progress is not None:
        progress.planned(channel, len(missing), size_bytes)
    decoder = None if channel.compression == "None" else _inflating
    stream(entries.store, iter(missing), FileReceiver(listener, decoder=decoder), listener)
    listener.raise_failure()
    if root != path:
        for item in items:
            assert item.path is not None
            link_file(item.path, path / item.key)
    return FileChannel(path)


def linked_directory(channel: InputChannel, order: EpochOrder) -> Path | None:
    """Return the directory of this machine that can take the channel's place as it is, or None if it must be made."""
    scheme = channel.url.partition("://")[0] if "://" in channel.url else ""
    if scheme not in LOCAL_SCHEMES or channel.data_type != "S3Prefix" or channel.compression != "None":
        return None
    directory = compose.local_path(channel.url)
    return directory if directory.is_dir() and order.has_all else None


def _items(source: Store, files: LocalStore, objects: Iterable[ChannelObject]) -> list[TransferItem]:
    """Return what is downloaded to where. Objects of unknown size or version are asked for, several at a time.

    Raises:
        ConfigError: A name is not a safe path.
        StoreError: An object does not exist.
    """
    found: list[TransferItem] = []
    asked: InFlight[int] = InFlight(source)
    try:
        for each in objects:
            info = ObjectInfo(each.key, each.size_bytes or 0, each.etag, each.modified_s)
            found.append(TransferItem(info, each.name, files.path(each.name)))
            if each.size_bytes is None or each.etag is None:
                if len(asked) >= HEADS_MAX:
                    _take_answer(asked, found)
                asked.submit(Head(each.key), len(found) - 1)
        while asked:
            _take_answer(asked, found)
    except BaseException:
        asked.cancel()
        asked.drain()
        raise
    return found


def _without_folders(channel: InputChannel, items: Mapping[str, TransferItem]) -> list[TransferItem]:
    """Return the items whose names are not also directories of others: as in a mount, the directory hides the file."""
    folders = {name.rpartition("/")[0] for name in items}
    folders |= {os.fspath(above) for folder in folders for above in PurePosixPath(folder).parents}
    if hidden := folders & items.keys():
        what = "Channel %r: the objects %s are left out, because directories have the same names."
        logging.getLogger("penstock").warning(what, channel.name, ", ".join(map(repr, sorted(hidden)[:3])))
    return [item for name, item in items.items() if name not in hidden]


def _take_answer(asked: InFlight[int], found: list[TransferItem]) -> None:
    index, completion = asked.wait()
    if completion.error is not None:
        raise completion.error
    assert completion.info is not None
    item = found[index]
    found[index] = replace(item, info=completion.info._replace(key=item.info.key))


def _is_empty(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def _is_there(channel: InputChannel, item: TransferItem) -> bool:
    assert item.path is not None
    return (is_downloaded if channel.compression == "None" else _is_inflated)(item.path, item.info)


def _is_inflated(path: Path, info: ObjectInfo) -> bool:
    """Return whether `path` is the inflated file of this version of the object.

    Without the size, the ETag must be known. A file of the object's own size is taken for one that was not inflated.
    """
    try:
        size_bytes, etag = path.stat().st_size, os.getxattr(path, ETAG_ATTRIBUTE)
    except OSError:
        return False
    is_other_size = size_bytes != info.size_bytes
    return bool(etag) and is_other_size and is_downloaded(path, info._replace(size_bytes=size_bytes))


def _inflating(item: TransferItem) -> Inflating:
    return Inflating(item.info.key)


def _folder_of(channel: InputChannel) -> str:
    """Return the name of the folder that keeps what this URL holds, also for channels of other names."""
    what = f"{channel.url}\x00{channel.data_type}\x00{channel.compression}"
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


def _check_room(channel: InputChannel, root: Path, size_bytes: int) -> None:
    room_bytes = shutil.disk_usage(root).free
    if size_bytes > room_bytes:
        raise ConfigError(
            f"channel {channel.name!r} needs {format_bytes(size_bytes)}, and {os.fspath(root)} has {format_bytes(room_bytes)}",
            hint="mode=fastfile and mode=pipe need no room; --base names another disk",
        )


class _Listener:
    """Passes progress on, and keeps the first failure; see ``penstock.transfer.TransferListener``."""

    def __init__(self, channel: InputChannel, progress: ChannelProgress | None) -> None:
        self._channel = channel
        self._progress = progress
        self._failures_count = 0
        self._failure: Exception | None = None

    def moved(self, item: TransferItem) -> None:
        """Count a file."""
        del item
        if self._progress is not None:
            self._progress.progressed(self._channel, 1, 0)

    def failed(self, item: TransferItem, error: Exception) -> None:
        """Keep the first failure; the other files are still tried."""
        del item
        self._failures_count += 1
        self._failure = self._failure or error

    def progressed(self, size_bytes: int) -> None:
        """Count bytes."""
        if self._progress is not None:
            self._progress.progressed(self._channel, 0, size_bytes)

    def raise_failure(self) -> None:
        """Raise the first failure, if there is any."""
        if self._failure is None:
            return
        if self._failures_count == 1:
            raise self._failure
        what = f"{self._failures_count} objects of channel {self._channel.name!r} cannot be read; the first: {self._failure}"
        raise StoreError(what) from self._failure
