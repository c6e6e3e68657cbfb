"""Many files at once: which path goes where, and the engine's calls that move them together.

fsspec's own algorithms decide what is copied to what: its rules for globs, trailing slashes and directories that exist are the
contract of a file system. ``Pairs`` takes the file system's place there and notes the pairs, which then move at once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fsspec.spec import AbstractFileSystem

from penstock.errors import ConfigError, ObjectMissingError, SpanError, StoreError
from penstock.fetch import PlanItem
from penstock.fsspec.entries import REQUESTS_MAX, any_below, stat_many
from penstock.memory.buffers import byte_view
from penstock.store.base import has_dot_segment
from penstock.store.file import ObjectReader
from penstock.store.inflight import perform_many
from penstock.store.local import LocalStore
from penstock.transfer import FileReceiver, TransferItem, copy_between, copy_inside, stream
from penstock.types import ByteRange, ObjectInfo, Put

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.fsspec.entries import Entry
    from penstock.fsspec.listing import ListingFileSystem
    from penstock.fsspec.paths import StorePath
    from penstock.store.base import Store
    from penstock.types import Buffer, Key

PUT_BYTES_MAX = 16 << 20
"""Largest object that one put writes; larger ones are sent in parts, one object at a time."""

Pair: TypeAlias = tuple[str, str]


class Pairs:
    """Takes the place of the file system in fsspec's ``get``, ``put`` and ``copy``, and notes the pairs of paths.

    Args:
        files: The file system.

    Attributes:
        found: Entries of the sources by path, and None for a path that was not listed.
        pairs: Pairs of source and target.
    """

    def __init__(self, files: ListingFileSystem) -> None:
        self._files = files
        self._strip_protocol = files.stripped
        self.found: dict[str, Entry | None] = {}
        self.pairs: list[Pair] = []

    def expand_path(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> list[str]:
        """Return the paths that a pattern or a directory stands for, and keep what the listing says of them."""
        self.found = self._files.expand(path, recursive=recursive, depth_max=maxdepth)
        return sorted(self.found)

    def isdir(self, path: str) -> bool:
        """Return whether a path is a directory; what was listed is not asked for again."""
        entry = self.found.get(self._strip_protocol(path))
        return entry["type"] == "directory" if entry is not None else bool(self._files.isdir(path))

    def note(self, source: Any, target: Any, **_: Any) -> None:
        """Note a pair."""
        self.pairs.append((os.fspath(source), os.fspath(target)))

    get_file = put_file = cp_file = note

    def planned(self, verb: str, source: Any, target: Any, *, recursive: bool, depth_max: int | None) -> list[Pair]:
        """Return what fsspec's algorithm `verb` would copy, file by file."""
        source, target = (os.fspath(one) if isinstance(one, os.PathLike) else one for one in (source, target))
        getattr(AbstractFileSystem, verb)(self, source, target, recursive=recursive, maxdepth=depth_max)
        return self.pairs


class CallbackListener:
    """Tells an fsspec callback what was moved; the first failure ends the transfer.

    Args:
        callback: fsspec's callback.
        count: Number of files.
        ignores_missing: Whether sources that are missing by now are left out.
    """

    def __init__(self, callback: Any, *, count: int, ignores_missing: bool = False) -> None:
        self._callback = callback
        self._ignores_missing = ignores_missing
        callback.set_size(count)

    def moved(self, item: TransferItem) -> None:
        """Count a file, and tell the callback for this file that it is complete."""
        with self._callback.branched(item.info.key, str(item.path or item.key)) as child:
            child.set_size(item.info.size_bytes)
            child.relative_update(item.info.size_bytes)
        self._callback.relative_update(1)

    def failed(self, item: TransferItem, error: Exception) -> None:
        """Raise `error`, unless a missing source is to be left out."""
        if self._ignores_missing and isinstance(error, ObjectMissingError):
            self._callback.relative_update(1)
            return
        raise error

    def progressed(self, size_bytes: int) -> None:
        """Do nothing: callbacks hear of whole files."""

    def skipped(self, count: int) -> None:
        """Count directories, of which there is nothing to move."""
        if count:
            self._callback.relative_update(count)


