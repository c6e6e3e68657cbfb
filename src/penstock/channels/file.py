"""File mode: the objects of a channel are files below its directory before the program starts.

``penstock.transfer`` downloads them, or the directory becomes a link to a directory of this machine. The directory of
a channel holds exactly its objects: files of earlier runs are removed, and foreign files are refused. A record beside the
directory names the files that runs have put there. Files that the record does not name count as the channel's own only if they
equal its objects. Files that exist in the listed version are kept, so the next run continues an interrupted one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from penstock import compose
from penstock.channels.entries import objects_of
from penstock.channels.inside import check_folders, is_temporary, read_file, write_file
from penstock.errors import ConfigError, CorruptShardError, DataError, StoreError
from penstock.formats.compression import Gunzip
from penstock.index.place import HEADS_IN_FLIGHT_MAX
from penstock.store.inflight import perform_many
from penstock.store.local import LocalStore
from penstock.text.json_text import parse_json
from penstock.text.sizes import format_bytes
from penstock.transfer import ETAG_ATTRIBUTE, FileReceiver, FirstFailure, TransferItem, is_downloaded, stream
from penstock.types import Head, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from penstock.channels.entries import ChannelObject, Entries, EpochOrder
    from penstock.channels.inputs import InputChannel
    from penstock.store import Store
    from penstock.types import Buffer, Key

LOCAL_SCHEMES = ("", "file")


class ChannelProgress(Protocol):
    """Hears how far the download of a channel is."""

    def planned(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files of so many bytes are missing."""

    def progressed(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files, and bytes, have arrived since the last call."""


@dataclass(frozen=True, slots=True)
class FileChannel:
    """A channel in File mode, or a directory of this machine in the place of a mount; see ``RunningChannel``.

    Attributes:
        path: Directory of the files, or a link to a directory of this machine.
        removes_link: Whether the link is removed at the end, as a mount is.
    """

    path: Path
    removes_link: bool = False

    def check(self) -> None:
        """Return: all files are there."""

    def warnings(self) -> list[str]:
        """Return an empty list: the program reads the files themselves."""
        return []

    def close(self) -> None:
        """Leave the files, which belong to the run's directory; idempotent."""
        if self.removes_link:
            self.path.unlink(missing_ok=True)


class Inflating:
    """Inflates one object.

    Args:
        name: Name of the object in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._gunzip = Gunzip()

    def pieces(self, data: Buffer) -> Iterator[Buffer]:
        """Yield the decompressed bytes of the next piece, in pieces of a bounded size.

        Raises:
            CorruptShardError: The object is not gzip.
        """
        try:
            yield from self._gunzip.pieces(memoryview(data))
        except ValueError as error:
            raise self._failure(error) from None

    def end(self) -> None:
        """Check that the object is complete.

        Raises:
            CorruptShardError: The object is cut off.
        """
        try:
            self._gunzip.end()
        except ValueError as error:
            raise self._failure(error) from None

    def _failure(self, error: ValueError) -> DataError:
        if isinstance(error, DataError):
            return error
        return CorruptShardError(str(error), shard=self._name, hint="compression=Gzip is for objects that gzip wrote")


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
    missing = items if not any(root.iterdir()) else [item for item in items if not _is_there(channel, item)]
    size_bytes = sum(item.info.size_bytes for item in missing)
    _check_room(channel, root, size_bytes)
    listener = _ChannelListener(channel, progress)
    if progress is not None:
        progress.planned(channel, len(missing), size_bytes)
    decoder = None if channel.compression == "None" else lambda item: Inflating(item.info.key)
    stream(entries.store, iter(missing), FileReceiver(listener, decoder=decoder), listener)
    listener.check()
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
    """Return the objects to download, and their files. Objects of unknown size or version are asked for, several at a time.

    Raises:
        ConfigError: A name is not a safe path.
        StoreError: An object does not exist.
    """
    found: list[TransferItem] = []
    asked: list[tuple[int, Key]] = []
    for each in objects:
        if each.size_bytes is None or each.etag is None:
            asked.append((len(found), each.key))
        info = ObjectInfo(each.key, each.size_bytes or 0, each.etag, each.modified_s)
        found.append(TransferItem(info, each.name, files.path(each.name)))
    heads = ((index, Head(key)) for index, key in asked)
    for index, completion in perform_many(source, heads, requests_max=HEADS_IN_FLIGHT_MAX):
        assert completion.info is not None
        found[index] = replace(found[index], info=completion.info._replace(key=found[index].info.key))
    return found


def _without_folders(channel: InputChannel, items: Mapping[str, TransferItem]) -> list[TransferItem]:
    """Return the items whose names are not also directories of others: as in a mount, the directory hides the file."""
    folders = {name.rpartition("/")[0] for name in items}
    folders |= {os.fspath(above) for folder in folders for above in PurePosixPath(folder).parents}
    if hidden := folders & items.keys():
        what = "Channel %r: the objects %s are left out, because directories have the same names."
        logging.getLogger("penstock").warning(what, channel.name, ", ".join(map(repr, sorted(hidden)[:3])))
    return [item for name, item in items.items() if name not in hidden]


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


def _folder_of(channel: InputChannel) -> str:
    """Return the name of the folder that keeps the objects of this URL, also for channels of other names."""
    what = f"{channel.url}\x00{channel.data_type}\x00{channel.compression}"
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


def _check_room(channel: InputChannel, root: Path, size_bytes: int) -> None:
    room_bytes = shutil.disk_usage(root).free
    if size_bytes > room_bytes:
        raise ConfigError(
            f"channel {channel.name!r} needs {format_bytes(size_bytes)}, and {os.fspath(root)} has {format_bytes(room_bytes)}",
            hint="mode=fastfile and mode=pipe need no room; --base names another disk",
        )


class _ChannelListener(FirstFailure):
    """Passes progress on, and keeps the first failure; the other files are still tried."""

    def __init__(self, channel: InputChannel, progress: ChannelProgress | None) -> None:
        super().__init__()
        self._channel = channel
        self._progress = progress

    def moved(self, item: TransferItem) -> None:
        """Count a file."""
        if self._progress is not None:
            self._progress.progressed(self._channel, 1, 0)

    def progressed(self, size_bytes: int) -> None:
        """Count bytes."""
        if self._progress is not None:
            self._progress.progressed(self._channel, 0, size_bytes)

    def check(self) -> None:
        """Raise the first failure, if there is any, with the number of failures if there are more."""
        try:
            super().check()
        except Exception as error:
            if self.failures_count == 1:
                raise
            what = f"{self.failures_count} objects of channel {self._channel.name!r} cannot be read; the first: {error}"
            raise StoreError(what) from error


def claim(path: Path, names: Collection[str], *, channel: str, is_there: Callable[[str], bool]) -> None:
    """Make the directory of a channel, remove what earlier runs have left there, and record the files that it will have.

    A link in its place, which an earlier run has left, is removed.

    Args:
        path: The directory.
        names: Names of all files that it will have.
        channel: Name of the channel, for errors.
        is_there: Says whether the file of a name is the object as it is now.

    Raises:
        ConfigError: Somebody else has put something there. Nothing was changed.

    Cost: one reading of the directory tree.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists() and not path.is_dir():
        raise _in_the_way(path, channel)
    path.mkdir(parents=True, exist_ok=True)
    record = path.with_name(f".{path.name}.files")
    known = _read(record)
    leftovers, folders = [], []
    for entry, name in _below(os.fspath(path), ""):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
            continue
        is_known = name in known or is_temporary(entry.name)
        is_wanted = name in names and entry.is_file(follow_symlinks=False)
        if not is_known and not (is_wanted and is_there(name)):
            raise _in_the_way(entry.path, channel)
        if not is_wanted:
            leftovers.append(entry.path)
    wanted = set(names)
    if not wanted <= known:
        write_file(
            record, json.dumps(sorted(known | wanted)).encode()
        )  # before anything changes, as a run may be killed
    for each in leftovers:
        os.unlink(each)  # noqa: PTH108 - without a Path for each
    for each in reversed(folders):
        with suppress(OSError):  # it has files
            os.rmdir(each)  # noqa: PTH106
    if not known <= wanted:
        write_file(record, json.dumps(sorted(wanted)).encode())


def link_directory(path: Path, directory: Path, *, channel: str) -> None:
    """Make a link to a directory of this machine in the place of a channel's own, whose files are removed.

    Raises:
        ConfigError: Somebody else has put something there. Nothing was changed.
    """
    claim(path, (), channel=channel, is_there=lambda _: False)
    path.rmdir()
    path.symlink_to(directory, target_is_directory=True)


def _in_the_way(path: str | Path, channel: str) -> ConfigError:
    return ConfigError(
        f"channel {channel!r}: {os.fspath(path)} is in the way: no run has put it there",
        hint="move it elsewhere, or name another directory by --base",
    )


def _read(record: Path) -> set[str]:
    try:
        names = parse_json(read_file(record) or b"[]")
    except ValueError:
        return set()
    return set(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else set()


def _below(folder: str, base: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Iterate over the entries below a directory, by its name, each directory before its contents; no link is followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry, base + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{base}{entry.name}/")


_FICLONE = 0x40049409
_OTHER_WAYS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def link_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or else a file of the same contents.

    Raises:
        OSError: The system failed, for example because the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _OTHER_WAYS:
            raise
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its times; file systems that can share the blocks of two files do so."""
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            shutil.copyfileobj(reader, writer, 8 << 20)
    shutil.copystat(source, target)
