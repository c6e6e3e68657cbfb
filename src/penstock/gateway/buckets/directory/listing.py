"""Listings of a bucket: the ordinary paths and the escaped keys, merged in key order.

A listing is remembered between two of its pages (``store/tree.py``). Any process can continue a listing that it does not
remember, because its token holds the last entry.
"""

from __future__ import annotations

import os
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import DirectoryMissingError
from penstock.gateway.buckets.directory.files import StoredObject, bucket_missing, natural_path, unescaped
from penstock.gateway.objects import S3Error
from penstock.store.tree import Tree, tree_entries
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.gateway.buckets.directory.files import BucketFiles
    from penstock.store.tree import Folder, TreeWalk


class BucketListing(Tree):
    """Pages of a bucket's keys.

    Args:
        files: The bucket's files.
    """

    def __init__(self, files: BucketFiles) -> None:
        super().__init__(files.folder)
        self._files = files

    def page(self, operation: ListPage) -> Page:
        """Return one page of objects and common prefixes; the delimiter is any string.

        Raises:
            S3Error: The bucket was removed, or the token is not one of a listing.

        Cost: reads every folder that the page touches. Each object costs one ``stat`` and one extended attribute.
        """
        if operation.keys_max < 1:
            return Page([], [], None)
        if operation.token is not None and operation.token.find(":") < 1:
            raise S3Error("InvalidArgument", "The continuation token provided is incorrect")
        try:
            return super().page(operation)
        except DirectoryMissingError as error:
            raise bucket_missing(self.root.name) from error

    def is_empty(self) -> bool:
        """Whether the bucket has no object."""
        return not self.page(ListPage(keys_max=1)).objects

    def entries(self, walk: TreeWalk, folders: list[Folder]) -> Iterator[ObjectInfo]:
        """Iterate over the keys that are paths and those that are not, and over common prefixes."""
        merged = merge(
            tree_entries(self.root, walk, folders), self._escaped(walk.prefix, walk.after), key=attrgetter("key")
        )
        return _grouped(_without_repeats(merged), walk.prefix, walk.delimiter)

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

    def described(self, entry: ObjectInfo) -> ObjectInfo | None:
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


def _without_repeats(entries: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    last = None
    for entry in entries:
        if entry.key != last:
            last = entry.key
            yield entry


def _grouped(entries: Iterable[ObjectInfo], prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
    """Replace the keys that have the delimiter after the prefix by common prefixes, each of them once."""
    group = None
    for entry in entries:
        if group is not None and entry.key.startswith(group):
            continue
        at = entry.key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            yield entry
            continue
        group = entry.key[: at + len(delimiter)]
        yield ObjectInfo(group, 0, is_prefix=True)
