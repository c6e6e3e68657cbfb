"""Lists a directory tree in key order, a page at a time, and looks at no more than the page needs."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from collections import OrderedDict
from heapq import nsmallest
from itertools import chain
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from penstock.errors import ConfigError, DirectoryMissingError, StoreError
from penstock.system import forks
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.types import Key

TEMPORARY_PREFIX = ".penstock-"
TEMPORARY_SUFFIX = ".tmp"

HIDDEN = f"{TEMPORARY_PREFIX}gateway{TEMPORARY_SUFFIX}"
"""Folder, below a directory, of what is kept beside its files; such names are neither listed nor opened."""

WALKS_BYTES_MAX = 64 << 20
"""Memory of the names that are remembered between two pages, in all listings of a tree: a million names or so."""

_WALKS_MAX = 256
_IDLE_S_MAX = 120.0
"""Seconds between two pages after which a listing is forgotten; its next page reads the directory again."""

_NAME_BYTES = 49 + 8
"""Memory of a name in a list, besides its characters."""

_WHOLE_PAGE = 1000
"""A page of as many keys sorts the whole directory, because the next page is probably asked for."""

Kept = TypeVar("Kept")


class KeptWalks(Generic[Kept]):
    """Listings that stand still between two pages. The oldest are forgotten if they hold too much together, or are idle.

    Args:
        bytes_max: The most memory that they may hold together; the last one is remembered whatever it holds.
    """

    def __init__(self, *, bytes_max: int = WALKS_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._walks: OrderedDict[str, tuple[Kept, int, float]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Memory that they hold together."""
        return self._held_bytes

    def keep(self, token: str, walk: Kept, *, held_bytes: int) -> None:
        """Remember a listing that holds so much memory until `take` asks for it by its token."""
        now_s = time.monotonic()
        with self._lock:
            self._walks[token] = walk, held_bytes, now_s
            self._held_bytes += held_bytes
            while len(self._walks) > 1:
                _, _, kept_s = next(iter(self._walks.values()))
                is_full = self._held_bytes > self.bytes_max or len(self._walks) > _WALKS_MAX
                if not is_full and now_s - kept_s < _IDLE_S_MAX:
                    break
                self._held_bytes -= self._walks.popitem(last=False)[1][1]

    def take(self, token: str) -> Kept | None:
        """Return the listing of a token, and forget it; None if it is not remembered."""
        with self._lock:
            walk, held_bytes, _ = self._walks.pop(token, (None, 0, 0.0))
            self._held_bytes -= held_bytes
        return walk


class TreeWalk(NamedTuple):
    """What a listing wants."""

    prefix: str
    after: str  # keys up to and including this one are left out
    delimiter: str
    names_max: int  # names of a directory that are found at first; all of them if it goes on


class Folder(NamedTuple):
    """A directory that a listing is in."""

    names: list[str]  # those that follow, the next one last; a directory's ends with a slash
    name_bytes: float  # memory of one, on average


class Tree:
    """Pages of a directory tree; a subclass may list more than the tree's own files, and know more about each.

    A directory is read whole, because the system returns no order. If a page wants few keys of many, only so many names are
    held; the rest is read again and sorted for the next page. The state of a listing is kept between two of its pages, so that
    a flat directory of a million files is read once or twice, and not once per page.

    Args:
        root: The directory; keys are relative to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._walks: KeptWalks[tuple[TreeWalk, Iterator[ObjectInfo], list[Folder]]] = KeptWalks()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's listings."""
        self._walks = KeptWalks()

    @property
    def held_bytes(self) -> int:
        """Memory of the names that are remembered between two pages."""
        return self._walks.held_bytes

    def page(self, operation: ListPage) -> Page:
        """Return one page of a listing, as ``types.ListPage`` asks for it; only the last page has no token.

        Raises:
            ConfigError: The delimiter is one that the tree does not have.
            DirectoryMissingError: The root does not exist.
            StoreError: A file's name is not UTF-8, so that no key can name it.
        """
        walk, entries, folders = self._resumed(operation)
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for entry in entries:
            if entry.is_prefix:
                prefixes.append(entry.key)
            elif (described := self.described(entry)) is not None:
                objects.append(described)
            if len(objects) + len(prefixes) == operation.keys_max:
                if (following := next(entries, None)) is None:
                    break
                token = f"{id(entries):x}:{entry.key}"
                held_bytes = int(sum(len(folder.names) * folder.name_bytes for folder in folders))
                self._walks.keep(token, (walk, chain([following], entries), folders), held_bytes=held_bytes)
                return Page(objects, prefixes, token)
        return Page(objects, prefixes, None)

    def entries(self, walk: TreeWalk, folders: list[Folder]) -> Iterator[ObjectInfo]:
        """Iterate over all that a listing wants, in key order."""
        if walk.delimiter not in ("", "/"):
            raise ConfigError(f"delimiter={walk.delimiter!r} must be '' or '/'")
        return tree_entries(self.root, walk, folders)

    def described(self, entry: ObjectInfo) -> ObjectInfo | None:
        """Return an entry as a page shows it; None leaves it out."""
        return entry

    def _resumed(self, operation: ListPage) -> tuple[TreeWalk, Iterator[ObjectInfo], list[Folder]]:
        prefix, delimiter, folders = operation.prefix, operation.delimiter, list[Folder]()
        names_max = operation.keys_max + 1 if operation.keys_max < _WHOLE_PAGE else sys.maxsize
        if operation.token is None:
            walk = TreeWalk(prefix, operation.start_after, delimiter, names_max)
            return walk, self.entries(walk, folders), folders
        kept = self._walks.take(operation.token)
        last = operation.token.partition(":")[2]
        if kept is not None and (kept[0].prefix, kept[0].delimiter) == (prefix, delimiter):
            return kept
        walk = TreeWalk(prefix, last, delimiter, names_max)
        # What is below a prefix sorts after its name, so a prefix that was the last entry would be listed once more.
        return walk, (entry for entry in self.entries(walk, folders) if entry.key != last), folders


