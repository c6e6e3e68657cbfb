"""Which directories a program that walks through the tree will read next.

``find``, ``cp -r`` and ``os.walk`` read a directory, then the first one in it, and so on: depth first, in the order of the
listing. Each of these reads would cost one round trip if it began when the program asks for it. So once a program has read a
directory and then opens one below it, the directories that follow in this order are listed ahead: a few at first, and twice as
many each time that one of them is read.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.mount.namespace.folders import Folder, FolderTable

FIRST_AHEAD = 4
"""Directories to list ahead when a walk is first seen; if it was none, this many requests were wasted."""

AHEAD_MAX = 64
"""The most directories to list ahead: at 30 ms per listing, 2 000 directories per second."""

_PREDICTED_MAX = 16 * AHEAD_MAX


class WalkAhead:
    """Chooses the directories to list ahead. Callers hold a lock.

    Args:
        folders: The folders that are known.
        is_listed: Whether a folder has a listing that may still be used.
    """

    __slots__ = ("_ahead_count", "_current", "_folders", "_is_listed", "_predicted")

    def __init__(self, folders: FolderTable, *, is_listed: Callable[[Folder], bool]) -> None:
        self._is_listed = is_listed
        self._folders = folders
        self._ahead_count = 0
        self._current: Folder | None = None
        self._predicted: set[str] = set()  # prefixes of directories that were listed ahead and not opened yet

    def opened(self, folder: Folder) -> list[Folder]:
        """Note that a program opens a directory; return the directories to list ahead."""
        if folder.prefix in self._predicted:
            self._predicted.discard(folder.prefix)
            self._ahead_count = min(2 * self._ahead_count, AHEAD_MAX)
        elif any(parent.is_read for parent in islice(self._folders.above(folder), 1)):
            # Several programs may walk at the same time, and each of them is predicted now and then.
            self._ahead_count = max(FIRST_AHEAD, self._ahead_count // 2)
        else:
            self._ahead_count = 0
        self._current = folder
        return self.extend()

    def extend(self) -> list[Folder]:
        """Return the directories to list ahead that are known by now, after a page has arrived."""
        if not self._ahead_count or self._current is None:
            return []
        ahead = list(islice(self._following(self._current), self._ahead_count))
        missing = [folder for folder in ahead if not self._is_listed(folder)]
        if len(self._predicted) > _PREDICTED_MAX:  # a walk that leaves most directories out
            self._predicted.clear()
        self._predicted.update(folder.prefix for folder in missing)
        return missing

    def _following(self, folder: Folder) -> Iterator[Folder]:
        """Iterate the directories after `folder` in the order of a walk, as far as listings show them."""
        yield from self._inside(folder, "")
        for parent in self._folders.above(folder):
            if not parent.is_read:
                return
            yield from self._inside(parent, folder.prefix)
            folder = parent

    def _inside(self, folder: Folder, after: str) -> Iterator[Folder]:
        for prefix in folder.sub_prefixes_after(after):
            child = self._folders.at(prefix)
            yield child
            yield from self._inside(child, "")
