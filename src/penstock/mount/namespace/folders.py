"""Directories that are known, with what is kept for each: its listing above all."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.mount.namespace.listing import DirectoryListing

HIDDEN_FOLDERS_MAX = 10_000
"""Directories for which the number of hidden keys is remembered."""


class Folder:
    """What is known of one directory.

    Attributes:
        prefix: Prefix of its keys: empty, or ends with a slash.
        inode: Inode number by which the kernel refers to it; None if it does not.
        listing: Newest listing of the directory, or None.
        is_read: Whether a program has read entries of `listing`.
        queries_count: Names that the store was asked for one by one since `listing` was begun.
    """

    __slots__ = ("inode", "is_read", "listing", "prefix", "queries_count")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.inode: int | None = None
        self.listing: DirectoryListing | None = None
        self.is_read = False
        self.queries_count = 0

    def sub_prefixes_after(self, prefix: str) -> list[str]:
        """Return the prefixes of the directories in it that come after `prefix`, as far as they are known."""
        if self.listing is None:
            return []
        known = self.listing.sub_prefixes
        return known[bisect_right(known, prefix) :]


class FolderTable:
    """The folders that the kernel refers to or that have a listing. Callers hold a lock.

    Args:
        entries_max: The most entries that listings hold together; the listing that was not used for the longest time is dropped
            first. One listing may be longer than that.
    """

    __slots__ = ("_by_inode", "_by_prefix", "_entries_count", "_entries_max", "_hidden", "_listed")

    def __init__(self, *, entries_max: int) -> None:
        self._by_inode: dict[int, Folder] = {}
        self._by_prefix: dict[str, Folder] = {}
        self._listed: OrderedDict[str, Folder] = OrderedDict()  # those with a listing, the last used one last
        self._entries_max = entries_max
        self._entries_count = 0
        self._hidden: dict[str, int] = {}

    @property
    def entries_count(self) -> int:
        """Number of entries that listings hold."""
        return self._entries_count

    @property
    def hidden_count(self) -> int:
        """Number of keys in the directories that were listed so far that are not visible."""
        return sum(self._hidden.values())

    def listings(self) -> list[DirectoryListing]:
        """Return all listings that are kept."""
        return [folder.listing for folder in self._listed.values() if folder.listing is not None]

    def get(self, inode: int) -> Folder | None:
        """Return a folder that the kernel refers to by its inode number."""
        return self._by_inode.get(inode)

    def at(self, prefix: str) -> Folder:
        """Return the folder of a prefix, which is made if it is new."""
        folder = self._by_prefix.get(prefix)
        if folder is None:
            folder = self._by_prefix[prefix] = Folder(prefix)
        return folder

    def refer(self, inode: int, prefix: str) -> None:
        """Note that the kernel refers to the folder of a prefix by this number."""
        folder = self._by_inode[inode] = self.at(prefix)
        folder.inode = inode

    def forget(self, inode: int) -> None:
        """Note that the kernel no longer refers to a folder."""
        folder = self._by_inode.pop(inode, None)
        if folder is not None and folder.inode == inode:
            folder.inode = None
            self._drop_unused(folder)

    def set_listing(self, folder: Folder, listing: DirectoryListing | None) -> None:
        """Replace the listing of a folder."""
        if folder.listing is not None:
            self._entries_count -= folder.listing.entries_count
        folder.listing, folder.is_read, folder.queries_count = listing, False, 0
        self._listed.pop(folder.prefix, None)
        if listing is not None:
            self._entries_count += listing.entries_count
            self._listed[folder.prefix] = folder

    def use(self, folder: Folder) -> None:
        """Note that the listing of a folder is used."""
        if folder.prefix in self._listed:
            self._listed.move_to_end(folder.prefix)

    def grow(self, added_count: int) -> None:
        """Note that a listing has grown, and drop others for it."""
        self._entries_count += added_count
        while self._entries_count > self._entries_max and len(self._listed) > 1:
            oldest = next(iter(self._listed.values()))
            self.set_listing(oldest, None)
            self._drop_unused(oldest)

    def note_hidden(self, prefix: str, hidden_count: int) -> bool:
        """Remember how many keys of a directory are hidden; whether that is news."""
        before = self._hidden.get(prefix, 0)
        if hidden_count:
            self._hidden[prefix] = hidden_count
        else:
            self._hidden.pop(prefix, None)
        while len(self._hidden) > HIDDEN_FOLDERS_MAX:
            del self._hidden[next(iter(self._hidden))]
        return hidden_count > before

    def above(self, folder: Folder) -> Iterator[Folder]:
        """Iterate the parents of a folder, up to the root."""
        prefix = folder.prefix
        while prefix:
            prefix = prefix[: prefix.rfind("/", 0, -1) + 1]
            parent = self._by_prefix.get(prefix)
            if parent is None:
                return
            yield parent

    def _drop_unused(self, folder: Folder) -> None:
        if folder.inode is None and folder.listing is None:
            self._by_prefix.pop(folder.prefix, None)
