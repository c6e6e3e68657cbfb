"""``ListingFileSystem``: listings of objects and directories, and their metadata.

Listings have fsspec's form: a dict for each entry, including directories, which object storage does not have. A directory
exists while a key begins with its path and a slash. An empty object whose key ends with a slash, which consoles
write for a folder, is such a directory and not a file.

Listings are cached only with ``use_listings_cache=True``, so one process sees the writes of another immediately.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from datetime import UTC, datetime
from glob import has_magic
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.compose import list_buckets
from penstock.config import check_names
from penstock.errors import ConfigError, ObjectMissingError
from penstock.fsspec.options import LISTING_NAMES
from penstock.fsspec.stores import SCHEMES, LocatingFileSystem
from penstock.store.inflight import InFlight, perform
from penstock.store.listing import list_objects
from penstock.store.s3 import presigned_get
from penstock.system.tracebacks import boundary
from penstock.types import Head, ListPage, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.errors import StoreError
    from penstock.fsspec.stores import StorePath
    from penstock.store.base import Store
    from penstock.types import Key


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
        """List a directory; an object's path lists only the object.

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
            **options: ``prefix``: prefix of the names in the directory.

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
            recursive: Whether to add the entries below directories.
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


Entry: TypeAlias = dict[str, Any]

MARKER = "marker"
"""In the entry of a directory, the key of the empty object that marks it, if the listing has shown one."""

REQUESTS_MAX = 64
"""Directories that are listed, or objects that are asked about or written, at the same time."""


def file_entry(base: str, info: ObjectInfo) -> Entry:
    """Return what fsspec's ``info`` and ``ls`` say about an object.

    Args:
        base: Beginning of all paths of the store.
        info: The object.
    """
    seconds = info.last_modified_s
    return {
        "name": base + info.key,
        "size": info.size_bytes,
        "type": "file",
        "ETag": info.etag,
        "LastModified": None if seconds is None else datetime.fromtimestamp(seconds, UTC),
        "Key": base + info.key,
        "Size": info.size_bytes,
    }


def detailed_entry(base: str, info: ObjectInfo) -> Entry:
    """Return what fsspec's ``info`` says about an object of which the answer's headers are known, as s3fs does."""

    def text(name: bytes, default: str | None = None) -> str | None:
        value = info.headers.get(name)
        return default if value is None else value.decode("latin-1")

    entry = file_entry(base, info)
    if info.headers:
        entry["ContentType"] = text(b"content-type")
        entry["VersionId"] = text(b"x-amz-version-id")
        entry["StorageClass"] = text(b"x-amz-storage-class", "STANDARD")
    return entry


def directory_entry(path: str) -> Entry:
    """Return what fsspec's ``info`` and ``ls`` say about a directory."""
    return {"name": path, "size": 0, "type": "directory", "Key": path, "Size": 0, "StorageClass": "DIRECTORY"}


def is_marker(info: ObjectInfo) -> bool:
    """Whether a listed key stands for a directory: a prefix, or the empty object of a folder."""
    return info.is_prefix or (info.size_bytes == 0 and info.key.endswith("/"))


def listed_entries(base: str, infos: Iterable[ObjectInfo], *, withdirs: bool) -> list[Entry]:
    """Return the entries of listed keys.

    Args:
        base: Beginning of all paths of the store.
        infos: Objects and prefixes as the store lists them, in any number.
        withdirs: Whether to return directories, too, even the listed one if it has a marker.
    """
    entries = []
    for info in infos:
        if not is_marker(info):
            entries.append(file_entry(base, info))
        elif withdirs:
            entry = directory_entry(base + info.key[:-1])
            entries.append(entry if info.is_prefix else entry | {MARKER: info.key})
    return entries


def add_entry(found: dict[str, Entry], entry: Entry) -> None:
    """Add an entry by its name; an object that has the name of a directory stays an object, with the directory's marker."""
    before = found.get(entry["name"])
    if before is not None and before["type"] != entry["type"]:
        entry, directory = (before, entry) if before["type"] == "file" else (entry, before)
        entry = entry | {MARKER: directory[MARKER]} if MARKER in directory else entry
    found[entry["name"]] = entry


