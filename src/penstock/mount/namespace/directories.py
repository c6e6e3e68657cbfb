"""The tree of names of a mount, from the listings of a store.

A lookup is answered from the part of the directory's listing that has arrived. Otherwise, the store is asked for this one name
(``PathQuery``), which takes one round trip however large the directory is.

A program that opens many files by known names would thus cost two requests per file. From the second name in a directory on,
each such query therefore also requests one more page of the directory's listing. The listing of a small directory is soon
complete, and that of a large directory never costs more requests than the queries.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import CancelledOperationError, ObjectMissingError, PenstockError
from penstock.mount.namespace.inodes import Folder, FolderTable, InodeTable, WalkAhead, key_number
from penstock.mount.namespace.listing import PAGE_KEYS, DirectoryListing, EntriesPiece
from penstock.mount.namespace.names import PathQuery, is_name
from penstock.mount.nodes import ROOT_INODE, Absent, Node
from penstock.store.base import KEY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.mount.nodes import EntriesThen, NodeThen, ReadEntries
    from penstock.types import Core, Key, ObjectInfo

ENTRIES_MAX = 1_000_000
"""The most entries that listings hold: about 350 MB, with no other limit reached before."""

AHEAD_TTL_MIN_S = 1.0
"""Shortest time to live with which directories are listed ahead of the program; below it, the result would be too old."""

_log = logging.getLogger("penstock")

_Answer: TypeAlias = "tuple[ObjectInfo, float] | Absent | PenstockError"


class StoreDirectories:
    """The directories and files of the keys of a store. No method waits, and any thread may call it.

    A node that ``look_up`` or a stream hands out has one more reference. The kernel gives it back with FORGET; whoever does not
    pass the node on to the kernel gives it back with ``forget``.

    Args:
        store: Store that is listed; its keys are the paths.
        ttl_s: Seconds for which an answer of the store may be used; ``math.inf`` for as long as the mount lives.
        entries_max: The most entries that listings hold together; one listing may be longer than that.
        number: Function that numbers keys, as ``key_number`` does.

    Cost: Two requests for a name of which nothing is known; one per 1 000 entries of a directory that is read.
    """

    def __init__(
        self,
        store: Core,
        *,
        ttl_s: float,
        entries_max: int = ENTRIES_MAX,
        number: Callable[[Key], int] = key_number,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lock = threading.RLock()
        self._nodes = InodeTable(
            Node(ROOT_INODE, b"", ROOT_INODE, None, time.time(), time.monotonic(), ROOT_INODE), number=number
        )
        self._folders = FolderTable(entries_max=entries_max)
        self._folders.refer(ROOT_INODE, "")
        self._walk = WalkAhead(self._folders, is_listed=self._is_listed)
        self._questions: set[_Question] = set()
        self._latest_questions: dict[tuple[int, bytes], _Question] = {}
        self._closed = False

    @property
    def hidden_count(self) -> int:
        """Number of keys, in the directories that were listed so far, that no path can express or that a directory hides."""
        with self._lock:
            return self._folders.hidden_count

    @property
    def entries_count(self) -> int:
        """Number of entries that listings hold."""
        with self._lock:
            return self._folders.entries_count

    @property
    def nodes_count(self) -> int:
        """Number of nodes that the kernel refers to."""
        with self._lock:
            return len(self._nodes)

    def node(self, inode: int) -> Node | None:
        """Return a node that was passed to the kernel, or None if it has been forgotten."""
        return self._nodes.get(inode)

    # ── lookups ────────────────────────────────────────────────────────────────────────────────────────────────────

    def look_up(self, parent: int, name: bytes, then: NodeThen) -> None:
        """Find an entry of a directory; its node has one more reference."""
        now_s = time.monotonic()
        ahead: DirectoryListing | None = None
        question: _Question | None = None
        wanted_count = 0
        with self._lock:
            folder = self._folders.get(parent)
            answer = self._answer_at_once(folder, name, now_s)
            if answer is None and folder is not None:
                asked = self._latest_questions.get((parent, name))
                if asked is not None and now_s - asked.begun_s < self._ttl_s:
                    asked.waiting.append(then)
                    return
                question = _Question(parent, name, now_s, [then])
                question.query = PathQuery(self._store, folder.prefix + name.decode(), partial(self._found, question))
                self._questions.add(question)
                self._latest_questions[parent, name] = question
                folder.queries_count += 1
                wanted_count = (folder.queries_count - 1) * PAGE_KEYS
                if wanted_count and self._ttl_s >= AHEAD_TTL_MIN_S:
                    ahead = self._fresh_listing(folder)
            result = self._referred(parent, name, answer) if answer is not None else None
        if result is not None:
            then(result)
        if question is not None:
            question.query.begin()
        if ahead is not None:
            ahead.want(wanted_count)

    def _answer_at_once(self, folder: Folder | None, name: bytes, now_s: float) -> _Answer | None:
        """Return the known node of a name; None if the store must be asked. Callers hold the lock."""
        if self._closed:
            return CancelledOperationError("the file system was unmounted")
        if folder is None:
            return ObjectMissingError("the directory has been forgotten")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return Absent(now_s)
        if not is_name(name) or len(folder.prefix.encode()) + len(name) > KEY_BYTES_MAX:
            return Absent(now_s)
        if folder.listing is None or not self._is_listed(folder):
            return None
        self._folders.use(folder)
        return folder.listing.find(text)

    def _found(self, question: _Question, answer: ObjectInfo | PenstockError | None) -> None:
        """Pass the answer of a question on to all who wait for it."""
        parent, name = question.parent, question.name
        found: _Answer
        if answer is None:
            found = Absent(question.begun_s)
        elif isinstance(answer, PenstockError):
            found = answer
        else:
            found = answer, question.begun_s
        with self._lock:
            self._questions.remove(question)
            if self._latest_questions.get((parent, name)) is question:
                del self._latest_questions[parent, name]
            results = [(then, self._referred(parent, name, found)) for then in question.waiting]
        for then, result in results:
            then(result)

    def _referred(self, parent: int, name: bytes, answer: _Answer) -> Node | Absent | PenstockError:
        """Return the node of an answer, with one more reference. Callers hold the lock."""
        if isinstance(answer, Absent | PenstockError):
            return answer
        return self._refer(parent, [name], [answer[0]], answer[1])[0]

    def _refer(self, parent: int, names: Sequence[bytes], infos: Sequence[ObjectInfo], seen_s: float) -> list[Node]:
        nodes = self._nodes.refer(parent, names, infos, seen_s)
        for index, node in enumerate(nodes):
            if node[3] is None:
                self._folders.refer(node.inode, infos[index].key)
        return nodes

    def forget(self, inode: int, count: int) -> None:
        """Drop `count` of the references to a node."""
        with self._lock:
            node = self._nodes.forget(inode, count)
            if node is not None and node.is_directory:
                self._folders.forget(inode)

    def drop_listing_of(self, node: Node) -> None:
        """Drop the listing that a file came from, because the store has another version of it now, or none."""
        with self._lock:
            folder = self._folders.get(node.parent)
            if folder is not None:
                self._folders.set_listing(folder, None)

    def following(self, node: Node, count_max: int) -> list[Node]:
        """Return the files that come after `node` in the listing of its directory, as far as they are known."""
        with self._lock:
            folder = self._folders.get(node.parent)
            if folder is None or folder.listing is None:
                return []
            piece = folder.listing.following(node.name.decode(), 2 * count_max)
            files = [(name, info) for name, info in zip(piece.names, piece.infos, strict=True) if not info.is_prefix]
            return [self._nodes.describe(node.parent, name, info, piece.seen_s) for name, info in files[:count_max]]

    # ── directories ────────────────────────────────────────────────────────────────────────────────────────────────

    def open_directory(self, inode: int) -> ReadEntries:
        """Begin to read a directory.

        Returns:
            A function that passes entries on, each with one more reference. It keeps the listing alive.

        Raises:
            ObjectMissingError: The kernel has forgotten the directory.
        """
        with self._lock:
            folder = self._folders.get(inode)
            if folder is None:
                raise ObjectMissingError("the directory has been forgotten")
            walked = self._walk.opened(folder) if self._ttl_s >= AHEAD_TTL_MIN_S else []
            listing = self._fresh_listing(folder)
            folder.is_read = True
            ahead = [self._fresh_listing(following) for following in walked]
        listing.want(1)
        for other in ahead:
            other.want(1)
        return partial(self._read, listing, inode)

    def _read(self, listing: DirectoryListing, inode: int, offset: int, count_max: int, then: EntriesThen) -> None:
        listing.read(offset, count_max, partial(self._pass_on, inode, then))

    def _pass_on(self, inode: int, then: EntriesThen, piece: EntriesPiece | PenstockError) -> None:
        if isinstance(piece, PenstockError):
            then(piece)
            return
        with self._lock:
            nodes = self._refer(inode, piece.names, piece.infos, piece.seen_s)
        then(nodes)

    def close(self) -> None:
        """Cancel the requests in flight. Waiting lookups end with ``CancelledOperationError``."""
        with self._lock:
            self._closed = True
            queries = [question.query for question in self._questions]
            listings = self._folders.listings()
        for query in queries:
            query.cancel()
        for listing in listings:
            listing.cancel()

    def _is_listed(self, folder: Folder) -> bool:
        return folder.listing is not None and time.monotonic() - folder.listing.begun_s < self._ttl_s

    def _fresh_listing(self, folder: Folder) -> DirectoryListing:
        """Return the listing of a folder, which is started again if it is too old. Callers hold the lock."""
        if folder.listing is not None and self._is_listed(folder):
            self._folders.use(folder)
            return folder.listing
        listing = DirectoryListing(self._store, folder.prefix, on_page=partial(self._grown, folder))
        self._folders.set_listing(folder, listing)
        return listing

    def _grown(self, folder: Folder, listing: DirectoryListing, added_count: int) -> None:
        """Account for a page that has arrived, and list its folders ahead."""
        with self._lock:
            if folder.listing is not listing:
                return
            self._folders.grow(added_count)
            is_news = self._folders.note_hidden(folder.prefix, listing.hidden_count)
            ahead = [self._fresh_listing(following) for following in self._walk.extend()] if not self._closed else []
        if is_news:
            _log.warning(
                "Keys below %s are hidden (%d): no path can express them, or a directory has the same name.",
                self._store.describe(folder.prefix),
                listing.hidden_count,
            )
        for other in ahead:
            other.want(1)


@dataclass(slots=True, eq=False)
class _Question:
    """A name that the store is asked for, and who waits for the answer.

    A later lookup of the same name waits for the same answer only as long as that answer may be used: with a time to live of 0,
    a program that looks up a name after an object was written must not get the earlier answer of the store.
    """

    parent: int
    name: bytes
    begun_s: float
    waiting: list[NodeThen]
    query: PathQuery = field(init=False)