class SingleListener(CallbackListener):
    """Tells an fsspec callback how much of one file has arrived."""

    def moved(self, item: TransferItem) -> None:
        """Do nothing: the callback has heard of every byte."""

    def progressed(self, size_bytes: int) -> None:
        """Count bytes."""
        self._callback.relative_update(size_bytes)

    def skipped(self, count: int) -> None:
        """Do nothing: a directory has no bytes."""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_ranges(
    files: ListingFileSystem, requests: Sequence[tuple[str, int | None, int | None]]
) -> list[bytes | Exception]:
    """Read ranges of any objects.

    Args:
        files: The file system.
        requests: Path, start and end of each range; negative numbers count from the end of the object, and None is its
            beginning or end.

    Returns:
        For each range its bytes, or the ``StoreError`` that reading it failed with.
    """
    answers: list[bytes | Exception] = [b""] * len(requests)
    infos = _infos_needed(files, requests, answers)
    wanted: dict[str, list[tuple[int, PlanItem]]] = defaultdict(list)
    where: StorePath | None = None
    before = None
    for index, (path, start, end) in enumerate(requests):
        if isinstance(answers[index], Exception):
            continue
        if path is not before or where is None:
            where, before = files.locate(path), path
        item = PlanItem(where.key)
        if (info := infos.get(path)) is not None:
            item = slice_of(info, where.key, start, end)
        elif end is not None:
            item = PlanItem(where.key, ByteRange(start or 0, end))
        if item.span is None or item.span.end > item.span.start:
            wanted[where.url].append((index, item))
    for url, items in wanted.items():
        _read_into(files, url, items, answers)
    return answers


def slice_of(info: ObjectInfo, key: Key, start: int | None, end: int | None) -> PlanItem:
    """Return the range of an object that a slice means, in the version whose size it was counted by."""
    span = ByteRange(*slice(start, end).indices(info.size_bytes)[:2])
    return PlanItem(key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)


def _infos_needed(
    files: ListingFileSystem, requests: Sequence[tuple[str, int | None, int | None]], answers: list[bytes | Exception]
) -> dict[str, ObjectInfo]:
    """Ask for the sizes of the objects of which a range cannot be requested without; errors go to `answers`."""
    needed: dict[str, list[int]] = defaultdict(list)
    for index, (path, start, end) in enumerate(requests):
        if (start or 0) < 0 or (end or 0) < 0 or (start and end is None):
            needed[path].append(index)
    infos: dict[str, ObjectInfo] = {}
    for path, info in stat_many(files, needed).items():
        if isinstance(info, ObjectInfo):
            infos[path] = info
        else:
            for index in needed[path]:
                answers[index] = info
    return infos


def _read_into(
    files: ListingFileSystem, url: str, items: list[tuple[int, PlanItem]], answers: list[bytes | Exception]
) -> None:
    store: Store = files.store(url)
    left = dict.fromkeys(range(len(items)))
    try:
        for answer in store.try_read_many((item for _, item in items), ordered=False):
            number = answer.request_index
            assert number is not None
            left.pop(number)
            index, item = items[number]
            if isinstance(answer, StoreError):
                answers[index] = b"" if isinstance(answer, SpanError) and item.span is not None else answer
            else:
                answers[index] = bytes(answer.data)
    except ConfigError:  # one is too long to be held whole by the engine, or its key is not valid
        for number in left:
            index, item = items[number]
            try:
                answers[index] = read_streamed(store, item)
            except (StoreError, ConfigError) as error:
                answers[index] = error


def read_streamed(store: Store, item: PlanItem) -> bytes:
    """Return one range of an object of any size; parts are fetched in parallel, straight into the result."""
    with ObjectReader(store, item.key, etag=item.etag) as reader:
        if item.span is None:
            return reader.read()
        reader.seek(item.span.start)
        return reader.read(item.span.length_bytes)


# ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sources(
    files: ListingFileSystem, pairs: list[Pair], found: Mapping[str, Entry | None]
) -> tuple[list[Any], list[str]]:
    """Return (source, its info, target) for each file among the pairs, and the targets of the directories."""
    unknown = [source for source, _ in pairs if found.get(source) is None]
    stated = stat_many(files, unknown)
    moving, directories = [], []
    for source, target in pairs:
        where, entry, answer = files.locate(source), found.get(source), stated.get(source)
        if isinstance(answer, ObjectMissingError) and any_below(files.store(where.url), where.folder):
            directories.append(target)
        elif answer is not None:
            moving.append((where, answer, target))
        elif entry is not None and entry["type"] == "directory":
            directories.append(target)
        elif entry is not None:
            moving.append((where, _info_of(entry, where.key), target))
    return moving, directories


def _info_of(entry: Entry, key: str) -> ObjectInfo:
    moment = entry["LastModified"]
    return ObjectInfo(key, entry["size"], entry["ETag"], moment.timestamp() if moment is not None else None)


