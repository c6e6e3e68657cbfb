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
        inode: Inode number, 64 bits.
        parent: Inode number of its parent; its own for the root.
        prefix: Prefix of its keys: empty, or ends with a slash.
        listing: Newest listing of the directory, or None.
        is_read: Whether a program has read entries of `listing`.
        queries_count: Names that the store was asked for one by one since `listing` was begun.
    """

    __slots__ = ("inode", "is_read", "listing", "parent", "prefix", "queries_count")

    def __init__(self, inode: int, *, parent: int, prefix: str) -> None:
        self.inode = inode
        self.parent = parent
        self.prefix = prefix
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
    """The folders by inode number, and a bound on the entries that their listings hold. Callers hold a lock.

    Args:
        root: The root of the mount.
        entries_max: The most entries that listings hold together; the listing that was not used for the longest time is dropped
            first. One listing may be longer than that.
    """

    __slots__ = ("_by_inode", "_entries_count", "_entries_max", "_hidden", "_listed", "root")

    def __init__(self, root: Folder, *, entries_max: int) -> None:
        self.root = root
        self._by_inode: dict[int, Folder] = {root.inode: root}
        self._listed: OrderedDict[int, Folder] = OrderedDict()  # those with a listing, the last used one last
        self._entries_max = entries_max
        self._entries_count = 0
        self._hidden: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_inode)

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
        """Return a folder by its inode number."""
        return self._by_inode.get(inode)

    def add(self, inode: int, *, parent: int, prefix: str) -> Folder:
        """Return the folder of this number and prefix, which is made if it is new."""
        folder = self._by_inode.get(inode)
        if folder is None or folder.prefix != prefix:
            if folder is not None:
                self.set_listing(folder, None)
            folder = self._by_inode[inode] = Folder(inode, parent=parent, prefix=prefix)
        return folder

    def set_listing(self, folder: Folder, listing: DirectoryListing | None) -> None:
        """Replace the listing of a folder."""
        if folder.listing is not None:
            self._entries_count -= folder.listing.entries_count
        folder.listing, folder.is_read, folder.queries_count = listing, False, 0
        self._listed.pop(folder.inode, None)
        if listing is not None:
            self._entries_count += listing.entries_count
            self._listed[folder.inode] = folder

    def use(self, folder: Folder) -> None:
        """Note that the listing of a folder is used."""
        if folder.inode in self._listed:
            self._listed.move_to_end(folder.inode)

    def grow(self, folder: Folder, added_count: int) -> list[Folder]:
        """Note that the listing of a folder has grown; return the folders whose listings were dropped for it."""
        self._entries_count += added_count
        dropped = []
        while self._entries_count > self._entries_max and len(self._listed) > 1:
            oldest = next(iter(self._listed.values()))
            self.set_listing(oldest, None)
            dropped.append(oldest)
        return dropped

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

    def drop(self, inode: int) -> None:
        """Forget a folder, unless it has a listing."""
        folder = self._by_inode.get(inode)
        if folder is not None and folder.listing is None and folder is not self.root:
            del self._by_inode[inode]

    def above(self, folder: Folder) -> Iterator[Folder]:
        """Iterate the parents of a folder, up to the root."""
        while folder is not self.root:
            parent = self._by_inode.get(folder.parent)
            if parent is None:
                return
            yield parent
            folder = parent
