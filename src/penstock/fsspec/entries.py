"""Listings as fsspec wants them: a dict for each entry, directories among them, which object storage does not have.

A directory is there while a key begins with its path and a slash. An empty object whose key ends with a slash, which consoles
write for a folder, is such a directory and not a file.
"""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.store.inflight import InFlight, perform
from penstock.store.listing import list_objects
from penstock.types import Head, ListPage, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.errors import StoreError
    from penstock.fsspec.stores import LocatingFileSystem
    from penstock.store.base import Store
    from penstock.types import Key

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
    """List what lies below a folder, in any order.

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
    """List level by level, many directories at a time, so that what lies deeper is not listed at all."""
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
