"""``MovingFileSystem``: downloads, uploads, copies and removals, many at a time.

fsspec's own algorithms decide what is copied to what: its rules for globs, trailing slashes and directories that exist are the
contract of a file system. ``Pairs`` replaces the file system there and collects the pairs, which are then moved together.
"""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractFileSystem

from penstock.config import check_names
from penstock.errors import ConfigError, ObjectExistsError, ObjectMissingError, StoreError
from penstock.fsspec.contents import ContentsFileSystem
from penstock.fsspec.listing import MARKER, any_below, keys_to_remove, stat_many
from penstock.fsspec.options import OPEN_NAMES, is_create, type_to_write
from penstock.store.base import has_dot_segment
from penstock.store.local import LocalStore
from penstock.system.tracebacks import boundary
from penstock.transfer import FileReceiver, RaisingListener, TransferItem, copy_between, copy_inside, stream
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.fsspec.listing import Entry, ListingFileSystem
    from penstock.types import Key


@boundary
class MovingFileSystem(ContentsFileSystem):
    """A file system that downloads, uploads, copies and removes many objects at a time."""

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **options: Any,
    ) -> None:
        """Write objects to files of this machine, many at a time; each file appears when it is complete.

        The rules that say which file an object becomes are fsspec's.
        """
        check_names("get", options, [*OPEN_NAMES, "batch_size"])
        pairs = Pairs(self)
        planned = pairs.planned("get", rpath, lpath, recursive=recursive, depth_max=maxdepth)
        get_files(self, planned, pairs.found, CallbackListener(callback, count=len(planned)))

    def get_file(
        self, rpath: Any, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **options: Any
    ) -> None:
        """Write an object to a file of this machine, or to a file object.

        Args:
            rpath: Path of the object; a directory becomes a directory.
            lpath: Path of the file, or a file object.
            callback: Hears of every part that has arrived.
            outfile: A file object to write to.
            **options: Options of ``open``, which change no result.
        """
        check_names("get_file", options, OPEN_NAMES)
        output = lpath if hasattr(lpath, "write") else outfile
        if output is None:
            pairs: list[Pair] = [(self.stripped(rpath), os.fspath(lpath))]
            entry = self.info(rpath)
            if entry["type"] == "directory":
                os.makedirs(lpath, exist_ok=True)  # noqa: PTH103 - fsspec passes strings
            else:
                get_files(self, pairs, {}, SingleListener(callback, count=entry["size"]))
            return
        store, where = self._place(rpath)
        info = store.stat(where.key)
        callback.set_size(info.size_bytes)
        for chunk in store.read_parts([(where.key, None)] if info.size_bytes else []):
            output.write(chunk.data)
            callback.relative_update(len(chunk.data))

    def put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        mode: str = "overwrite",
        **options: Any,
    ) -> None:
        """Write files of this machine to objects, many at a time. The rules for the paths are fsspec's."""
        content_type = type_to_write("put", options, "batch_size")
        planned = Pairs(self).planned("put", lpath, rpath, recursive=recursive, depth_max=maxdepth)
        self._put_pairs(planned, CallbackListener(callback, count=len(planned)), mode, content_type)

    def put_file(
        self, lpath: Any, rpath: Any, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **options: Any
    ) -> None:
        """Write one file of this machine to an object."""
        content_type = type_to_write("put_file", options)
        source = os.fspath(lpath)
        size = os.path.getsize(source)  # noqa: PTH202 - fsspec passes strings
        pairs = [(source, self.stripped(rpath))]
        self._put_pairs(pairs, SingleListener(callback, count=size), mode, content_type)

    def _put_pairs(self, pairs: list[Pair], listener: CallbackListener, mode: str, content_type: str) -> None:
        if self._intrans or is_create(mode) or content_type:
            for source, target in pairs:
                if os.path.isdir(source):  # noqa: PTH112 - fsspec passes strings
                    listener.skipped(1)
                else:
                    self._write_file(source, target, "xb" if is_create(mode) else "wb", content_type, listener)
        else:
            put_files(self, pairs, listener)
        for _, target in pairs if self._keeps_listings else ():
            self.invalidate_cache(target)

    def _write_file(self, source: str, target: str, mode: str, content_type: str, listener: CallbackListener) -> None:
        with open(source, "rb") as file, self.open(target, mode, ContentType=content_type) as output:  # noqa: PTH123 - fsspec passes strings
            while piece := file.read(self.blocksize):
                output.write(piece)
                listener.progressed(len(piece))
            size_bytes = file.tell()
        listener.moved(TransferItem(ObjectInfo(source, size_bytes), target, None))

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **options: Any,
    ) -> None:
        """Copy objects, inside a bucket by the store itself. The rules for the paths are fsspec's.

        Args:
            path1: The source: a path, a pattern, or a list.
            path2: The target path.
            recursive: Whether to copy the contents of directories.
            maxdepth: The most levels to descend, at least 1; None descends into all.
            on_error: ``"raise"``, or ``"ignore"``, which leaves out objects that are missing by now; the default is
                ``"ignore"`` for a recursive copy.
            **options: Options of ``open``, which change no result.
        """
        check_names("copy", options, [*OPEN_NAMES, "batch_size"])
        pairs = Pairs(self)
        planned = pairs.planned("copy", path1, path2, recursive=recursive, depth_max=maxdepth)
        ignores = (on_error or ("ignore" if recursive else "raise")) == "ignore"
        listener = CallbackListener(DEFAULT_CALLBACK, count=len(planned), ignores_missing=ignores)
        copy_files(self, planned, pairs.found, listener)
        for _, target in planned if self._keeps_listings else ():
            self.invalidate_cache(target)

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        """Copy one object; a directory becomes nothing.

        Raises:
            ObjectMissingError: There is no such object.
        """
        check_names("cp_file", options, OPEN_NAMES)
        listener = CallbackListener(DEFAULT_CALLBACK, count=1)
        copy_files(self, [(self.stripped(path1), self.stripped(path2))], {}, listener)
        self.invalidate_cache(path2)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Remove objects, by requests for 1 000 of them; with `recursive`, also the object that has the name of a directory.

        Raises:
            ObjectMissingError: An object does not exist, or is a directory and `recursive` is false; nothing was removed.

        Cost: one request per 1 000 objects, and one for each path that is no pattern, to see whether it is an object.
        """
        check_names("rm", options, ["batch_size"])
        found = self.expand(path, recursive=recursive, depth_max=maxdepth)
        self._stats([name for name, entry in found.items() if entry is None])
        named = map(self.stripped, [path] if isinstance(path, str | os.PathLike) else path)
        directories = [name for name in named if (found.get(name) or {}).get("type") == "directory"]
        namesakes = dict.fromkeys(name for name in directories if self.isfile(name))
        delete_paths(self, chain(self._keys_of(found), self._keys_of(namesakes)))
        for name in found if self._keeps_listings else ():
            self.invalidate_cache(name)

    def _keys_of(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys that are to be removed, those of the markers of directories among them."""
        for name, entry in found.items():
            where = self.locate(name)
            if entry is None or entry["type"] == "file":
                yield where.url, where.key
            if entry is not None and MARKER in entry:
                yield where.url, entry[MARKER]

    def rm_file(self, path: Any) -> None:
        """Remove one object.

        Raises:
            ObjectMissingError: It does not exist.
        """
        store, where = self._place(path)
        store.stat(where.key)
        store.delete(where.key)
        self.invalidate_cache(path)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Copy objects and then remove the originals, once all of them were copied.

        Objects that appear meanwhile below a directory that is moved stay where they are.

        Raises:
            ConfigError: An object that is moved would be replaced by another one; nothing was moved.
            StoreError: An object could not be copied or removed; no original was removed before all were copied.
        """
        check_names("mv", options, ["batch_size"])
        if self._same(path1, path2):
            return
        pairs = Pairs(self)
        planned = [
            (source, target)
            for source, target in pairs.planned("copy", path1, path2, recursive=recursive, depth_max=maxdepth)
            if not self._same(source, target)
        ]
        found = {source: pairs.found.get(source) for source, _ in planned}
        copy_files(self, planned, found, CallbackListener(DEFAULT_CALLBACK, count=len(planned)))
        delete_paths(self, self._keys_of(found))
        for pair in planned if self._keeps_listings else ():
            for path in pair:
                self.invalidate_cache(path)

    def mv_file(self, path1: Any, path2: Any, **_: Any) -> None:
        """Copy one object and remove the original."""
        if not self._same(path1, path2):
            self.cp_file(path1, path2)
            self.rm_file(path1)

    def _same(self, path1: Any, path2: Any) -> bool:
        both = isinstance(path1, str | os.PathLike) and isinstance(path2, str | os.PathLike)
        return self.stripped(path1) == self.stripped(path2) if both else bool(path1 == path2)

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a directory is there when there is an object in it.

        Raises:
            BucketMissingError: The path is a bucket that does not exist; penstock makes no buckets.
        """
        path = self.stripped(path)
        if path and not self._is_root(path) and not self.locate(path).key:
            self.info(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Do nothing, as ``mkdir`` does.

        Raises:
            FileExistsError: There is an object of this name, and `exist_ok` is false.
        """
        self.mkdir(path)
        if not exist_ok and not self._is_root(self.stripped(path)) and self.locate(path).key and self.isfile(path):
            raise ObjectExistsError(f"{self.stripped(path)} is an object")

    def rmdir(self, path: Any) -> None:
        """Remove the marker of an empty directory.

        Raises:
            ObjectMissingError: There is no such directory.
            ObjectExistsError: There are objects in it.
        """
        store, where = self._place(path)
        keys = [key for key, _ in zip(keys_to_remove(store, where.folder), range(2), strict=False)]
        if not keys:
            raise ObjectMissingError("there is no such directory", url=store.describe(where.folder))
        if keys != [where.folder]:
            raise ObjectExistsError(f"{self.stripped(path)} is not empty", hint="rm(path, recursive=True)")
        store.delete(where.folder)
        self.invalidate_cache(path)


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
        """Return the paths that a pattern or a directory stands for, and keep their entries of the listing."""
        self.found = self._files.expand(path, recursive=recursive, depth_max=maxdepth)
        return sorted(self.found)

    def isdir(self, path: str) -> bool:
        """Return whether a path is a directory; listed objects are not looked up again."""
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


class CallbackListener(RaisingListener):
    """Reports moved files to an fsspec callback; the first failure ends the transfer.

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
