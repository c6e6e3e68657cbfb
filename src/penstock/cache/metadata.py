"""Metadata of objects: versions and sizes, missing keys, and pages of listings, each with its age.

In memory, metadata serves the process itself: a listing tells the versions of all its keys, so that reading them pinned needs
no request. On disk, with a TTL, it serves other processes and the next run. The age of an answer counts from when its request
was *sent*. A reader trusts an older answer only within the TTL, and always trusts an answer whose request was sent after the
reader's own.

Ages on disk use the wall clock; an entry from the future is not trusted.

A write through any cache of this node ends the TTL at once. Every write appends the digest of its key to
``generation-BUCKET`` after the store has answered. Each answer is kept with the size of that file before its request was
sent. Metadata of an object is trusted if the file has no digest of its key behind that place, and a page of a listing if the
size is still the same.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache.directory import NewEntry, new_entry
from penstock.cache.entry import LISTING, MISSING, STAT, digest_of, entry_name
from penstock.system import forks
from penstock.system.private import open_private
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.directory import CacheDirectory
    from penstock.cache.entry import Identities
    from penstock.types import Key

_KEYS_COUNT_MAX = 1 << 18
"""Largest number of objects remembered in memory, at about 300 bytes each; when it is reached, the oldest half is dropped."""

_NOTE_BYTES = 8
"""Bytes of a key's digest that note a write."""
_NOTES_BYTES_MAX = 1 << 16
"""After 8 192 writes by the node an answer is not trusted any more, so that its key is looked for in little."""
_FILE_BYTES_MAX = 1 << 23
"""Notes that a file holds, of a million writes, before an empty one takes its place."""

_KEPT_HEADERS = frozenset(
    {
        b"cache-control",
        b"content-disposition",
        b"content-encoding",
        b"content-language",
        b"content-type",
        b"expires",
        b"x-amz-storage-class",
        b"x-amz-tagging-count",
        b"x-amz-website-redirect-location",
    }
)
_KEPT_PREFIXES = (b"x-amz-meta-", b"x-amz-checksum-")

REMEMBERED_MISS = "no such object; the cache remembers that it was missing"


class KnownObject(NamedTuple):
    """An answer of a store about a key.

    Attributes:
        info: The object; None if it does not exist. Without an ETag its version is not known, and the store must be asked.
        sent_s: When the request was sent, on the monotonic clock, in seconds.
        generation: Value of ``Metadata.generation()`` before it was sent.
    """

    info: ObjectInfo | None
    sent_s: float
    generation: int


