"""``ListingFileSystem``: which objects and directories there are, and what is known of them.

Listings are cached only with ``use_listings_cache=True``, so what one process writes, another one sees at once.
"""

from __future__ import annotations

import os
from glob import has_magic
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock.compose import list_buckets
from penstock.config import check_names
from penstock.errors import ConfigError, ObjectMissingError
from penstock.fsspec.entries import (
    add_entry,
    add_parents,
    any_below,
    detailed_entry,
    directory_entry,
    file_entry,
    is_marker,
    list_tree,
    listed_entries,
    stat_many,
)
from penstock.fsspec.options import LISTING_NAMES
from penstock.fsspec.paths import SCHEMES
from penstock.fsspec.stores import LocatingFileSystem
from penstock.store.s3 import presigned_get
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from penstock.fsspec.entries import Entry
    from penstock.fsspec.paths import StorePath
    from penstock.types import ObjectInfo


@boundary
class ListingFileSystem(LocatingFileSystem):
    """A file system whose contents can be listed."""

    def info(self, path: Any, **options: Any) -> Entry:
        """Return name, size, type, ETag and modification time of an object, or that a path is a directory.

        Raises:
            ObjectMissingError: There is neither an object nor a key below the path.

        Cost: one request, and another one if there is no object of this name.
        """
        check_names("info", options, LISTING_NAMES)
        path = self.stripped(path)
        if self._is_root(path):
            return directory_entry(path)
        where = self.locate(path)
        if self._keeps_listings and not options.get("refresh"):
            kept = self._ls_from_cache(path)
            entry = next((entry for entry in kept or () if entry["name"] == path), None)
            if entry is not None:
                return dict(entry)
        store = self.store(where.url)
        if not where.key:
            any_below(store, "")  # raises an error if there is no such bucket
            return directory_entry(path)
        try:
            return detailed_entry(where.base, store.stat(where.key))
        except ObjectMissingError:
            if not any_below(store, where.folder):
                raise
            return directory_entry(path)

    def exists(self, path: Any, **options: Any) -> bool:
        """Return whether there is an object or a directory of this name.

        Raises:
            StoreError: The store failed, for example because the keys are wrong; fsspec's default would return False.
        """
        try:
            self.info(path, **options)
        except (ObjectMissingError, FileNotFoundError):
            return False
        return True

    def isdir(self, path: Any) -> bool:
        """Return whether a key begins with the path and a slash. Cost: one request."""
        path = self.stripped(path)
        if self._is_root(path):
            return True
        where = self.locate(path)
        try:
            return any_below(self.store(where.url), where.folder) or not where.key
        except ObjectMissingError:
            return False

    def isfile(self, path: Any) -> bool:
        """Return whether there is an object of this name. Cost: one request."""
        path = self.stripped(path)
        if self._is_root(path) or not self.locate(path).key:
            return False
        store, where = self._place(path)
        try:
            store.stat(where.key)
        except ObjectMissingError:
            return False
        return True

    def ls(self, path: Any, detail: bool = True, refresh: bool = False, **options: Any) -> list[Any]:
        """List a directory; an object's path lists the object alone.

        Raises:
            ObjectMissingError: There is neither an object nor a key below the path.

        Cost: one request per 1 000 entries.
        """
        check_names("ls", options, LISTING_NAMES)
        path = self.stripped(path)
        found = self.dircache.get(path) if self._keeps_listings and not refresh else None
        if found is None:
            found = self._listed(path)
            if self._keeps_listings:
                self.dircache[path] = found
        return [dict(entry) for entry in found] if detail else [entry["name"] for entry in found]

    def _listed(self, path: str) -> list[Entry]:
        if self._is_root(path):
            return self._list_root(path)
        where = self.locate(path)
        store = self.store(where.url)
        infos = list(store.list(where.folder, recursive=False))
        if not infos and where.key:
            return [file_entry(where.base, store.stat(where.key))]
        return [entry for entry in listed_entries(where.base, infos, withdirs=True) if entry["name"] != path]

    def _list_root(self, path: str) -> list[Entry]:
        """List the schemes, or the buckets that these keys may see."""
        if path == "" and not self.scheme:
            return [directory_entry(name) for name in SCHEMES]
        names = ("endpoint_url", "region", "profile", "credentials", "anonymous", "transport", "retry")
        options = {name: value for name, value in self._connect_options.items() if name in names}
        base = f"{path}/" if path else ""
        return [directory_entry(base + info.key.rstrip("/")) for info in list_buckets(**options)]

    def find(
        self, path: Any, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any
    ) -> Any:
        """List all objects below a path, from one listing of the store that runs in parallel.

        Args:
            path: A directory, or an object.
            maxdepth: The most levels to descend, at least 1; None descends into all.
            withdirs: Whether to return directories, too, the path itself among them.
            detail: True returns a dict of entries by path, False a list of paths.
            **options: ``prefix``: what the names in the directory must begin with.

        Cost: one request per 1 000 keys; with `maxdepth`, one for each directory that it reaches.
        """
        check_names("find", options, LISTING_NAMES)
        if maxdepth is not None and maxdepth < 1:
            raise ConfigError(f"maxdepth={maxdepth!r} must be at least 1")
        path, stem = self.stripped(path), str(options.get("prefix") or "")
        if self._is_root(path):
            return _sorted(self._find_root(path, maxdepth, withdirs=withdirs), detail=detail)
        where = self.locate(path)
        infos = list_tree(self.store(where.url), where.folder, stem=stem, depth_max=maxdepth)
        if not detail and not withdirs:
            base = where.base
            names = [base + info.key for info in infos if not (info.key.endswith("/") and is_marker(info))]
            return sorted(names) if names else _sorted(self._find_object(where, path), detail=False)
        found: dict[str, Entry] = {}
        for entry in listed_entries(where.base, infos, withdirs=withdirs):
            add_entry(found, entry)
        if withdirs and found:
            if maxdepth is None:
                add_parents(found, list(found), top=path)
            found.setdefault(path, directory_entry(path))
        return _sorted(found or self._find_object(where, path), detail=detail)

    def _find_root(self, path: str, maxdepth: int | None, *, withdirs: bool) -> dict[str, Entry]:
        if maxdepth != 1:
            raise ConfigError("find() and glob() must be given a bucket, not all of them", hint="s3://bucket/")
        return {entry["name"]: entry for entry in self._list_root(path)} if withdirs else {}

    def _find_object(self, where: StorePath, path: str) -> dict[str, Entry]:
        """Return the entry of the object that a path names, because nothing lies below it."""
        if not where.key:
            return {}
        try:
            return {path: file_entry(where.base, self.store(where.url).stat(where.key))}
        except ObjectMissingError:
            return {}

    def glob(self, path: Any, maxdepth: int | None = None, **options: Any) -> Any:
        """Return the paths that a pattern matches, by fsspec's rules; the store lists only keys that begin like the pattern."""
        text = self.stripped(path)
        start = min((at for mark in "*?[" if (at := text.find(mark)) >= 0), default=len(text))
        if has_magic(text) and "/" in text[:start] and "prefix" not in options:
            options["prefix"] = text[text.rindex("/", 0, start) + 1 : start]
        return super().glob(path, maxdepth=maxdepth, **options)

    def expand(self, path: Any, *, recursive: bool, depth_max: int | None, literal: bool = False) -> dict[str, Any]:
        """Return what paths, patterns and directories stand for.

        Args:
            path: One path, or several.
            recursive: Whether to add what lies below directories.
            depth_max: The most levels to descend, at least 1; None descends into all.
            literal: Whether ``*``, ``?`` and ``[`` are ordinary characters.

        Returns:
            For each path its entry, or None if nothing was asked about it.

        Raises:
            ObjectMissingError: There is nothing.
        """
        if depth_max is not None and depth_max < 1:
            raise ConfigError(f"maxdepth={depth_max!r} must be at least 1")
        found: dict[str, Any] = {}
        for one in map(self.stripped, [path] if isinstance(path, str | os.PathLike) else path):
            if has_magic(one) and not literal:
                matched = self.glob(one, maxdepth=depth_max, detail=True)
                if recursive and matched and depth_max != 1:
                    deeper = depth_max - 1 if depth_max is not None else None
                    below = self.expand(list(matched), recursive=True, depth_max=deeper, literal=True)
                    for entry in filter(None, below.values()):
                        add_entry(matched, entry)
                found |= matched
                continue
            if recursive:
                found |= self.find(one, maxdepth=depth_max, withdirs=True, detail=True)
            if one not in found and (not recursive or self.exists(one)):
                found[one] = None
        if not found:
            raise ObjectMissingError(f"nothing matches {path!r}")
        return found

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, assume_literal: bool = False, **_: Any
    ) -> list[str]:
        """Return the paths that patterns and directories stand for, sorted.

        Raises:
            ObjectMissingError: There is nothing.
        """
        return sorted(self.expand(path, recursive=recursive, depth_max=maxdepth, literal=assume_literal))

    def du(
        self, path: Any, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **options: Any
    ) -> Any:
        """Return the bytes of all objects below a path, or the size of each, from one listing."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **options)
        sizes = {name: entry["size"] for name, entry in found.items()}
        return sum(sizes.values()) if total else sizes

    def sizes(self, paths: Sequence[Any]) -> list[int]:
        """Return the size of each object in bytes; 64 are asked for at a time."""
        return [info.size_bytes for info in self._stats(paths)]

    def _stats(self, paths: Sequence[Any]) -> list[ObjectInfo]:
        stripped = [self.stripped(path) for path in paths]
        for path in stripped:
            self._place(path)
        answers = stat_many(self, dict.fromkeys(stripped))
        found = []
        for path in stripped:
            answer = answers[path]
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def modified(self, path: Any) -> datetime:
        """Return when an object was written, in UTC."""
        moment: datetime | None = self.info(path).get("LastModified")
        if moment is None:
            raise ConfigError(f"{self.stripped(path)} is a directory, or its store keeps no times")
        return moment

    created = modified  # an object is never changed, only replaced

    def checksum(self, path: Any) -> int:
        """Return a number that changes when the object is replaced. Cost: one request."""
        info = self._stats([path])[0]
        text = f"{info.etag} {info.size_bytes} {info.last_modified_s if info.etag is None else ''}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())

    def ukey(self, path: Any) -> str:
        """Return a text that changes when the object is replaced. Cost: one request."""
        return f"{self.checksum(path):016x}"

    def sign(self, path: Any, expiration: int = 3600, **options: Any) -> str:
        """Return a URL with which anybody can read an object in S3 for `expiration` seconds. Cost: no request.

        Raises:
            ConfigError: The store is not S3, or the time is longer than seven days.
        """
        check_names("sign", options, ["client_method"])
        if options.get("client_method", "get_object") != "get_object":
            raise ConfigError("penstock signs URLs for reading only", hint="leave client_method= out")
        store, where = self._place(path)
        return presigned_get(store, where.key, expires_s=expiration)

    def url(self, path: Any, expires: int = 3600, **options: Any) -> str:
        """Return a URL with which anybody can read an object in S3 for `expires` seconds, as ``sign`` does."""
        return self.sign(path, expiration=expires, **options)

    def invalidate_cache(self, path: Any = None) -> None:
        """Forget the listings that ``use_listings_cache`` has kept: all of them, or those that a path is in."""
        super().invalidate_cache(path)
        if not self._keeps_listings:
            return
        if path is None:
            self.dircache.clear()
            return
        path = self.stripped(path)
        while path:
            self.dircache.pop(path, None)
            path = path.rpartition("/")[0]


def _sorted(found: dict[str, Entry], *, detail: bool) -> Any:
    names = sorted(found)
    return {name: found[name] for name in names} if detail else names