def tree_entries(root: Path, walk: TreeWalk, folders: list[Folder]) -> Iterator[ObjectInfo]:
    """Iterate all entries below a directory.

    This is no method, because a tree that its own listings refer to would outlive its last user.
    """
    try:
        status = root.stat()
    except FileNotFoundError as error:
        raise DirectoryMissingError(f"the directory {root} does not exist") from error
    yield from _below(str(root), "", walk, ((status.st_dev, status.st_ino),), folders)


def _below(
    path: str, base: str, walk: TreeWalk, parents: tuple[tuple[int, int], ...], folders: list[Folder]
) -> Iterator[ObjectInfo]:
    """Iterate the entries of a directory and below it.

    Args:
        path: Path of the directory.
        base: Key of the directory with a slash; empty for the root.
        walk: Bounds and filters of the listing.
        parents: Device and inode of the directory and of all above it, to notice links that lead back.
        folders: The directories that the listing is in; this one is added until it ends.
    """
    for name in _names(path, base, walk, folders):
        key, name_path = base + name, f"{path}/{name}"
        status = _status(name_path)
        if status is None:
            continue
        if not name.endswith("/"):
            if stat.S_ISREG(status.st_mode) and key > walk.after:
                yield info_of(key, status)
            continue
        place = (status.st_dev, status.st_ino)
        if place in parents:
            continue
        if walk.delimiter == "/" and len(key) > len(walk.prefix):
            inside = TreeWalk(key, walk.after, delimiter="", names_max=1)
            if next(_below(name_path[:-1], key, inside, (*parents, place), []), None):
                yield ObjectInfo(key, 0, is_prefix=True)
        else:
            yield from _below(name_path[:-1], key, walk, (*parents, place), folders)


def _names(path: str, base: str, walk: TreeWalk, folders: list[Folder]) -> Iterator[str]:
    """Iterate the names that may hold what is wanted, in key order: a directory has a slash, and sorts as its name with it."""
    last = ""
    while True:
        found = _scanned(path, base, walk, last)
        names_max = sys.maxsize if last else walk.names_max
        names = sorted(found, reverse=True) if names_max == sys.maxsize else nsmallest(names_max, found)[::-1]
        is_cut = len(names) == names_max
        if not names:
            return
        last = names[0]
        sample = names[:: len(names) // 1000 + 1]
        folders.append(Folder(names, _NAME_BYTES + sum(map(len, sample)) / len(sample)))
        try:
            while names:
                yield names.pop()
        finally:
            folders.pop()
        if not is_cut:
            return


def _scanned(path: str, base: str, walk: TreeWalk, last: str) -> Iterator[str]:
    """Iterate the names after `last` that may hold what is wanted, in no order."""
    prefix, after = walk.prefix, walk.after
    try:
        scan = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
        return
    with scan:
        for entry in scan:
            name = entry.name
            if name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX):
                continue
            # `is_dir` raises for a link that leads to itself.
            status = _status(entry.path) if entry.is_symlink() else None
            if stat.S_ISDIR(status.st_mode) if status is not None else entry.is_dir(follow_symlinks=False):
                name += "/"
            key = base + name
            wanted = key.startswith(prefix) or (key[-1] == "/" and prefix.startswith(key))
            if wanted and name > last and (key > after or after.startswith(key)):
                _check_name(path, name)
                yield name


def _status(path: str) -> os.stat_result | None:
    """Return the status of what a path names or links to; None if it was removed, or is a link that leads nowhere."""
    try:
        return os.stat(path)  # noqa: PTH116 - a `Path` for each of a million names would cost more than the call
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def _check_name(path: str, name: str) -> None:
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"the name of file {name!r} in {path!r} is not UTF-8, so no key can name it") from error


def info_of(key: Key, status: os.stat_result) -> ObjectInfo:
    """Return the record of a file; its ETag is made of size, modification time, inode, and the time of its last change.

    Only the last of them cannot be set, and so tells of a file that was overwritten and given its former modification time.
    """
    etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}-c{status.st_ctime_ns:x}"'
    return ObjectInfo(key, status.st_size, etag, status.st_mtime_ns / 1e9)
