"""Results of a run: model, output and checkpoints go to their URLs, and checkpoints come back at a restart."""

from __future__ import annotations

import os
import tarfile
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock import compose
from penstock.channels.inside import check_folders, files_below, outward_links_error
from penstock.errors import AccessDeniedError, BucketMissingError, PenstockError, StoreError
from penstock.store.base import innermost
from penstock.store.local import LocalStore
from penstock.store.writing import check_writable
from penstock.transfer import FileReceiver, FirstFailure, TransferItem, copy_between, is_downloaded, stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.store import Store
    from penstock.types import ObjectInfo

ARCHIVE_SUFFIX = ".tar.gz"
CHECK_NAME = "write-check"
"""Name of the upload by which it is found out whether files can be stored below a URL; it is dropped at once."""
SCAN_S = 5.0
"""Seconds between two looks at the directory of the checkpoints."""


def check_target(url: str, connect: Callable[[str], Store]) -> None:
    """Find out whether results can be stored at a URL, before there are any.

    Raises:
        PenstockError: They cannot, because of the bucket, the credentials or their rights, or the connection.

    Cost: two requests; nothing is stored.
    """
    is_archive = url.endswith(ARCHIVE_SUFFIX)
    root, key = compose.split(url if is_archive or url.endswith("/") else f"{url}/")
    key = key if is_archive else f"{key}{CHECK_NAME}"
    store = connect(root)
    core = innermost(store)
    try:
        if isinstance(core, LocalStore):  # directories are made when there are results
            place = next(path for path in (core.root / key).parents if path.exists())
            if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
                raise AccessDeniedError(f"{place} is no directory that this user may write to")
        else:
            check_writable(store, key)
    except PenstockError as error:
        error.what = f"results could not be stored at {url}: {error.what}"
        raise


def upload_folder(folder: Path, url: str, connect: Callable[[str], Store]) -> int:
    """Upload the files of a directory: as one archive if the URL ends with ``.tar.gz``, otherwise one by one below the URL.

    Returns:
        The number of files.

    Raises:
        StoreError: A file could not be stored, a link leads out of the directory, or something else is in its place. All
            other files are stored. An object appears completely or not at all.
    """
    infos, outward = files_below(folder)
    if url.endswith(ARCHIVE_SUFFIX):
        _upload_archive(folder, url, connect, left_out=outward)
    else:
        with LocalStore(folder) as source:
            upload_files(source, infos, url, connect)
    if outward:
        raise outward_links_error(folder, outward)
    return len(infos)


def upload_files(source: Store, infos: list[ObjectInfo], url: str, connect: Callable[[str], Store]) -> None:
    """Upload files of a directory below a URL.

    Raises:
        StoreError: A file could not be stored.
    """
    root, prefix = compose.split(url if url.endswith("/") else f"{url}/")
    failures = FirstFailure()
    items = (TransferItem(info, prefix + info.key, None) for info in infos)
    copy_between(source, connect(root), items, failures)
    failures.check()


def _upload_archive(folder: Path, url: str, connect: Callable[[str], Store], *, left_out: list[str]) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        return

    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        is_known = info.isfile() or info.isdir() or info.issym() or info.islnk()
        return info if is_known and info.name not in left_out else None

    root, key = compose.split(url)
    with connect(root).writer(key) as writer, tarfile.open(fileobj=writer, mode="w:gz") as archive:
        for name in names:
            archive.add(folder / name, arcname=name, filter=kept)


class _Version(NamedTuple):
    size_bytes: int
    etag: str | None


class CheckpointUploader:
    """Uploads the files of a directory while a program writes them. A thread looks for changes; ``close`` uploads the rest.

    A file is uploaded when two looks in a row have found it unchanged, so that half-written files are not touched. Files that
    the program removes stay in the store.

    Args:
        folder: The directory.
        url: URL of the prefix.
        connect: Opens a store.
        scan_s: Seconds between two looks.

    Raises:
        StoreError: The checkpoints of an earlier run cannot be brought back.
    """

    def __init__(self, folder: Path, url: str, connect: Callable[[str], Store], *, scan_s: float = SCAN_S) -> None:
        self._folder = folder
        self._url = url if url.endswith("/") else f"{url}/"
        self._connect = connect
        self._scan_s = scan_s
        self._source = LocalStore(folder)
        self._seen: dict[str, _Version] = {}
        self._uploaded: dict[str, _Version] = {}
        self._outward: list[str] = []
        self.failure: PenstockError | None = None
        """Why the last upload failed; it is tried again at every look, and None after one that succeeded."""
        self._bring_back()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Upload the files that have changed since, and end.

        Raises:
            StoreError: A file could not be stored, a link leads out of the directory, or something else is in its place.
        """
        self._ended.set()
        self._thread.join()
        try:
            self._upload(self._changed(settled=False))
            if self._outward:
                raise outward_links_error(self._folder, self._outward)
        finally:
            self._source.close()

    def _bring_back(self) -> None:
        """Download the checkpoints of an earlier run."""
        root, prefix = compose.split(self._url)
        store = self._connect(root)
        failures = FirstFailure()
        try:
            infos = list(store.list(prefix))
        except BucketMissingError as error:
            if "://" in self._url:
                raise
            del error  # a directory that the first upload makes
            return
        items = [
            TransferItem(info, info.key[len(prefix) :], self._source.path(info.key[len(prefix) :]))
            for info in infos
            if not info.key.endswith("/")
        ]
        check_folders(self._folder, (item.key for item in items))
        missing = [item for item in items if item.path is not None and not is_downloaded(item.path, item.info)]
        stream(store, iter(missing), FileReceiver(failures), failures)
        failures.check()
        there = {item.key for item in items}
        self._uploaded = {
            info.key: _Version(info.size_bytes, info.etag) for info in files_below(self._folder)[0] if info.key in there
        }

    def _run(self) -> None:
        while not self._ended.wait(self._scan_s):
            try:
                self._upload(self._changed(settled=True))
                self.failure = None
            except PenstockError as error:
                self.failure = error
            except OSError as error:  # a file vanished while it was read
                self.failure = StoreError(f"checkpoints: {error}")

    def _changed(self, *, settled: bool) -> list[ObjectInfo]:
        """Return the files that differ from their uploads; with `settled`, only those that do not change now."""
        infos, self._outward = files_below(self._folder)
        now = {info.key: _Version(info.size_bytes, info.etag) for info in infos}
        before, self._seen = self._seen, now
        return [
            info
            for info in infos
            if self._uploaded.get(info.key) != now[info.key] and (not settled or before.get(info.key) == now[info.key])
        ]

    def _upload(self, infos: list[ObjectInfo]) -> None:
        if not infos:
            return
        upload_files(self._source, infos, self._url, self._connect)
        self._uploaded |= {info.key: _Version(info.size_bytes, info.etag) for info in infos}
