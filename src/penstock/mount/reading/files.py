"""Open files of a mount: which of them share an object, and which are requested before they are opened."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import Cached
from penstock.config import MIB
from penstock.errors import ClosedError
from penstock.fetch.positioned import PositionedObject
from penstock.fetch.positioned_reads import PositionedReads
from penstock.mount.reading.walk import DirectoryWalk, beginning_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from penstock.errors import PenstockError
    from penstock.fetch import Budget
    from penstock.mount.nodes import Node
    from penstock.mount.reading.walk import FollowingFiles
    from penstock.store.base import Store
    from penstock.types import Key, ObjectInfo

_WALKS_MAX = 64
"""Directories that are gone through at the same time."""
_AHEAD_BYTES_MAX = 64 * MIB
"""Bytes of files that were requested before they are opened, or an eighth of the budget if that is less."""


class StoreFiles:
    """The open files of a store. It owns the memory of all of them, within the process's byte budget.

    All threads may use it, and no method waits.

    Args:
        store: The store.
        following: Returns the files that a directory has after one; None requests no file before it is opened.
        budget: The budget that all bytes are charged to; None takes the store's.

    Cost: No thread. Memory within the budget, and what reads wait for.
    """

    def __init__(self, store: Store, *, following: FollowingFiles | None = None, budget: Budget | None = None) -> None:
        cached = store if isinstance(store, Cached) else None
        self._budget = budget or store.budget
        self._reads = PositionedReads(
            store,
            config=store.fetch_config,
            budget=self._budget,
            at_hand=cached.read_nowait if cached is not None else None,
            fit_part=cached.config.whole_blocks if cached is not None else None,
        )
        self._following = following
        self._shared: dict[Hashable, _SharedObject] = {}
        self._ahead: OrderedDict[Key, tuple[Node, PositionedObject]] = OrderedDict()  # requested and not opened
        self._ahead_bytes = 0
        self._walks: OrderedDict[int, DirectoryWalk] = OrderedDict()  # by inode of the directory
        self._closed = False
        self._lock = threading.Lock()

    def open_file(self, node: Node) -> StoreFile:
        """Open a file, of the version that `node` has. This sends no request.

        Raises:
            ClosedError: ``close()`` was called.
        """
        info = node.info
        assert info is not None  # a file
        version = _version_of(info)
        outdated: PositionedObject | None = None
        with self._lock:
            if self._closed:
                raise ClosedError("the mount was closed")
            shared = self._shared.get(version)
            is_shared = shared is not None and not shared.object.is_outdated
            if shared is None or not is_shared:
                found, found_version = self._take_ahead(info.key)
                if found is not None and (found_version != version or found.is_outdated):
                    outdated, found = found, None
                shared = self._shared[version] = _SharedObject(version, found or PositionedObject(self._reads, info))
            shared.files_count += 1
        if outdated is not None:
            outdated.close()
        return StoreFile(self, node, shared, keeps_pages=is_shared or info.etag is not None)

    def close(self) -> None:
        """Cancel the requests in flight, and drop everything; idempotent."""
        with self._lock:
            self._closed = True
            shared, self._shared = list(self._shared.values()), {}
            ahead, self._ahead = list(self._ahead.values()), OrderedDict()
            self._ahead_bytes = 0
        for one in shared:
            one.object.close()
        for _, requested in ahead:
            requested.close()

    # ── for the files ──────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, node: Node, *, waits: bool) -> None:
        """Request the files that are probably read next, after the first read of an open file."""
        if self._following is None:
            return
        bytes_max = min(_AHEAD_BYTES_MAX, self._budget.bytes_max // 8)
        requested: list[PositionedObject] = []
        dropped: list[PositionedObject] = []
        with self._lock:
            if self._closed:
                return
            walk = self._walks.get(node.parent)
            if walk is None:
                walk = self._walks[node.parent] = DirectoryWalk(self._following, bytes_max=bytes_max)
                if len(self._walks) > _WALKS_MAX:
                    self._walks.popitem(last=False)
            self._walks.move_to_end(node.parent)
            for following in walk.read(node, waits=waits):
                self._open_ahead(following, requested)
            for key in walk.take_given_up():
                found, _ = self._take_ahead(key)
                if found is not None:
                    dropped.append(found)
            while self._ahead_bytes > bytes_max:
                self._drop_oldest(dropped)
        for one in dropped:  # first, so that their memory is free for the others
            one.close()
        for one in requested:
            one.request_beginning()

    def release(self, shared: _SharedObject) -> None:
        """Close an object when the last file that uses it is closed."""
        with self._lock:
            shared.files_count -= 1
            if shared.files_count:
                return
            if self._shared.get(shared.version) is shared:
                del self._shared[shared.version]
        shared.object.close()

    def _open_ahead(self, node: Node, requested: list[PositionedObject]) -> None:
        info = node.info
        assert info is not None
        if _version_of(info) not in self._shared and info.key not in self._ahead:
            opened = PositionedObject(self._reads, info)
            requested.append(opened)
            self._ahead[info.key] = node, opened
            self._ahead_bytes += beginning_bytes(node)

    def _take_ahead(self, key: Key) -> tuple[PositionedObject | None, Hashable]:
        """Return the request for an object that was made before it was opened, and its listed version."""
        node, found = self._ahead.pop(key, (None, None))
        if node is None or node.info is None or found is None:
            return None, None
        self._ahead_bytes -= beginning_bytes(node)
        return found, _version_of(node.info)

    def _drop_oldest(self, dropped: list[PositionedObject]) -> None:
        _, (node, requested) = self._ahead.popitem(last=False)
        self._ahead_bytes -= beginning_bytes(node)
        dropped.append(requested)
        walk = self._walks.get(node.parent)
        if walk is not None:
            walk.dropped(node)


@dataclass(slots=True, eq=False)
class _SharedObject:
    """An object that open files share, because the kernel may send the requests of one program to any of them."""

    version: Hashable
    object: PositionedObject
    files_count: int = 0


class StoreFile:
    """One open file of a store. ``StoreFiles.open_file`` makes it."""

    __slots__ = ("_files", "_is_new", "_node", "_shared", "keeps_pages")

    def __init__(self, files: StoreFiles, node: Node, shared: _SharedObject, *, keeps_pages: bool) -> None:
        self.keeps_pages = keeps_pages
        self._files = files
        self._node = node
        self._shared: _SharedObject | None = shared
        self._is_new = True

    def read(
        self, offset: int, length_bytes: int, then: Callable[[Sequence[memoryview] | PenstockError], None]
    ) -> None:
        """Read `length_bytes` bytes from `offset` on, fewer only at the end of the file; `then` receives them."""
        shared = self._shared
        if shared is None:
            then(ClosedError("the file was closed"))
            return
        shared.object.read(offset, length_bytes, then, reader=self)
        if self._is_new:
            self._is_new = False
            self._files.begun(self._node, waits=shared.object.is_waiting)

    def close(self) -> None:
        """Drop all pieces, and cancel the requests in flight; idempotent."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.object.abandon(self)
            self._files.release(shared)


def _version_of(info: ObjectInfo) -> Hashable:
    """Return a key that is equal for two files that may share an object: the same version of the same key."""
    return info.key, info.size_bytes, info.etag or info.last_modified_s