def any_below(store: Store, prefix: str) -> bool:
    """Return whether a key begins with `prefix`. Cost: one request."""
    page = perform(store, ListPage(prefix, keys_max=1)).value
    return bool(page.objects or page.prefixes)


def list_tree(store: Store, folder: str, *, stem: str, depth_max: int | None) -> Iterable[ObjectInfo]:
    """List the entries below a folder, in any order.

    Args:
        store: The store.
        folder: Prefix of the folder: empty, or with a slash at its end.
        stem: Beginning of the names in the folder.
        depth_max: The most levels to descend, from 1; None descends into all.

    Cost: one request per 1 000 keys; with a `depth_max`, one for each directory, 64 of them at a time.
    """
    if depth_max is None:
        return list_objects(store, folder + stem)
    if depth_max == 1:
        return list_objects(store, folder + stem, recursive=False)
    return _list_levels(store, folder + stem, depth_max)


def _list_levels(store: Store, prefix: str, depth_max: int) -> Iterator[ObjectInfo]:
    """List level by level, many directories at a time, so that deeper levels are not listed at all."""
    in_flight: InFlight[tuple[ListPage, int]] = InFlight(store)
    waiting = deque([(ListPage(prefix, "/"), depth_max)])
    try:
        while waiting or in_flight:
            while waiting and len(in_flight) < REQUESTS_MAX:
                operation, depth = waiting.popleft()
                in_flight.submit(operation, (operation, depth))
            (operation, depth), completion = in_flight.wait()
            if completion.error is not None:
                raise completion.error
            page = completion.value
            if page.next_token is not None:
                waiting.append((operation._replace(token=page.next_token), depth))
            yield from page.objects
            for key in page.prefixes:
                yield ObjectInfo(key, 0, is_prefix=True)
                if depth > 1:
                    waiting.append((ListPage(key, "/"), depth - 1))
    finally:
        in_flight.cancel()


def add_parents(found: dict[str, Entry], paths: Iterable[str], *, top: str) -> None:
    """Add an entry for each directory between `top` and the given paths.

    Args:
        found: The entries by path.
        paths: Paths below `top`. Each run of paths in one directory is looked at once.
        top: The directory at which to stop; it gets no entry.
    """
    seen = ""
    for path in paths:
        parent = path.rpartition("/")[0]
        if parent == seen:
            continue
        seen = parent
        while len(parent) > len(top) and parent not in found:
            found[parent] = directory_entry(parent)
            parent = parent.rpartition("/")[0]


def keys_to_remove(store: Store, folder: str) -> Iterator[Key]:
    """Iterate all keys below a folder, those of its markers included."""
    return (info.key for info in list_objects(store, folder))


def stat_many(files: LocatingFileSystem, paths: Iterable[str]) -> dict[str, ObjectInfo | StoreError]:
    """Return the ``ObjectInfo`` of each path, or the error that asking for it failed with; 64 are asked for at a time."""
    wanted: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in paths:
        where = files.locate(path)
        wanted[where.url].append((path, where.key))
    found: dict[str, ObjectInfo | StoreError] = {}
    for url, items in wanted.items():
        found |= _stat_in(files.store(url), items)
    return found


def _stat_in(store: Store, items: list[tuple[str, str]]) -> dict[str, ObjectInfo | StoreError]:
    found: dict[str, ObjectInfo | StoreError] = {}
    in_flight: InFlight[str] = InFlight(store)
    waiting = iter(items)
    try:
        while True:
            while len(in_flight) < REQUESTS_MAX and (item := next(waiting, None)) is not None:
                in_flight.submit(Head(item[1]), item[0])
            if not in_flight:
                return found
            path, completion = in_flight.wait()
            answer = completion.error or completion.info
            assert answer is not None
            found[path] = answer
    finally:
        in_flight.cancel()
