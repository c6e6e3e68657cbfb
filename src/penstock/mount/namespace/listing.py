"""The listing of one directory, whose pages are requested one by one when a caller needs them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.errors import PenstockError, ProtocolError, as_completion_error
from penstock.mount.namespace.names import begin, key_of, page_entries
from penstock.mount.nodes import Absent
from penstock.types import ListPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.mount.namespace.names import PageEntries
    from penstock.types import Completion, Core, ObjectInfo, Page, Transfer

PAGE_KEYS = 1000
"""Keys per page, the most that S3 gives."""

AHEAD_ENTRIES = 2 * PAGE_KEYS
"""Entries to request ahead of a reader, which takes about 5 ms for a page of them."""


class EntriesPiece(NamedTuple):
    """Consecutive entries of one page.

    Attributes:
        names: Their names.
        infos: Their objects, or prefixes for directories.
        seen_s: Time of the request for the page, on the monotonic clock.
    """

    names: Sequence[bytes]
    infos: Sequence[ObjectInfo]
    seen_s: float


PieceThen: TypeAlias = "Callable[[EntriesPiece | PenstockError], None]"
"""Receives entries, none at the end of the directory, or why they are not known."""

_Answered: TypeAlias = "tuple[PieceThen, EntriesPiece | PenstockError]"


class _Waiter(NamedTuple):
    offset: int
    count_max: int
    then: PieceThen


class DirectoryListing:
    """One listing of one directory. Its methods may be called from any thread.

    A key that is also the prefix of others is a directory, and the file of the same name is hidden. The prefix ``a/`` comes
    after the key ``a`` in key order, but ``a-1`` and ``a.txt`` come between them, so it may be on a later page. Files for which
    this is not known yet are held back: their keys are prefixes of the last key of the page, so there are never many of them.

    Attributes:
        prefix: Prefix of the directory.
        begun_s: When it was begun, on the monotonic clock.
        entries_count: Number of entries that are known.
        hidden_count: Number of keys that no path can express, or that a directory of the same name hides.
        sub_prefixes: Prefixes of the directories in it, in order.

    Args:
        store: Store that is listed.
        prefix: Prefix of the directory: empty, or ends with a slash.
        on_page: Called after each page that has arrived, with the listing and the number of entries that it added.

    Cost: One request per 1 000 keys; about 350 bytes per entry.
    """

    __slots__ = (
        "_busy",
        "_carried",
        "_complete",
        "_ends",
        "_held_back",
        "_last",
        "_lasts",
        "_lock",
        "_on_page",
        "_pages",
        "_store",
        "_token",
        "_transfer",
        "_waiters",
        "_wanted_count",
        "begun_s",
        "entries_count",
        "hidden_count",
        "prefix",
        "sub_prefixes",
    )

    def __init__(self, store: Core, prefix: str, *, on_page: Callable[[DirectoryListing, int], None]) -> None:
        self.prefix = prefix
        self.begun_s = time.monotonic()
        self.entries_count = 0
        self.hidden_count = 0
        self.sub_prefixes: list[str] = []
        self._store = store
        self._on_page = on_page
        self._lock = threading.Lock()
        self._pages: list[EntriesPiece] = []
        self._ends: list[int] = []  # for each page, the number of entries up to its end
        self._lasts: list[str] = []  # for each page, its last key
        self._last = ""
        self._held_back: list[tuple[bytes, ObjectInfo]] = []
        self._carried: dict[str, tuple[ObjectInfo, float]] = {}  # files that are on a later page than their key says
        self._token: str | None = None
        self._transfer: Transfer | None = None
        self._busy = False
        self._complete = False
        self._wanted_count = 0
        self._waiters: list[_Waiter] = []

    def want(self, count: int) -> None:
        """Request pages until `count` entries are known, or the directory ends."""
        with self._lock:
            self._wanted_count = max(self._wanted_count, count)
            operation = self._next_operation()
        self._submit(operation)

    def read(self, offset: int, count_max: int, then: PieceThen) -> None:
        """Hand out at most `count_max` entries from number `offset` on, as soon as they are known; none at the end."""
        with self._lock:
            self._wanted_count = max(self._wanted_count, offset + count_max + AHEAD_ENTRIES)
            piece = self._piece(offset, count_max)
            if piece is None:
                self._waiters.append(_Waiter(offset, count_max, then))
            operation = self._next_operation()
        self._submit(operation)
        if piece is not None:
            then(piece)

    def find(self, name: str) -> tuple[ObjectInfo, float] | Absent | None:
        """Find an entry by its name.

        Returns:
            The object, or the prefix of a directory, and when it was seen; None if the listing is not far enough to tell.
        """
        key = self.prefix + name
        folder = key + "/"
        with self._lock:
            if not self._complete and self._last < folder:
                return None
            return self._at(folder) or self._at(key) or self._carried.get(key) or Absent(self.begun_s)

    def following(self, name: str, count_max: int) -> EntriesPiece:
        """Return at most `count_max` known entries that come after the file `name`; they send no request."""
        key = self.prefix + name
        names: list[bytes] = []
        infos: list[ObjectInfo] = []
        with self._lock:
            index = bisect_left(self._lasts, key)
            pages = self._pages[index : index + 2]
        for page in pages:
            start = bisect_right(page.infos, key, key=key_of)
            end = start + count_max - len(infos)
            names += page.names[start:end]
            infos += page.infos[start:end]
        return EntriesPiece(names, infos, pages[0].seen_s if pages else self.begun_s)

    def cancel(self) -> None:
        """Cancel the request that is in flight; readers that wait for it end with ``CancelledOperationError``."""
        with self._lock:
            transfer = self._transfer
        if transfer is not None:
            transfer.cancel()

    # ── what is known (callers hold the lock) ──────────────────────────────────────────────────────────────────────

    def _at(self, key: str) -> tuple[ObjectInfo, float] | None:
        index = bisect_left(self._lasts, key)
        if index == len(self._pages):
            return None
        page = self._pages[index]
        at = bisect_left(page.infos, key, key=key_of)
        if at < len(page.infos) and page.infos[at].key == key:
            return page.infos[at], page.seen_s
        return None

    def _piece(self, offset: int, count_max: int) -> EntriesPiece | None:
        index = bisect_right(self._ends, offset)
        if index == len(self._pages):
            return EntriesPiece((), (), self.begun_s) if self._complete else None
        page = self._pages[index]
        start = offset - (self._ends[index] - len(page.names))
        return EntriesPiece(page.names[start : start + count_max], page.infos[start : start + count_max], page.seen_s)

    def _next_operation(self) -> ListPage | None:
        if self._busy or self._complete or (self.entries_count >= self._wanted_count and not self._waiters):
            return None
        self._busy = True
        return ListPage(self.prefix, "/", self._token, keys_max=PAGE_KEYS)

    # ── pages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, operation: ListPage | None) -> None:
        if operation is not None:
            transfer = begin(self._store, operation, partial(self._arrived, time.monotonic()))
            with self._lock:
                self._transfer = transfer

    def _arrived(self, asked_s: float, completion: Completion) -> None:
        error: PenstockError | None = completion.error
        added_count = 0
        if error is None:
            try:
                added_count = self._take(completion.value, asked_s)
            except Exception as failure:
                error = as_completion_error(failure)
        with self._lock:
            self._busy = False
            if error is not None:
                self._wanted_count = self.entries_count  # nothing is requested until somebody asks again
                ready: list[_Answered] = [(waiter.then, error) for waiter in self._waiters]
                self._waiters = []
                operation = None
            else:
                ready = self._answered()
                operation = self._next_operation()
        self._submit(operation)
        for then, answer in ready:
            then(answer)
        if error is None:
            self._on_page(self, added_count)

    def _answered(self) -> list[_Answered]:
        ready: list[_Answered] = []
        waiting = []
        for waiter in self._waiters:
            piece = self._piece(waiter.offset, waiter.count_max)
            if piece is None:
                waiting.append(waiter)
            else:
                ready.append((waiter.then, piece))
        self._waiters = waiting
        return ready

    def _take(self, page: Page, asked_s: float) -> int:
        """Add a page; return how many entries it added."""
        if page.next_token is not None and page.next_token == self._token:
            raise ProtocolError("the next page of a listing has the same token as this one")
        entries = page_entries(
            page, prefix=self.prefix, after=self._last
        )  # one page is in flight, so nobody changes _last
        with self._lock:
            self._last = entries.last
            self._token = page.next_token
            self._complete = page.next_token is None
            self.hidden_count += entries.hidden_count
            names, infos = self._settled(entries, page.prefixes, asked_s)
            start = len(self.prefix)
            self.sub_prefixes += (
                page.prefixes
                if not entries.hidden_count
                else [info.key for info in entries.infos if info.is_prefix and len(info.key) > start]
            )
            self._pages.append(EntriesPiece(names, infos, asked_s))
            self._lasts.append(entries.last)
            self.entries_count += len(names)
            self._ends.append(self.entries_count)
        return len(names)

    def _settled(
        self, entries: PageEntries, prefixes: list[str], asked_s: float
    ) -> tuple[list[bytes], list[ObjectInfo]]:
        """Return the entries that are certain now, including earlier ones, and hold back those that are not."""
        names, infos = entries.names, entries.infos
        if self._held_back:
            for _, info in self._held_back:
                self._carried[info.key] = (info, asked_s)
            names = [name for name, _ in self._held_back] + names
            infos = [info for _, info in self._held_back] + infos
        out = set()
        for prefix in prefixes:
            at = _index_of(infos, prefix[:-1])
            if at is not None:
                out.add(at)
                self._carried.pop(prefix[:-1], None)
        self.hidden_count += len(out)
        held = set() if self._complete else {at for at in self._uncertain(infos, entries.last) if at not in out}
        self._held_back = [(names[at], infos[at]) for at in sorted(held)]
        out |= held
        if not out:
            return names, infos
        kept = [at for at in range(len(names)) if at not in out]
        return [names[at] for at in kept], [infos[at] for at in kept]

    def _uncertain(self, infos: list[ObjectInfo], last: str) -> list[int]:
        """Return the numbers of files of which a later page may show that they are directories."""
        found = []
        for length in range(len(self.prefix) + 1, len(last) + 1):
            if length < len(last) and last[length] >= "/":
                continue
            at = _index_of(infos, last[:length])
            if at is not None and not infos[at].is_prefix:
                found.append(at)
        return found


def _index_of(infos: list[ObjectInfo], key: str) -> int | None:
    at = bisect_left(infos, key, key=key_of)
    return at if at < len(infos) and infos[at].key == key else None
