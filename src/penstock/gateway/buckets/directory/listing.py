"""Listings of a bucket: the ordinary paths and the escaped keys, merged in key order.

A folder is read whole and sorted, because the system returns no order. A listing is remembered between two of its pages, so
that a flat folder of a million files is read once and not once per page. Any process can continue a listing that it does not
remember, because its token holds the last entry.
"""

from __future__ import annotations

import os
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.gateway.buckets.directory.files import StoredObject
from penstock.gateway.buckets.directory.layout import natural_path, unescaped
from penstock.gateway.objects import S3Error
from penstock.store.tree import KeptWalks, Tree
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.gateway.buckets.directory.files import BucketFiles

_PAGE = 1000
_PAGE_BYTES = _PAGE * 400
"""Memory of the entries of a page that the listing has not given out yet, at most."""


class _Walk(NamedTuple):
    """A listing that stands still between two pages."""

    kind: tuple[str, str]
    entries: Iterator[ObjectInfo]
    tree: Tree


class BucketListing:
    """Pages of a bucket's keys.

    Args:
        files: The bucket's files.
    """

    def __init__(self, files: BucketFiles) -> None:
        self._files = files
        self._walks: KeptWalks[_Walk] = KeptWalks()

    def page(self, operation: ListPage) -> Page:
        """Return one page of objects and common prefixes; the delimiter is any string.

        Cost: reads every folder that the page touches. Each object costs one ``stat`` and one extended attribute.
        """
        if operation.keys_max < 1:
            return Page([], [], None)
        walk = self._resumed(operation)
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for entry in walk.entries:
            last = entry.key
            if entry.is_prefix:
                prefixes.append(last)
            elif (described := self._described(entry)) is not None:
                objects.append(described)
            if len(objects) + len(prefixes) == operation.keys_max:
                return Page(objects, prefixes, self._kept(walk, last))
        return Page(objects, prefixes, None)

    def is_empty(self) -> bool:
        """Whether the bucket has no object."""
        page = self.page(ListPage(keys_max=1))
        return not page.objects

    # ── between two pages ──────────────────────────────────────────────────────────────────────────────────────────

    def _resumed(self, operation: ListPage) -> _Walk:
        kind = (operation.prefix, operation.delimiter)
        tree = Tree(self._files.folder)  # of this listing alone, so that what it remembers ends with the listing
        if operation.token is None:
            return _Walk(kind, self._entries(operation, tree, after=operation.start_after), tree)
        number, mark, last = operation.token.partition(":")
        if not mark or not number:
            raise S3Error("InvalidArgument", "The continuation token provided is incorrect", status=400)
        kept = self._walks.take(operation.token)
        if kept is not None and kept.kind == kind:
            return kept
        entries = self._entries(operation, tree, after=last)
        return _Walk(kind, (entry for entry in entries if entry.key != last), tree)

    def _kept(self, walk: _Walk, last: str) -> str | None:
        following = next(walk.entries, None)
        if following is None:
            return None
        token = f"{os.urandom(6).hex()}:{last}"
        kept = walk._replace(entries=_again(following, walk.entries))
        self._walks.keep(token, kept, held_bytes=walk.tree.held_bytes + _PAGE_BYTES)
        return token

    # ── entries in key order ───────────────────────────────────────────────────────────────────────────────────────

    def _entries(self, operation: ListPage, tree: Tree, *, after: str) -> Iterator[ObjectInfo]:
        natural = self._natural(operation, tree, after)
        escaped = self._escaped(operation.prefix, after)
        merged = merge(natural, escaped, key=attrgetter("key")) if escaped else natural
        if not operation.delimiter:
            return _without_repeats(merged)
        return _grouped(merged, operation)

    def _natural(self, operation: ListPage, tree: Tree, after: str) -> Iterator[ObjectInfo]:
        """Iterate over the keys that are paths; with the delimiter ``/``, the tree finds the common prefixes itself."""
        delimiter = "/" if operation.delimiter == "/" else ""
        token, keys_max = None, min(_PAGE, operation.keys_max + 1)  # one more shows that there is a next page
        while True:
            page = tree.page(ListPage(operation.prefix, delimiter, token, after, keys_max))
            prefixes = [ObjectInfo(prefix, 0, is_prefix=True) for prefix in page.prefixes]
            yield from merge(page.objects, prefixes, key=attrgetter("key"))
            token, keys_max = page.next_token, _PAGE
            if token is None:
                return

    def _escaped(self, prefix: str, after: str) -> list[ObjectInfo]:
        """Return the keys that are not paths, or that other paths keep from being one at present."""
        found = []
        for path in _files_below(self._files.escaped):
            key = unescaped(str(path.relative_to(self._files.escaped)))
            if key is None or not key.startswith(prefix) or key <= after:
                continue
            if natural_path(key) is not None and (self._files.folder / key).is_file():
                continue  # the natural path counts
            found.append(ObjectInfo(key, -1))
        found.sort(key=attrgetter("key"))
        return found

    def _described(self, entry: ObjectInfo) -> ObjectInfo | None:
        """Return an entry with the size, ETag and time of one version; None if the object was removed meanwhile."""
        if entry.size_bytes < 0:
            stored = self._files.find(entry.key)
            return None if stored is None else _info(stored)
        path = self._files.folder / entry.key
        try:
            status = path.stat()
            record = self._files.records.load(str(path), status)
        except OSError:
            return None
        return _info(StoredObject(entry.key, path, status, record))


def _info(stored: StoredObject) -> ObjectInfo:
    record = stored.record
    checksums = record.checksums if record is not None and record.checksum_type == "FULL_OBJECT" else {}
    return ObjectInfo(stored.key, stored.size_bytes, stored.etag, stored.modified_s, False, checksums)


def _files_below(folder: Path) -> Iterator[Path]:
    """Iterate over the files below a folder, in no order."""
    waiting = [str(folder)]
    while waiting:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _again(first: ObjectInfo, rest: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
    yield first
    yield from rest


def _without_repeats(entries: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    last = None
    for entry in entries:
        if entry.key != last:
            last = entry.key
            yield entry


def _grouped(entries: Iterable[ObjectInfo], operation: ListPage) -> Iterator[ObjectInfo]:
    """Replace the keys that have the delimiter after the prefix by common prefixes, each of them once."""
    prefix, delimiter = operation.prefix, operation.delimiter
    group = None
    for entry in _without_repeats(entries):
        if group is not None and entry.key.startswith(group):
            continue
        at = entry.key.find(delimiter, len(prefix))
        if at < 0:
            yield entry
            continue
        group = entry.key[: at + len(delimiter)]
        yield ObjectInfo(group, 0, is_prefix=True)