def get_files(
    files: ListingFileSystem, pairs: list[Pair], found: Mapping[str, Entry | None], listener: CallbackListener
) -> None:
    """Write objects to files of this machine; a file appears when it is complete.

    Raises:
        ConfigError: A key has a segment ``..``, which could lead out of the target, or two keys become one file.
        StoreError: An object could not be read; files that are complete remain.
    """
    moving, directories = _sources(files, pairs, found)
    for target in directories:
        Path(target).mkdir(parents=True, exist_ok=True)
    listener.skipped(len(directories))
    items: dict[str, list[TransferItem]] = defaultdict(list)
    taken: dict[Path, Key] = {}
    for where, info, target in moving:
        if isinstance(info, StoreError):
            raise info
        if has_dot_segment(where.key):
            raise ConfigError(f"the key {where.key!r} has a segment '.' or '..', which is no safe name of a file")
        path = Path(target).absolute()
        if path in taken:
            raise ConfigError(f"the keys {taken[path]!r} and {where.key!r} would both become the file {target}")
        taken[path] = where.key
        items[where.url].append(TransferItem(info, where.key, path))
    for url, wanted in items.items():
        stream(files.store(url), iter(wanted), FileReceiver(listener), listener)


def put_files(files: ListingFileSystem, pairs: list[Pair], listener: CallbackListener) -> None:
    """Write files of this machine to objects, many at a time; directories become nothing.

    Raises:
        FileNotFoundError: A file does not exist; nothing was written.
        StoreError: An object could not be written; others may be there.
    """
    items: dict[str, list[TransferItem]] = defaultdict(list)
    for source, target in pairs:
        path = Path(source).absolute()
        if path.is_dir():
            listener.skipped(1)
            continue
        where = files.locate(target)
        info = ObjectInfo(str(path).lstrip("/"), path.stat().st_size)
        items[where.url].append(TransferItem(info, where.key, None))
    with LocalStore("/") as source_store:
        for url, wanted in items.items():
            copy_between(source_store, files.store(url), iter(wanted), listener)


def copy_files(
    files: ListingFileSystem, pairs: list[Pair], found: Mapping[str, Entry | None], listener: CallbackListener
) -> None:
    """Copy objects: inside a store by the store itself, and from one store to another through this process.

    Raises:
        ConfigError: An object that is copied would be replaced by another one.
        StoreError: An object could not be copied; others may be there.
    """
    moving, directories = _sources(files, pairs, found)
    listener.skipped(len(directories))
    items: dict[tuple[str, str], list[TransferItem]] = defaultdict(list)
    copied = {(where.url, where.key) for where, _, _ in moving}
    for where, info, target in moving:
        there = files.locate(target)
        if (there.url, there.key) in copied and there != where:
            raise ConfigError(
                f"{target} would be replaced, and is itself copied", hint="choose a target outside of the source"
            )
        if isinstance(info, StoreError):
            listener.failed(TransferItem(ObjectInfo(where.key, 0), there.key, None), info)
            continue
        items[where.url, there.url].append(TransferItem(info, there.key, None))
    for (source, target), wanted in items.items():
        if source == target:
            copy_inside(files.store(source), iter(wanted), listener)
        else:
            copy_between(files.store(source), files.store(target), iter(wanted), listener)


def pipe_files(files: ListingFileSystem, contents: Mapping[str, Buffer]) -> None:
    """Write objects from memory, 64 small ones at a time.

    Raises:
        StoreError: An object could not be written; others may be there.
    """
    small: dict[str, list[tuple[str, Buffer]]] = defaultdict(list)
    large: list[tuple[str, str, Buffer]] = []
    for path, data in contents.items():
        where, view = files.locate(path), byte_view(data)
        if len(view) <= PUT_BYTES_MAX:
            small[where.url].append((where.key, view))
        else:
            large.append((where.url, where.key, view))
    for url, items in small.items():
        for _ in perform_many(
            files.store(url), ((key, Put(key, data)) for key, data in items), requests_max=REQUESTS_MAX
        ):
            pass
    for url, key, data in large:
        files.store(url).write(key, data)


def delete_paths(files: ListingFileSystem, keys: Iterator[tuple[str, str]]) -> None:
    """Remove objects, by requests for 1 000 keys each.

    Args:
        files: The file system.
        keys: Pairs of a store's URL and a key.
    """
    wanted: dict[str, list[str]] = defaultdict(list)
    for url, key in keys:
        wanted[url].append(key)
    for url, found in wanted.items():
        files.store(url).delete(found)
