"""Lists a directory tree in key order, a page at a time, and looks at no more than the page needs."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from penstock import forks
from penstock.errors import ConfigError, DirectoryMissingError, StoreError
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.types import Key

TEMPORARY_PREFIX = ".penstock-"
TEMPORARY_SUFFIX = ".tmp"
_WALKS_MAX = 256  # listings that are remembered between two pages; an older one reads its directory again


class _TreeWalk(NamedTuple):
    """What a listing wants."""

    prefix: str
    after: str  # keys up to and including this one are left out
    delimited: bool


class Tree:
    """Pages of a directory tree.

    A directory is read whole and sorted, because the system returns no order. The state of a listing is kept between two of
    its pages, so that a flat directory of a million files is read once and not once per page.

    Args:
        root: The directory; keys are relative to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._walks: OrderedDict[str, tuple[_TreeWalk, Iterator[ObjectInfo]]] = OrderedDict()
        self._lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's listings."""
        self._walks, self._lock = OrderedDict(), threading.Lock()

    def page(self, operation: ListPage) -> Page:
        """Return one page of a listing, as ``types.ListPage`` asks for it; the delimiter is ``"/"`` or empty.

        Raises:
            ConfigError: The delimiter is another one.
            DirectoryMissingError: The root does not exist.
            StoreError: A file's name is not UTF-8, so that no key can name it.
        """
        if operation.delimiter not in ("", "/"):
            raise ConfigError(f"delimiter={operation.delimiter!r} must be '' or '/'")
        walk, entries = self._resumed(operation)
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for entry in entries:
            if entry.is_prefix:
                prefixes.append(entry.key)
            else:
                objects.append(entry)
            if len(objects) + len(prefixes) == operation.keys_max:
                return Page(objects, prefixes, self._kept(walk, entry.key, entries))
        return Page(objects, prefixes, None)

    def _resumed(self, operation: ListPage) -> tuple[_TreeWalk, Iterator[ObjectInfo]]:
        prefix, delimited = operation.prefix, bool(operation.delimiter)
        if operation.token is None:
            walk = _TreeWalk(prefix, operation.start_after, delimited)
            return walk, self._entries(walk)
        with self._lock:
            kept = self._walks.pop(operation.token, None)
        last = operation.token.partition(":")[2]
        if kept is not None and kept[0][::2] == (prefix, delimited):
            return kept
        walk = _TreeWalk(prefix, last, delimited)
        # What is below a prefix sorts after its name, so a prefix that was the last entry would be listed once more.
        return walk, (entry for entry in self._entries(walk) if entry.key != last)

    def _kept(self, walk: _TreeWalk, last: str, entries: Iterator[ObjectInfo]) -> str:
        with self._lock:
            token = f"{id(entries):x}:{last}"
            self._walks[token] = (walk, entries)
            while len(self._walks) > _WALKS_MAX:
                self._walks.popitem(last=False)
        return token

    def _entries(self, walk: _TreeWalk) -> Iterator[ObjectInfo]:
        try:
            status = self.root.stat()
        except FileNotFoundError as error:
            raise DirectoryMissingError(f"the directory {self.root} does not exist") from error
        yield from self._below(str(self.root), "", walk, ((status.st_dev, status.st_ino),))

    def _below(
        self, path: str, base: str, walk: _TreeWalk, parents: tuple[tuple[int, int], ...]
    ) -> Iterator[ObjectInfo]:
        """Iterate the entries of a directory and below it.

        Args:
            path: Path of the directory.
            base: Key of the directory with a slash; empty for the root.
            walk: Bounds and filters of the listing.
            parents: Device and inode of the directory and of all above it, to notice links that lead back.
        """
        for name, entry in self._candidates(path, base, walk):
            key = base + name
            status = _status(entry)
            if status is None:
                continue
            if not name.endswith("/"):
                if stat.S_ISREG(status.st_mode) and key > walk.after:
                    yield info_of(key, status)
                continue
            place = (status.st_dev, status.st_ino)
            if place in parents:
                continue
            if walk.delimited and len(key) > len(walk.prefix):
                if next(self._below(entry.path, key, _TreeWalk(key, walk.after, False), (*parents, place)), None):
                    yield ObjectInfo(key, 0, is_prefix=True)
            else:
                yield from self._below(entry.path, key, walk, (*parents, place))

    def _candidates(self, path: str, base: str, walk: _TreeWalk) -> list[tuple[str, os.DirEntry[str]]]:
        """Return the entries that may hold what is wanted, in key order: a directory sorts as its name with a slash."""
        found: list[tuple[str, os.DirEntry[str]]] = []
        try:
            scan = os.scandir(path)
        except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
            return found
        with scan:
            for entry in scan:
                name = entry.name
                if name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX):
                    continue
                # `is_dir` raises for a link that leads to itself.
                status = _status(entry) if entry.is_symlink() else None
                folder = stat.S_ISDIR(status.st_mode) if status is not None else entry.is_dir(follow_symlinks=False)
                key = f"{base}{name}/" if folder else base + name
                wanted = key.startswith(walk.prefix) or (key[-1] == "/" and walk.prefix.startswith(key))
                if wanted and (key > walk.after or walk.after.startswith(key)):
                    _check_name(path, name)
                    found.append((key[len(base) :], entry))
        found.sort(key=lambda pair: pair[0])
        return found


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of what `entry` names or links to; None if it was removed, or is a link that leads nowhere."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None


def _check_name(path: str, name: str) -> None:
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"the name of file {name!r} in {path!r} is not UTF-8, so no key can name it") from error


def info_of(key: Key, status: os.stat_result) -> ObjectInfo:
    """Return the record of a file; its ETag is made of size, modification time and inode."""
    etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"'
    return ObjectInfo(key, status.st_size, etag, status.st_mtime_ns / 1e9)
