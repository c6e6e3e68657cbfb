"""What is known of objects without their bytes: versions and sizes, what is missing, pages of listings; and since when.

In memory it serves every process by itself: a listing tells the versions of all its keys, so that reading them pinned needs no
request. On disk, with a TTL, it serves the others and the next run. Every answer counts from when its request was
*sent*: a fact that is older than a reader's own question is believed only within the TTL, a younger one always.

Ages on disk go by the wall clock; an entry from the future is not believed. Pages end with the TTL, or when a process of
this node wrote to the bucket through its cache: every write appends a byte to ``generation-BUCKET``, whose length a
page must match.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock import forks
from penstock.cache.entry import MISSING, PAGE, STAT, digest_of, encode, entry_name, header_bytes_of, identity_of
from penstock.cache.folder import Entry
from penstock.private import open_private
from penstock.types import ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.files import Files
    from penstock.types import Key

_KEYS_COUNT_MAX = 1 << 18
"""Of objects known in memory, about 300 bytes each; the oldest half goes first."""


class Known(NamedTuple):
    """What was said of a key.

    Attributes:
        info: The object; None where there is none; without an ETag where it is one that has yet to be asked for.
        said_s: When it was asked, on the monotonic clock.
    """

    info: ObjectInfo | None
    said_s: float


class Metadata:
    """What is known of one store's objects. Safe from any thread.

    Args:
        files: Where it is kept with a TTL.
        ttl_s: How long it is believed.
        scope: Fields of every identity: namespace, and where the store's keys live.
        named: A key's name in identities, see ``scope_of``.
    """

    def __init__(self, files: Files, ttl_s: float, scope: tuple[str, ...], named: Callable[[Key], str]) -> None:
        self._files = files
        self._scope = scope
        self._named = named
        self._generation_path = f"{files.root}/generation-{digest_of(identity_of(*scope))}"
        self.ttl_s = ttl_s
        self._known: dict[Key, Known] = {}
        self._lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """The lock may have been held."""
        self._lock = threading.Lock()

    # ── objects ────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: Key) -> Known | None:
        """What this process knows of `key`, however old."""
        return self._known.get(key)

    def put(self, key: Key, info: ObjectInfo | None, said_s: float) -> None:
        """Take in what was said of `key`, unless something younger is known."""
        if info is not None and not is_version(info.etag):
            info = ObjectInfo(key, 0)
        with self._lock:
            known = self._known
            before = known.get(key)
            if before is not None and before.said_s > said_s:
                return
            if len(known) >= _KEYS_COUNT_MAX:
                for old in list(known)[: _KEYS_COUNT_MAX // 2]:
                    del known[old]
            known[key] = Known(info, said_s)

    def forget(self, key: Key) -> None:
        """`key` is being written: what it is now will be known when that ended."""
        with self._lock:
            self._known.pop(key, None)

    def changed(self, key: Key) -> None:
        """The store says that `key` is another version than was asked for; which one, it did not say."""
        self.put(key, ObjectInfo(key, 0), time.monotonic())
        self._files.remove(entry_name(STAT, self._key_identity(key)))

    def fresh(self, key: Key, asked_s: float) -> Known | None:
        """What may be believed of `key` by whoever asked at `asked_s`; looks on disk where there is a TTL."""
        known = self._known.get(key)
        if known is not None and self._believed(known, asked_s):
            return known if known.info is None or known.info.etag is not None else None
        if self.ttl_s == 0:
            return None
        for kind in (STAT, MISSING):
            known = self._kept(kind, key)
            if known is not None and self._believed(known, asked_s):
                self.put(key, known.info, known.said_s)
                return known
        return None

    def hint(self, key: Key) -> ObjectInfo | None:
        """The last version that anybody here saw, however old: its blocks may be there. To be asked before it is used."""
        known = self._known.get(key) or self._kept(STAT, key)
        return known.info if known is not None else None

    def _kept(self, kind: int, key: Key) -> Known | None:
        """What the disk says; nothing where the clock was set back since."""
        identity = self._key_identity(key)
        found = self._files.read_entry(entry_name(kind, identity), identity)
        if found is None or found[0].kind != kind:
            return None
        age_s = time.time() - found[0].said_s
        info = _info(json.loads(bytes(found[1])))._replace(key=key) if kind == STAT else None
        return Known(info, time.monotonic() - age_s) if age_s >= 0 else None

    def _believed(self, known: Known, asked_s: float) -> bool:
        return known.said_s >= asked_s or time.monotonic() - known.said_s < self.ttl_s

    def keep(self, key: Key, info: ObjectInfo | None, said_s: float, *, as_hint: bool = False) -> None:
        """Take in what was said, and keep it for others where there is a TTL, or `as_hint`. Cost: a small file."""
        self.put(key, info, said_s)
        if (self.ttl_s == 0 and not as_hint) or (info is not None and not is_version(info.etag)):
            return
        identity = self._key_identity(key)
        data = b"" if info is None else json.dumps(_row(info._replace(key=self._named(key)))).encode()
        self._replace(MISSING if info is None else STAT, identity, data, said_s)

    def written(self, key: Key) -> None:
        """`key` was written or deleted through this cache: nothing older holds, for any process of this node."""
        self.put(key, ObjectInfo(key, 0), time.monotonic())  # what is there now, the store will say
        if self.ttl_s == 0:
            return
        identity = self._key_identity(key)
        for kind in (STAT, MISSING):
            self._files.remove(entry_name(kind, identity))
        with suppress(OSError):
            fd = open_private(self._generation_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, b".")
            finally:
                os.close(fd)

    # ── listings ───────────────────────────────────────────────────────────────────────────────────────────────────

    def generation(self) -> int:
        """Writes to the bucket through caches of this node so far; to be asked before a page is."""
        try:
            return os.stat(self._generation_path).st_size  # noqa: PTH116
        except OSError:
            return 0

    def page(self, operation: ListPage) -> Page | None:
        """A page that may be believed; its objects are known from then on."""
        if self.ttl_s == 0:
            return None
        identity = self._page_identity(operation)
        found = self._files.read_entry(entry_name(PAGE, identity), identity)
        if found is None:
            return None
        age_s = time.time() - found[0].said_s
        if not 0 <= age_s < self.ttl_s:
            return None
        generation, rows, prefixes, token = json.loads(bytes(found[1]))
        if generation != self.generation():
            return None
        page = Page([_info(row) for row in rows], prefixes, token)
        self._learn(page, time.monotonic() - age_s)
        return page

    def keep_page(self, operation: ListPage, page: Page, said_s: float, generation: int) -> None:
        """Take in a page, and keep it for others where there is a TTL. Cost: about 1 ms per 1 000 keys."""
        self._learn(page, said_s)
        if self.ttl_s == 0 or generation != self.generation():
            return
        identity = self._page_identity(operation)
        rows = [_row(info) for info in page.objects]
        data = json.dumps([generation, rows, page.prefixes, page.next_token]).encode()
        self._replace(PAGE, identity, data, said_s)

    def _learn(self, page: Page, said_s: float) -> None:
        for info in page.objects:
            self.put(info.key, info, said_s)

    # ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _key_identity(self, key: Key) -> bytes:
        return identity_of(*self._scope, self._named(key))

    def _page_identity(self, operation: ListPage) -> bytes:
        fields = (operation.prefix, operation.delimiter, operation.token or "", operation.start_after)
        return identity_of(*self._scope, self._named(""), *fields, str(operation.keys_max), "page")

    def _replace(self, kind: int, identity: bytes, data: bytes, said_s: float) -> None:
        name = entry_name(kind, identity)
        self._files.remove(name)  # counted, so that the number of its folder stays right
        wall_s = time.time() - (time.monotonic() - said_s)
        header = partial(encode, kind, identity, data, said_s=wall_s)
        self._files.write([Entry(name, memoryview(data), header_bytes_of(identity, len(data)) + len(data), header)])


def is_version(etag: str | None) -> bool:
    """Whether an ETag names the bytes of an object: a weak one (``W/"..."``) only names its meaning."""
    return etag is not None and not etag.startswith("W/")


def _row(info: ObjectInfo) -> list[object]:
    return [info.key, info.size_bytes, info.etag, info.last_modified_s, dict(info.checksums)]


def _info(row: list[object]) -> ObjectInfo:
    key, size_bytes, etag, last_modified_s, checksums = row
    return ObjectInfo(key, size_bytes, etag, last_modified_s, checksums=checksums)  # type: ignore[arg-type]