class Metadata:
    """The metadata of one store's objects. All threads may use it.

    Args:
        directory: The entries on disk.
        ttl_s: Seconds for which an answer is used without asking again.
        identities: The identities of the store's objects.
    """

    def __init__(self, directory: CacheDirectory, ttl_s: float, identities: Identities) -> None:
        self._directory = directory
        self._identities = identities
        self._generation_path = f"{directory.root}/generation-{identities.of_bucket()}"
        self.ttl_s = ttl_s
        self._known: dict[Key, KnownObject] = {}
        self._lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    # ── objects ────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: Key) -> KnownObject | None:
        """Return the metadata of a key in this process, whatever its age."""
        return self._known.get(key)

    def put(self, key: Key, info: ObjectInfo | None, sent_s: float, generation: int) -> None:
        """Remember an answer in memory, unless a more recent one is known.

        Args:
            key: Key of the object.
            info: The object; None if it does not exist.
            sent_s: When the request was sent, on the monotonic clock, in seconds.
            generation: Value of ``generation()`` before the request was sent.
        """
        if info is not None and not is_version(info.etag):
            info = ObjectInfo(key, 0)
        with self._lock:
            known = self._known
            before = known.get(key)
            if before is not None and before.sent_s > sent_s:
                return
            if info is not None:
                info = _with_kept_headers(info, before.info if before is not None else None)
            if len(known) >= _KEYS_COUNT_MAX:
                for old in list(known)[: _KEYS_COUNT_MAX // 2]:
                    del known[old]
            known[key] = KnownObject(info, sent_s, generation)

    def forget(self, key: Key) -> None:
        """Forget a key that is being written; its new version is not known before the write has ended."""
        with self._lock:
            self._known.pop(key, None)

    def changed(self, key: Key) -> None:
        """Note that the store has another version of a key than the one requested, but did not say which."""
        self._mark_unknown(key)
        self._directory.remove(entry_name(STAT, self._identities.of_key(key)))

    def _mark_unknown(self, key: Key) -> None:
        """Have the store asked for the version of a key."""
        self.put(key, ObjectInfo(key, 0), time.monotonic(), self.generation())

    def fresh_or_hint(self, key: Key, submitted_s: float) -> tuple[KnownObject | None, ObjectInfo | None]:
        """Return what ``fresh`` returns and, if that is None, the last version that any process of this node saw.

        Blocks of that version may be on the disk, but whether it is still current must be checked before they are used.

        Cost: without a TTL, nothing for keys that this process knows, and otherwise an attempt to open one file. With a TTL,
            one system call for keys that it knows, and otherwise attempts to open two files.
        """
        known = self._known.get(key)
        if known is not None and self._is_fresh(key, known, submitted_s):
            is_useful = known.info is None or known.info.etag is not None
            return (known, None) if is_useful else (None, known.info)
        seen = known
        kinds = (STAT, MISSING) if self.ttl_s else (STAT,) if known is None else ()  # that may say more about the key
        for kind in kinds:
            found = self._on_disk(kind, key)
            if found is not None and self.ttl_s and self._is_fresh(key, found, submitted_s):
                self.put(key, *found)
                return found, None
            if kind == STAT:
                seen = seen or found
        return None, seen.info if seen is not None else None

    def fresh_in_memory(self, key: Key) -> ObjectInfo | None:
        """Return the version of a key that may be trusted without asking the store, if this process knows it.

        Cost: one system call; after writes to the bucket, once for each key three more to read their notes.
        """
        known = self._known.get(key)
        if known is None or known.info is None or known.info.etag is None:
            return None
        return known.info if self._is_fresh(key, known, math.inf) else None

    def _on_disk(self, kind: int, key: Key) -> KnownObject | None:
        """Return the metadata of a key on disk; None if its entry is from the future, as the clock was set back."""
        identity = self._identities.of_key(key)
        found = self._directory.read_entry(entry_name(kind, identity), identity)
        if found is None or found[0].kind != kind:
            return None
        age_s = time.time() - found[0].sent_s
        row = json.loads(bytes(found[1]) or b"[0]")  # earlier versions stored no generation
        generation = row[-1] if isinstance(row[-1], int) else 0
        info = _info(row)._replace(key=key) if kind == STAT else None
        return KnownObject(info, time.monotonic() - age_s, generation) if age_s >= 0 else None

    def _is_fresh(self, key: Key, known: KnownObject, submitted_s: float) -> bool:
        if known.sent_s >= submitted_s:
            return True
        if time.monotonic() - known.sent_s >= self.ttl_s:
            return False
        generation = self.generation()
        if generation != known.generation:
            if self._was_written(key, known.generation, generation):
                return False
            with self._lock:
                if self._known.get(key) is known:  # so that these writes are not looked through again
                    self._known[key] = known._replace(generation=generation)
        return True

    def _was_written(self, key: Key, start: int, end: int) -> bool:
        """Whether a process of this node may have written a key between two values of ``generation()``."""
        if not 0 < end - start <= _NOTES_BYTES_MAX:
            return True
        try:
            with open(self._generation_path, "rb", buffering=0) as file:  # noqa: PTH123 - paths are text here
                file.seek(start)
                notes = file.read(end - start)
        except OSError:
            return True
        return len(notes) < end - start or self._note(key) in notes

    def _note(self, key: Key) -> bytes:
        return bytes.fromhex(digest_of(self._identities.of_key(key)))[:_NOTE_BYTES]

    def keep(self, key: Key, info: ObjectInfo | None, sent_s: float, generation: int, *, as_hint: bool = False) -> None:
        """Remember an answer in memory, and on disk if there is a TTL.

        Args:
            key: Key of the object.
            info: The object; None if it does not exist.
            sent_s: When the request was sent, on the monotonic clock, in seconds.
            generation: Value of ``generation()`` before the request was sent.
            as_hint: Whether to store it on disk without a TTL too, for ``hint``.

        Cost: writing a small file.
        """
        if entries := self.entries_of(key, info, sent_s, generation, as_hint=as_hint):
            self._directory.write(entries)

    def entries_of(
        self,
        key: Key,
        info: ObjectInfo | None,
        sent_s: float,
        generation: int,
        *,
        as_hint: bool = False,
        is_first: bool = False,
    ) -> list[NewEntry]:
        """Remember an answer in memory, and return what ``keep`` stores, for a caller that stores it with other entries.

        With `is_first`, the disk had no entry for the key a moment ago, so none is removed. If another process has stored one
        since, the new one takes its place, and the number of its folder is too high by a page until the next scan.
        """
        self.put(key, info, sent_s, generation)
        if (self.ttl_s == 0 and not as_hint) or (info is not None and not is_version(info.etag)):
            return []
        identity = self._identities.of_key(key)
        row = [] if info is None else _row(info._replace(key=self._identities.stored_key(key)))
        data = json.dumps([*row, generation]).encode()
        kind = MISSING if info is None else STAT
        if not is_first:
            self._directory.remove(entry_name(kind, identity))  # so that it counts no more
        return [_new_entry(kind, identity, data, sent_s)]

    def written(self, key: Key) -> None:
        """Invalidate the metadata of a key that was written or deleted through this cache, for the whole node.

        Without a TTL too: other processes of the node may have one.
        """
        self._append(self._note(key))
        self._mark_unknown(key)
        identity = self._identities.of_key(key)
        for kind in (STAT, MISSING):
            self._directory.remove(entry_name(kind, identity))

    def generation(self) -> int:
        """Return the bytes that note writes to the bucket through caches of this node; read it before sending a request.

        It is 0 without a TTL, as nothing is trusted then. Cost: one system call.
        """
        if self.ttl_s == 0:
            return 0
        try:
            return os.stat(self._generation_path).st_size  # noqa: PTH116
        except OSError:
            self._append(b"")  # looking at a file that exists costs a third
            return 0

    def _append(self, note: bytes) -> None:
        with suppress(OSError):
            is_in_place = False
            while not is_in_place:
                fd = open_private(self._generation_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                try:
                    os.write(fd, note)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
                is_in_place = status.st_nlink > 0  # another file may have taken its place meanwhile
            if status.st_size % _FILE_BYTES_MAX < len(note):  # this is the note that reaches the bound
                self._begin_anew(status.st_size + 2 * _NOTES_BYTES_MAX)

    def _begin_anew(self, size_bytes: int) -> None:
        """Replace the file by a longer one with a hole in place of notes, so that no earlier answer is trusted any more."""
        path = f"{self._generation_path}.{os.getpid()}-{threading.get_ident()}"
        fd = open_private(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(fd, size_bytes)
        finally:
            os.close(fd)
        os.replace(path, self._generation_path)  # noqa: PTH105 - paths are text here

    # ── listings ───────────────────────────────────────────────────────────────────────────────────────────────────

    def page(self, operation: ListPage) -> Page | None:
        """Return a page of a listing from the disk if it may be trusted, and remember its objects."""
        if self.ttl_s == 0:
            return None
        identity = self._identities.of_page(operation)
        found = self._directory.read_entry(entry_name(LISTING, identity), identity)
        if found is None:
            return None
        age_s = time.time() - found[0].sent_s
        if not 0 <= age_s < self.ttl_s:
            return None
        generation, rows, prefixes, token = json.loads(bytes(found[1]))
        if generation != self.generation():
            return None
        page = Page([_info(row) for row in rows], prefixes, token)
        self._learn(page, time.monotonic() - age_s, generation)
        return page

    def keep_page(self, operation: ListPage, page: Page, sent_s: float, generation: int) -> None:
        """Remember the objects of a page in memory, and the page on disk if there is a TTL.

        Args:
            operation: The request for the page.
            page: The store's answer.
            sent_s: When the request was sent, on the monotonic clock, in seconds.
            generation: Value of ``generation()`` before the request was sent.

        Cost: about 1 ms per 1 000 keys.
        """
        self._learn(page, sent_s, generation)
        if self.ttl_s == 0 or generation != self.generation():
            return
        identity = self._identities.of_page(operation)
        rows = [_row(info) for info in page.objects]
        data = json.dumps([generation, rows, page.prefixes, page.next_token]).encode()
        self._directory.remove(entry_name(LISTING, identity))  # so that it counts no more
        self._directory.write([_new_entry(LISTING, identity, data, sent_s)])

    def _learn(self, page: Page, sent_s: float, generation: int) -> None:
        for info in page.objects:
            self.put(info.key, info, sent_s, generation)


def _new_entry(kind: int, identity: bytes, data: bytes, sent_s: float) -> NewEntry:
    wall_s = time.time() - (time.monotonic() - sent_s)
    return new_entry(kind, entry_name(kind, identity), identity, memoryview(data), sent_s=wall_s)


def is_version(etag: str | None) -> bool:
    """Whether an ETag identifies the bytes of an object; a weak one (``W/"..."``) only identifies its meaning."""
    return etag is not None and not etag.startswith("W/")


def _with_kept_headers(info: ObjectInfo, before: ObjectInfo | None) -> ObjectInfo:
    """Return a record with those of its headers that describe the object; a listing has none, and takes those seen before.

    Cost: 1.5 µs for each answer with headers.
    """
    if info.headers:
        return info._replace(headers=kept_headers(info.headers))
    if before is not None and before.headers and before.etag == info.etag:
        return info._replace(headers=before.headers)
    return info


def kept_headers(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the headers of an answer that describe the object, and not the answer."""
    return {name: value for name, value in headers.items() if name in _KEPT_HEADERS or name.startswith(_KEPT_PREFIXES)}


def _row(info: ObjectInfo) -> list[object]:
    kept = kept_headers(info.headers) if info.headers else {}
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in kept.items()}
    return [info.key, info.size_bytes, info.etag, info.last_modified_s, dict(info.checksums), headers]


def _info(row: list[Any]) -> ObjectInfo:
    key, size_bytes, etag, last_modified_s, checksums, *more = row
    headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in more[0].items()} if more else {}
    return ObjectInfo(key, size_bytes, etag, last_modified_s, checksums=checksums, headers=headers)
